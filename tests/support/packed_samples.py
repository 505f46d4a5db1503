"""Samples with documents of different lengths in each sample."""

from collections.abc import Sequence

import numpy as np

from memo.data.sample import Sample, cut_sample


class PackedSamples:
    """Random tokens; the documents of sample i end at `packings[i % len(packings)]`, offsets in [1, seq_length)."""

    def __init__(self, packings: Sequence[Sequence[int]], vocab_size: int, seq_length: int) -> None:
        self.packings, self.vocab_size, self.seq_length = packings, vocab_size, seq_length

    def sample(self, index: int) -> Sample:
        ends = np.asarray(self.packings[index % len(self.packings)], dtype=np.int64)
        return cut_sample(np.random.default_rng(index).integers(0, self.vocab_size, self.seq_length + 1), ends)
