"""Samples that hide key-value pairs in a text and ask for the values at the end.

    | text  k1 v1  text | text  k2 v2  text | ... | k2 v2  k5 v5  k1 v1 ... |
      a part of the text for each pair               all pairs again, in a random order: the questions

Only the values in the questions count in the loss: to predict a value, a model must find its key in the text and copy
the tokens after it. The distance of a question is the number of tokens back to its answer, so one sample asks at as
many distances as it has pairs. Keys are drawn anew for each sample, so a model cannot know an answer from training.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from memo.data.checked import where
from memo.data.hashing import hash64, permutation, uniform
from memo.data.sample import Sample, SampleDataset, cut_sample
from memo.errors import ConfigError

_PLACE_STREAM, _KEY_STREAM, _FIRST_STREAM, _VALUE_STREAM, _ORDER_STREAM = range(5)


@dataclass(frozen=True, eq=False)
class NeedleQuestions:
    """The questions of one sample, in their order."""

    labels: NDArray[np.int64]
    """[num_needles, value_length], the index of each token of a value among the sample's labels."""
    distances: NDArray[np.int64]
    """[num_needles], tokens from a value in the text to the same value among the questions."""


def check_needles(seq_length: int, num_needles: int, key_length: int, value_length: int) -> None:
    """Raises ConfigError unless a sample has room for `num_needles` pairs and their questions."""
    for name, value in (("num-needles", num_needles), ("key-length", key_length), ("value-length", value_length)):
        if value < 1:
            raise ConfigError(f"--{name} is {value}: give at least 1")
    least = 2 * num_needles * (key_length + value_length) - 1
    if seq_length < least:
        raise ConfigError(
            f"--num-needles {num_needles} x (--key-length {key_length} + --value-length {value_length}) tokens, each "
            f"twice, do not fit into --seq-length {seq_length}: give at least {least}, or fewer needles"
        )


class NeedleDataset:
    """Endless samples over the text of dataset `haystack`, each one document; an index always gives the same sample."""

    def __init__(
        self,
        haystack: SampleDataset,
        seed: int,
        *,
        num_needles: int = 8,
        key_length: int = 4,
        value_length: int = 4,
        keys: Sequence[int] | None = None,
        values: Sequence[int] | None = None,
        avoid: Sequence[int] = (),
    ) -> None:
        """Args:
            haystack: the text; its document boundaries are ignored.
            num_needles: pairs in a sample.
            key_length, value_length: tokens of a key and of a value.
            keys, values: ids that keys and values are made of; default: the ids in the sample's text, drawn uniformly.
            avoid: ids that are never part of keys or values, such as the end of a document.

        Raises ConfigError for pairs that do not fit, or fewer ids than pairs.
        """
        self.haystack, self.seed, self.seq_length = haystack, seed, haystack.seq_length
        self.num_needles, self.key_length, self.value_length = num_needles, key_length, value_length
        check_needles(self.seq_length, num_needles, key_length, value_length)
        self._pair_length = key_length + value_length
        self._text_length = self.seq_length + 1 - num_needles * self._pair_length
        self._part_length = self._text_length // num_needles
        self._avoid = np.array(avoid, dtype=np.int64)
        self._keys, self._values = keys, values

    def sample(self, index: int) -> Sample:
        """Raises ConfigError if the text has fewer different tokens than pairs."""
        window = self._text(index)
        pairs = self._pairs(index, window[: self._text_length])
        for place, pair in zip(self._places(index), pairs, strict=True):
            window[place : place + self._pair_length] = pair
        window[self._text_length :] = pairs[self._order(index)].flatten()
        sample = cut_sample(window, np.empty(0, dtype=np.int64))
        loss_mask = np.zeros_like(sample.loss_mask)
        loss_mask[self.questions(index).labels] = 1.0
        return replace(sample, loss_mask=loss_mask)

    def where(self, index: int, offset: int) -> str:
        """The first source in the text of token `offset` of the window of sample `index`, if the text has it."""
        sample = self.sample(index)
        token = np.append(sample.tokens, sample.labels[-1])[offset]
        in_text = np.flatnonzero(self._text(index) == token)
        if len(in_text):
            return where(self.haystack, index, int(in_text[0]))
        return "the keys or values that were given for the needles"

    def questions(self, index: int) -> NeedleQuestions:
        """The questions of sample `index`; does not read the text."""
        asked_at = self._text_length + np.arange(self.num_needles) * self._pair_length
        # The token at offset p of the window is label p - 1.
        labels = (asked_at + self.key_length - 1)[:, None] + np.arange(self.value_length)
        return NeedleQuestions(labels, asked_at - self._places(index)[self._order(index)])

    def _text(self, index: int) -> NDArray[np.int64]:
        """[s + 1], the text before pairs are hidden in it."""
        text = self.haystack.sample(index)
        return np.append(text.tokens, text.labels[-1])

    def _places(self, index: int) -> NDArray[np.int64]:
        """[num_needles], offset of each pair in the window: anywhere in its part of the text."""
        parts = np.arange(self.num_needles)
        within = uniform((self.seed, index, _PLACE_STREAM), parts) * (self._part_length - self._pair_length + 1)
        return parts * self._part_length + within.astype(np.int64)

    def _order(self, index: int) -> NDArray[np.int64]:
        return permutation((self.seed, index, _ORDER_STREAM), self.num_needles)

    def _pairs(self, index: int, text: NDArray[np.int64]) -> NDArray[np.int64]:
        """[num_needles, key_length + value_length]; no two keys begin with the same token."""
        of_keys, of_values = self._usable(self._keys, text), self._usable(self._values, text)
        if len(of_keys) < self.num_needles:
            raise ConfigError(
                f"--num-needles is {self.num_needles}, but the keys must begin with different tokens, and there are "
                f"{len(of_keys)} ids to choose from: give fewer needles, or a text with more"
            )
        if not len(of_values):
            raise ConfigError(f"of {self._values} for values none is left, as all are to be avoided: give others")

        def draw(stream: int, tokens: NDArray[np.int64], length: int) -> NDArray[np.int64]:
            numbers = hash64((self.seed, index, stream), np.arange(self.num_needles * length)) % np.uint64(len(tokens))
            return tokens[numbers.astype(np.int64)].reshape(self.num_needles, length)

        keys = draw(_KEY_STREAM, of_keys, self.key_length)
        keys[:, 0] = of_keys[permutation((self.seed, index, _FIRST_STREAM), len(of_keys))[: self.num_needles]]
        return np.hstack([keys, draw(_VALUE_STREAM, of_values, self.value_length)])

    def _usable(self, given: Sequence[int] | None, text: NDArray[np.int64]) -> NDArray[np.int64]:
        """Ids to draw from, sorted, each once."""
        return np.setdiff1d(text if given is None else np.asarray(given, dtype=np.int64), self._avoid)
