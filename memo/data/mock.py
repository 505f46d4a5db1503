"""Endless generated tokens with a rule that a model can learn, for tests and benchmarks without a corpus."""

import numpy as np

from memo.config.identity import Fact
from memo.data.hashing import hash64, uniform
from memo.data.sample import Sample, cut_sample

_NOISE = 0.1
"""Share of tokens that break the rule: small, so that it is learned fast, but above 0, so that the loss has a floor."""
_STRIDE = 7919
"""A prime, so that the walk visits every token of a vocabulary, unless its size is a multiple of the prime."""
_NOISE_STREAM, _TOKEN_STREAM, _DOCUMENT_STREAM = range(3)


class MockDataset:
    """The next token is (token + 7919) mod vocab_size, but with probability 0.1 a uniformly random one.

    The rule does not depend on the seed, so a dataset with another seed is a valid evaluation set.
    """

    def __init__(self, vocab_size: int, seq_length: int, seed: int, mean_document_length: float | None = None) -> None:
        """mean_document_length: tokens, geometrically distributed; None makes each sample one document."""
        self.vocab_size, self.seq_length, self.seed = vocab_size, seq_length, seed
        self.mean_document_length = mean_document_length

    def identity(self) -> dict[str, Fact]:
        length = self.mean_document_length
        return {"data_path": "mock data" if length is None else f"mock data, {length} tokens a document"}

    def sample(self, index: int) -> Sample:
        """Sample `index`, a function of (seed, index) only."""
        offsets = np.arange(self.seq_length + 1)
        ends = self._document_ends(index)
        restarts = uniform((self.seed, index, _NOISE_STREAM), offsets) < _NOISE
        restarts[0] = True
        restarts[ends] = True
        random_tokens = hash64((self.seed, index, _TOKEN_STREAM), offsets) % np.uint64(self.vocab_size)
        # Between restarts the walk has a closed form, which avoids a Python loop over a million tokens.
        last_restart = np.maximum.accumulate(np.where(restarts, offsets, 0))
        steps = offsets - last_restart
        window = (random_tokens[last_restart].astype(np.int64) + steps * _STRIDE) % self.vocab_size
        return cut_sample(window, ends)

    def _document_ends(self, index: int) -> np.ndarray:
        """Offsets in [1, seq_length] where a document ends: a coin for each gives geometric lengths."""
        if self.mean_document_length is None:
            return np.empty(0, dtype=np.int64)
        offsets = np.arange(1, self.seq_length + 1)
        coin = uniform((self.seed, index, _DOCUMENT_STREAM), offsets)
        return offsets[coin < 1.0 / self.mean_document_length]
