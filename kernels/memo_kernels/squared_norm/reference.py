"""Sum of squares in plain torch."""

import torch
from torch import Tensor

CHUNK = 1 << 20
"""Elements that are widened at a time: 8 MiB of fp64. A chunk 16 times smaller took twice as long on a CPU, and would
launch thousands of small kernels on a GPU."""


def squared_norm(x: Tensor) -> Tensor:
    """Return the sum of squares of a 1-D tensor, as an fp64 scalar.

    The square of an fp32 (or narrower) number is exact in fp64, so only additions round. In any order of additions, the
    sum of n elements is off by at most (CHUNK + n / CHUNK + 4) 2^-53 of itself: 1.2e-10 for each n below 2^40. fp32
    sums stop growing: for 40M normal numbers they lost 0.3 to 0.6 % on a CPU, depending on its lanes and threads.

    Takes 8 MiB of temporary memory, or 8 bytes an element if `x` is smaller; none for an fp64 tensor.
    """
    norms = [torch.linalg.vector_norm(part, dtype=torch.float64) for part in x.split(CHUNK)]
    return torch.stack(norms).square().sum()
