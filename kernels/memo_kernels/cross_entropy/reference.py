"""Cross-entropy of a slice of the logits in plain torch; softmax in fp32, fp64 for fp64."""

import torch
from torch import Tensor


def logit_sums(logits: Tensor, labels: Tensor, num_valid: int) -> tuple[Tensor, Tensor, Tensor]:
    """What the ranks of a tp group add up to the loss.

    Args:
        logits: [c, v], of which columns from num_valid on are padding.
        labels: [c] int64, a column, or negative where another rank holds it.

    Returns (maximum, sum of exp(logit - maximum), the label's logit or 0), each [c].
    """
    wide = _widened(logits, num_valid)
    mine = labels >= 0
    target = wide.gather(-1, labels.clamp(min=0).unsqueeze(-1)).squeeze(-1).masked_fill(~mine, 0.0)
    maximum = wide.amax(-1)
    return maximum, wide.sub_(maximum.unsqueeze(-1)).exp_().sum(-1), target


def logit_gradient(logits: Tensor, labels: Tensor, lse: Tensor, grad: Tensor, num_valid: int) -> Tensor:
    """(softmax - one-hot label) * grad, [c, v] in logits' dtype, which may be overwritten; lse and grad are [c]."""
    wide = _widened(logits, num_valid).sub_(lse.unsqueeze(-1)).exp_()
    mine = (labels >= 0).to(wide.dtype)
    wide.scatter_add_(-1, labels.clamp(min=0).unsqueeze(-1), -mine.unsqueeze(-1))
    return wide.mul_(grad.unsqueeze(-1)).to(logits.dtype)


def _widened(logits: Tensor, num_valid: int) -> Tensor:
    wide = logits.to(torch.float64 if logits.dtype == torch.float64 else torch.float32)
    wide[:, num_valid:] = float("-inf")
    return wide
