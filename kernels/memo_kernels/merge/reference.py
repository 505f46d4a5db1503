"""Merging in plain torch."""

import torch
from torch import Tensor


def merge_(total_out: Tensor, total_lse: Tensor, out: Tensor, lse: Tensor) -> None:
    """Merge a partial out [b, n, s, d] and lse [b, n, s] into the running out and lse, in place.

    l = log(e^l1 + e^l2), o = o1 e^(l1 - l) + o2 e^(l2 - l); running values are fp32 or wider, with any strides.
    """
    merged = torch.logaddexp(total_lse, lse)
    total_out.mul_((total_lse - merged).exp_().unsqueeze(-1))
    total_out.add_(out * (lse - merged).exp_().unsqueeze(-1))
    total_lse.copy_(merged)
