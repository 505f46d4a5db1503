"""Weights in MXFP4, the format of gpt-oss: numbers of 4 bits, 32 of which share a power of two.

A matrix NAME [..., out, in] is stored in two tensors: NAME_blocks [..., out, in / 32, 16] uint8, with two numbers in
each byte, the first in the lower half, and NAME_scales [..., out, in / 32] uint8, exponents + 127. Source: OCP
Microscaling Formats (MX) Specification v1.0, sections 5.1 and 5.3.3 (E8M0 and FP4 E2M1).
"""

import torch
from torch import Tensor

BLOCKS, SCALES = "_blocks", "_scales"
BLOCK = 32
"""Numbers that share a scale."""
DTYPE = torch.bfloat16
"""A dtype that holds each value exactly."""
_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_BIAS = 127


def unpack(blocks: Tensor, scales: Tensor) -> Tensor:
    """[..., n, 16] and [..., n] uint8 -> [..., 32 n] bf16."""
    values = torch.tensor([*_VALUES, *(-value for value in _VALUES)], dtype=DTYPE)
    numbers = torch.stack((blocks & 0x0F, blocks >> 4), dim=-1).flatten(-2)
    return torch.ldexp(values[numbers.int()], (scales.int() - _BIAS).unsqueeze(-1)).flatten(-2)
