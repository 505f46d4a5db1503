"""Frozen matrices in few bits: blocks of 64 numbers, each with a scale (Dettmers et al., QLoRA, 2023).

    format    a number is the largest one of its block times        bytes of a number
    nf4       one of 16 quantiles of the normal distribution        1/2 + 4/64
    int8      a whole number from -127 to 127, over 127             1 + 4/64

Scales are fp32, as in bitsandbytes without double quantisation. With double quantisation a scale would depend on all
others of its tensor, and so on how the ranks divide the tensor. A block has consecutive numbers of the part of a matrix
that a tensor-parallel rank holds. If 64 divides the rows of this part, blocks and values are the same in every layout.
"""

from memo.config.model import Quantization

BLOCK = 64
"""Numbers with one scale; each matrix begins at a multiple of it in its bucket (memo.spec.buckets.ALIGNMENT)."""
SCALE_BYTES = 4
CHUNK = 1 << 22
"""Numbers that are dequantised at a time."""
KERNELS = 3
"""Kernels that dequantise CHUNK numbers."""
_BITS: dict[Quantization, int] = {"nf4": 4, "int8": 8}


def code_bytes(quantize: Quantization, numel: int) -> int:
    """Bytes of the codes of `numel` numbers, a multiple of BLOCK, without their scales."""
    return numel * _BITS[quantize] // 8 if numel else 0


def coded_bytes(quantize: Quantization, numel: int) -> int:
    """Bytes of the codes of `numel` numbers with their scales."""
    return code_bytes(quantize, numel) + numel // BLOCK * SCALE_BYTES


def passed_bytes(quantize: Quantization, numel: int, narrow: int) -> float:
    """Bytes that kernels read and write to dequantise `numel` numbers to `narrow` bytes each (memo.parallel.quantized):
    codes, indices (nf4), numbers in fp32 twice, scales, and the numbers."""
    each = {"none": 0.0, "nf4": 0.5 + 2 * 2 + 2 * 4, "int8": 1 + 2 * 4}[quantize]
    return numel * (each + SCALE_BYTES / BLOCK + narrow) if each else 0.0


def workspace_bytes(numel: int) -> int:
    """Workspace to dequantise buckets of at most `numel` numbers: an int32 index for two numbers, and each number in
    fp32."""
    return min(numel, CHUNK) * (2 + 4)
