"""One training sample, as every dataset yields it: cut from a window of seq_length + 1 tokens.

window      t0 t1 t2 | t3 t4 t5 t6      "|" ends a document, s = 6
tokens      t0 t1 t2   t3 t4 t5         the first s
labels      t1 t2 t3   t4 t5 t6         the last s
loss_mask    1  1  0    1  1  1         t2 need not predict the next document
positions    0  1  2    0  1  2
cu_seqlens   0, 3, 6
"""

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, eq=False)
class Sample:
    """One sequence of s tokens."""

    tokens: NDArray[np.int64]
    """[s]"""
    labels: NDArray[np.int64]
    """[s], the token that follows each of `tokens`."""
    loss_mask: NDArray[np.float32]
    """[s], 1 where the label counts in the loss."""
    positions: NDArray[np.int64]
    """[s], from 0 in each document."""
    cu_seqlens: NDArray[np.int32]
    """[number of documents + 1], from 0 to s: boundaries of documents in `tokens`."""


@runtime_checkable
class SampleDataset(Protocol):
    """An endless sequence of samples by index; the same index always gives the same sample.

    memo's own also have where(index, offset), the source of token `offset` of the window of a sample; identity(),
    {flag: fact} of everything that determines the samples besides lengths and seed; and describe(), for people.
    """

    @property
    def seq_length(self) -> int: ...

    def sample(self, index: int) -> Sample: ...


def cut_sample(window: NDArray[np.int64], document_ends: NDArray[np.integer]) -> Sample:
    """Make the sample of `window` (shape [s + 1]).

    `document_ends` has the offsets in [1, s] at which a document ends (one past its last token), in increasing order.
    If it is empty, the window is one text and nothing is masked.
    """
    seq_length = len(window) - 1
    loss_mask = np.ones(seq_length, dtype=np.float32)
    loss_mask[document_ends - 1] = 0.0
    inner_ends = document_ends[document_ends < seq_length]
    cu_seqlens = np.concatenate(([0], inner_ends, [seq_length]))
    positions = np.arange(seq_length) - np.repeat(cu_seqlens[:-1], np.diff(cu_seqlens))
    return Sample(
        tokens=window[:-1],
        labels=window[1:],
        loss_mask=loss_mask,
        positions=positions.astype(np.int64, copy=False),
        cu_seqlens=cu_seqlens.astype(np.int32),
    )
