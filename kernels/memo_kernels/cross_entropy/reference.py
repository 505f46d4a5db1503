"""Cross-entropy of a slice of the logits in plain torch; softmax in fp32, fp64 for fp64."""

from collections.abc import Callable

import torch
from torch import Tensor

from memo_kernels.ops import wide_dtype


def logit_sums(
    logits: Tensor, labels: Tensor, num_valid: int, largest: Callable[[Tensor], Tensor]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return this rank's sums for the loss, which the ranks of a tp group add up, and what `logit_gradient_` needs.

    Args:
        logits: [c, v]; columns from num_valid on are padding. May be overwritten.
        labels: [c] int64, the label's column, or negative if another rank holds it.
        largest: maps this rank's maximum of each row to the maximum over all ranks, both [c]; may work in place.

    Returns (maximum over all ranks, sum of exp(logit - maximum), the label's logit or 0), each [c], and
    exp(logit - maximum) [c, v].
    """
    wide = wide_dtype(logits.dtype)
    logits[:, num_valid:] = float("-inf")
    target = logits.gather(-1, labels.clamp(min=0).unsqueeze(-1)).squeeze(-1).to(wide).masked_fill_(labels < 0, 0.0)
    maximum = largest(logits.amax(-1).to(wide))
    exponentials = _minus(logits, maximum.unsqueeze(-1)).exp_()
    return maximum, exponentials.sum(-1), target, exponentials


def logit_gradient_(
    logits: Tensor, exponentials: Tensor, labels: Tensor, maximum: Tensor, total: Tensor, grad: Tensor, num_valid: int
) -> None:
    """Write (softmax - one-hot label) * grad over the logits [c, v].

    exponentials [c, v] are those of `logit_sums`, and are overwritten; maximum and total [c] are its sums over all
    ranks; grad [c] is in their dtype.
    """
    mine = (labels >= 0).to(total.dtype).mul_(total).neg_().unsqueeze(-1)
    exponentials.scatter_add_(-1, labels.clamp(min=0).unsqueeze(-1), mine)
    rows = (grad / total).unsqueeze(-1)
    if logits.is_cuda:
        torch.mul(exponentials, rows, out=logits)
    else:
        logits.copy_(exponentials.mul_(rows))


def _minus(logits: Tensor, rows: Tensor) -> Tensor:
    """Return logits - rows in the dtype of `rows`; logits of that dtype are overwritten.

    On a GPU one kernel widens and subtracts, as one narrows and multiplies above. On a CPU torch would convert such
    operands to temporary tensors first.
    """
    return logits - rows if logits.is_cuda and logits.dtype != rows.dtype else logits.to(rows.dtype).sub_(rows)
