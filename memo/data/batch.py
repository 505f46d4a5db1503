"""Stacks samples to the batch of one microbatch."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from memo.data.sample import Sample


@dataclass(frozen=True, eq=False)
class Batch:
    """b samples of s tokens."""

    tokens: NDArray[np.int64]
    """[b, s]"""
    labels: NDArray[np.int64]
    """[b, s]"""
    loss_mask: NDArray[np.float32]
    """[b, s]"""
    positions: NDArray[np.int64]
    """[b, s]"""
    cu_seqlens: tuple[tuple[int, ...], ...] | None
    """Document boundaries of each row, from 0 to s; None when every row is one document."""


def collate(samples: Sequence[Sample]) -> Batch:
    """Stack one or more samples of one dataset, which have equal lengths."""
    cu_seqlens = tuple(tuple(sample.cu_seqlens.tolist()) for sample in samples)
    # None lets attention take its fastest path: one causal block per row.
    one_document_a_row = all(len(boundaries) == 2 for boundaries in cu_seqlens)
    return Batch(
        tokens=np.stack([sample.tokens for sample in samples]),
        labels=np.stack([sample.labels for sample in samples]),
        loss_mask=np.stack([sample.loss_mask for sample in samples]),
        positions=np.stack([sample.positions for sample in samples]),
        cu_seqlens=None if one_document_a_row else cu_seqlens,
    )
