"""Cross-entropy of a slice of the logits in plain torch; softmax in fp32, fp64 for fp64."""

from collections.abc import Callable

from torch import Tensor

from memo_kernels.ops import wide_dtype


def logit_sums(
    logits: Tensor, labels: Tensor, num_valid: int, largest: Callable[[Tensor], Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    """Return this rank's sums for the loss, which the ranks of a tp group add up.

    Args:
        logits: [c, v]; columns from num_valid on are padding. May be overwritten.
        labels: [c] int64, the label's column, or negative if another rank holds it.
        largest: maps this rank's maximum of each row to the maximum over all ranks, both [c]; may work in place.

    Returns (maximum over all ranks, sum of exp(logit - maximum), the label's logit or 0), each [c].
    """
    wide = _widened(logits, num_valid)
    target = wide.gather(-1, labels.clamp(min=0).unsqueeze(-1)).squeeze(-1).masked_fill(labels < 0, 0.0)
    maximum = largest(wide.amax(-1))
    return maximum, wide.sub_(maximum.unsqueeze(-1)).exp_().sum(-1), target


def logit_gradient_(logits: Tensor, labels: Tensor, lse: Tensor, grad: Tensor, num_valid: int) -> None:
    """Write (softmax - one-hot label) * grad over the logits [c, v]; lse, over all ranks, and grad are [c]."""
    wide = _widened(logits, num_valid).sub_(lse.unsqueeze(-1)).exp_()
    mine = (labels >= 0).to(wide.dtype)
    wide.scatter_add_(-1, labels.clamp(min=0).unsqueeze(-1), -mine.unsqueeze(-1))
    wide.mul_(grad.unsqueeze(-1))
    if wide is not logits:
        logits.copy_(wide)


def _widened(logits: Tensor, num_valid: int) -> Tensor:
    """Return the logits in the wide dtype, with padding at -inf; wide logits are changed in place."""
    wide = logits.to(wide_dtype(logits.dtype))
    wide[:, num_valid:] = float("-inf")
    return wide
