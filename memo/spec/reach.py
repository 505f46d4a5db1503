"""The most tokens of one call of an attention kernel: the last element of each of its tensors lies within 2^31.

A kernel that computes the index of an element in 32 bits reads a wrong place from the 2^31st element on: wrong
gradients or an illegal access. It counts from the beginning of the tensor that it is given, so a part of a larger
tensor is within its reach. Not all kernels that memo calls are known to use 64 bits, and a run must not depend on the
kernel that serves it. So calls are cut alike for all kernels, and a run has the same calls and memory with each.

    kernels                     known to index in 64 bits
    FlashAttention 2, forward   yes: strides and offsets of its tensors are int64 (csrc/flash_attn/src/flash.h)
    FlashAttention 2, backward  its tensors yes; of its fp32 sums of dQ since #2260 of 15 February 2026 alone
    FlashAttention 3            strides are int64 (hopper/flash.h); sizes of tensors since #1841 of August 2025
    FlashAttention 4            no: its backward read a strided output gradient in 32 bits (issue #2611)
    cuDNN, in torch and in TE   no: its interface has 64-bit strides, its kernels are closed, and its notes do not say
    memo_kernels                yes: tests/kernels has rows that lie 2^31 elements apart
    torch's elementwise ones    yes: they cut what 32 bits do not reach (ATen/native/TensorIterator.cpp)

Numbers are those of issues and pull requests of github.com/Dao-AILab/flash-attention. MSLK #257 mends the same fault in
other attention kernels at 2M tokens, and pytorch #190857 tells it of FlexAttention's backward.
"""

from collections.abc import Iterator
from typing import NamedTuple

REACH = 1 << 31
"""Elements that a signed index of 32 bits reaches from the beginning of a tensor."""

_KERNEL_TOKENS = 128
"""Kernels work on blocks of 128 tokens or fewer: cuts between blocks leave no partial block."""


def most_tokens(row_elements: int) -> int:
    """Tokens of each sequence whose rows, `row_elements` elements apart, lie within reach; at least 1."""
    tokens = max(1, REACH // row_elements)
    return tokens // _KERNEL_TOKENS * _KERNEL_TOKENS or tokens


class Part(NamedTuple):
    """Queries [q_start, q_stop) and keys [k_start, k_stop) of a block of scores, counted from its first ones."""

    q_start: int
    q_stop: int
    k_start: int
    k_stop: int
    causal: bool


def parts(queries: int, keys: int, causal: bool, most: int) -> Iterator[Part]:
    """A block of scores in parts of at most `most` queries and `most` keys; a smaller block is a single part.

    A larger causal square becomes squares along its diagonal, each followed by the rectangles before it.
    """
    for start in range(0, queries, most):
        stop = min(start + most, queries)
        if causal:
            yield Part(start, stop, start, stop, True)
        before = start if causal else keys
        for first in range(0, before, most):
            yield Part(start, stop, first, min(first + most, before), False)
