"""Samples with very different numbers of tokens that count in the loss."""

from dataclasses import replace

import numpy as np

from memo.data import MockDataset, Sample
from memo.data.hashing import uniform


class Answers:
    """Mock samples; the share of labels that count grows from none to all."""

    def __init__(self, vocab_size: int, seq_length: int) -> None:
        self.seq_length = seq_length
        self._mock = MockDataset(vocab_size, seq_length, seed=7, mean_document_length=23)

    def sample(self, index: int) -> Sample:
        sample = self._mock.sample(index)
        answers = uniform((3, index), np.arange(self.seq_length)) < (index % 4) / 3
        return replace(sample, loss_mask=sample.loss_mask * answers.astype(np.float32))
