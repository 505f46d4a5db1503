"""Samples of a fixed length from documents of any length, for as many epochs as a run needs.

An epoch is all documents in its own random order, concatenated and cut into windows:

    documents   | d3 ......... | d0 .. | d2 .................... | d1 ....... |      N tokens
    windows     [ s + 1 tokens ]
                              [ s + 1 tokens ]                           they overlap by one token, a label
                                            [ s + 1 tokens ]             in one and an input in the next

so each of the first (N - 1) // s * s tokens of an epoch is an input exactly once. The 1 to s tokens left over at its
end are no input in that epoch; the next epoch leaves over other tokens. No window crosses epochs.
"""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from memo.config.identity import Fact
from memo.data.hashing import permutation
from memo.data.indexed import IndexedDataset
from memo.data.sample import Sample, cut_sample
from memo.errors import ConfigError, DataError

_DOCUMENT_STREAM, _SAMPLE_STREAM = range(2)
_CACHED_EPOCHS = 2
"""A global batch can reach from the end of one epoch into the next."""


@dataclass(frozen=True, eq=False)
class _Epoch:
    documents: NDArray[np.int64]
    """[number of documents], in this epoch's order."""
    ends: NDArray[np.int64]
    """[number of documents], offset in the epoch's tokens at which each ends."""
    windows: NDArray[np.int64]
    """[samples_per_epoch], the window of each sample."""


class PackedDataset:
    """Endless samples from an indexed corpus; sample i belongs to epoch i // samples_per_epoch.

    With `packing`, attention, positions and loss stay inside documents; without, a sample is one text from 0 to s.
    Memory: O(documents + samples per epoch); tokens stay in the memory-mapped file.
    """

    def __init__(self, indexed: IndexedDataset, seq_length: int, seed: int, packing: bool = True) -> None:
        """Raises ConfigError if the corpus is shorter than a window, DataError if it has floats."""
        if not np.issubdtype(indexed.dtype, np.integer):
            raise DataError(f"{indexed.prefix}.bin holds {indexed.dtype} values; tokens must be integers")
        self.num_tokens = int(indexed.document_lengths.sum())
        """Tokens in the corpus."""
        if self.num_tokens < seq_length + 1:
            raise ConfigError(
                f"seq-length = {seq_length} needs at least {seq_length + 1} tokens, but {indexed.prefix} has "
                f"only {self.num_tokens}; lower seq-length or use a larger corpus"
            )
        self.seq_length = seq_length
        self.seed = seed
        self.packing = packing
        self.samples_per_epoch = (self.num_tokens - 1) // seq_length
        self._indexed = indexed
        # An empty document would be a boundary without tokens.
        self._documents = np.flatnonzero(indexed.document_lengths)
        self._epoch = lru_cache(_CACHED_EPOCHS)(self._ordered)

    def sample(self, index: int) -> Sample:
        """Sample `index`, a function of (corpus, seq_length, seed, index)."""
        epoch, start = self._window(index)
        stop = start + self.seq_length + 1
        first = int(np.searchsorted(epoch.ends, start, side="right"))
        last = int(np.searchsorted(epoch.ends, stop, side="left"))
        window = self._read(epoch, first, last, start, stop)
        # The document with the window's last token ends at or after `stop`, so its end is not among these.
        ends = epoch.ends[first:last] - start
        return cut_sample(window, ends if self.packing else ends[:0])

    def where(self, index: int, offset: int) -> str:
        """File, document and token, all counted from 0."""
        epoch, start = self._window(index)
        place = int(np.searchsorted(epoch.ends, start + offset, side="right"))
        document = int(epoch.documents[place])
        token = start + offset - (int(epoch.ends[place]) - int(self._indexed.document_lengths[document]))
        return f"{self._indexed.prefix}.bin, document {self._indexed.first_document + document}, token {token}"

    def identity(self) -> dict[str, Fact]:
        return {"data_path": self._indexed.describe_content(), "packing": self.packing}

    def describe(self) -> str:
        return f"{self.num_tokens:,} tokens of {len(self._documents):,} documents in {self.samples_per_epoch:,} samples"

    def _window(self, index: int) -> tuple[_Epoch, int]:
        """The epoch of sample `index`, and the offset in the epoch's tokens at which its window begins."""
        epoch_index, offset = divmod(index, self.samples_per_epoch)
        epoch = self._epoch(epoch_index)
        return epoch, int(epoch.windows[offset]) * self.seq_length

    def _read(self, epoch: _Epoch, first: int, last: int, start: int, stop: int) -> NDArray[np.int64]:
        """Tokens [start, stop) of the epoch, which lie in its documents first ... last (inclusive)."""
        window = np.empty(stop - start, dtype=np.int64)
        for place in range(first, last + 1):
            document = int(epoch.documents[place])
            end = int(epoch.ends[place])
            begin = end - int(self._indexed.document_lengths[document])
            left, right = max(start, begin), min(stop, end)
            window[left - start : right - start] = self._indexed[document][left - begin : right - begin]
        return window

    def _ordered(self, epoch: int) -> _Epoch:
        documents = self._documents[permutation((self.seed, epoch, _DOCUMENT_STREAM), len(self._documents))]
        return _Epoch(
            documents=documents,
            ends=np.cumsum(self._indexed.document_lengths[documents]),
            windows=permutation((self.seed, epoch, _SAMPLE_STREAM), self.samples_per_epoch),
        )
