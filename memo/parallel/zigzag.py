"""The tokens of the sequence that a context-parallel rank holds, and their order.

The sequence is cut into 2 cp chunks, and rank r holds chunks r and 2 cp - 1 - r ("zigzag"). So every rank has both
early and late queries, and the same share of the causal triangle. If layers are swept tile by tile
(memo.executor.sweep), each tile is cut like this by itself, so that all ranks have tokens of the same tile at one time.
"""

import torch
from torch import Tensor

from memo.attention.blocks import Chunk
from memo.errors import ConfigError


def zigzag_chunks(seq_length: int, cp_size: int, cp_rank: int) -> tuple[Chunk, Chunk]:
    """The two chunks of the sequence that rank ``cp_rank`` of ``cp_size`` holds, lower first.

    Raises ConfigError unless seq_length is a multiple of 2 cp_size; for one rank any length is valid.
    """
    if cp_size == 1:
        half = seq_length // 2
        return Chunk(0, half, 0), Chunk(half, seq_length - half, half)
    if seq_length % (2 * cp_size):
        raise ConfigError(
            f"seq_length is {seq_length} and context_parallel_size {cp_size}: each rank holds 2 equal "
            f"chunks; make seq_length a multiple of {2 * cp_size}"
        )
    length = seq_length // (2 * cp_size)
    return Chunk(cp_rank * length, length, 0), Chunk((2 * cp_size - 1 - cp_rank) * length, length, length)


def token_indices(seq_length: int, cp_size: int, cp_rank: int, parts: int = 1) -> Tensor:
    """Global positions of the tokens of one rank, in its local order: int64 [seq_length / cp_size].

    ``parts``: equal parts of the sequence, each of which is cut into chunks by itself.
    """
    chunks = zigzag_chunks(seq_length // parts, cp_size, cp_rank)
    first_part = torch.cat([torch.arange(chunk.start, chunk.stop) for chunk in chunks])
    return (torch.arange(parts)[:, None] * (seq_length // parts) + first_part).flatten()


def natural_from_zigzag(x: Tensor, size: int, out: Tensor | None = None) -> Tensor:
    """Reorder dim 0 from ``size`` concatenated zigzag shards to the order of positions; returns a copy, or ``out``."""
    chunks = x.chunk(2 * size)
    return torch.cat([*chunks[0::2], *chunks[::-2]], out=out)


def zigzag_from_natural(x: Tensor, size: int) -> Tensor:
    """The inverse of natural_from_zigzag."""
    chunks = x.chunk(2 * size)
    return torch.cat([chunk for r in range(size) for chunk in (chunks[r], chunks[-1 - r])])
