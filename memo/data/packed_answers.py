"""Samples of a fixed length from whole documents in which only answers are learned, for as many epochs as needed.

Documents are packed into windows of s + 1 tokens. No document crosses windows, and the rest of a window is filled:

    window      [ conversation 7 ........... | conversation 2 .. | fill ]
    loss             answers of 7                 answers of 2

Attention, positions and loss stay inside documents. The fill is a separate document, without loss. The documents of a
window are chosen once, so all epochs have the same samples, each epoch in its own order.
"""

from bisect import bisect_left, insort
from functools import lru_cache
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from memo.config.data import LongConversations
from memo.config.identity import Fact
from memo.data.completions import sample_of
from memo.data.hashing import permutation
from memo.data.indexed import IndexedDataset
from memo.data.sample import Sample
from memo.errors import ConfigError, DataError

_GROUP_STREAM, _SAMPLE_STREAM = range(2)
_CACHED_EPOCHS = 2
"""A global batch can reach from the end of one epoch into the next."""


def best_fit(documents: NDArray[np.integer], lengths: NDArray[np.integer], capacity: int) -> list[list[int]]:
    """The documents of each window, packed by best-fit decreasing: from the longest document on, each goes into the
    window where it leaves least space; those of equal length in the given order. `lengths`: of all documents by number,
    none above `capacity`.

    The number of windows is at most 11/9 of the minimum plus 4 (Johnson et al., SIAM J. Comput. 3, 1974).
    """
    longest_first = documents[np.argsort(-lengths[documents], kind="stable")]
    windows: list[list[int]] = []
    spaces: list[int] = []  # distinct numbers of free tokens in windows, ascending
    by_space: dict[int, list[int]] = {}  # {number of free tokens: windows}
    for document in longest_first.tolist():
        length = int(lengths[document])
        place = bisect_left(spaces, length)
        if place == len(spaces):
            number, left = len(windows), capacity - length
            windows.append([])
        else:
            left = spaces[place] - length
            number = by_space[spaces[place]].pop()
            if not by_space[spaces[place]]:
                del by_space[spaces.pop(place)]
        windows[number].append(document)
        if left not in by_space:
            insort(spaces, left)
        by_space.setdefault(left, []).append(number)
    return windows


class PackedAnswers:
    """Endless samples from a corpus whose documents have a mask; sample i belongs to epoch i // samples_per_epoch.

    Documents come in groups of `sides`: group g is documents sides x g to sides x (g + 1) - 1. The documents of a group
    lie in consecutive samples, at the same place among the documents of each sample:

        sample sides x k        [ first of group 7 ..... | first of group 2 .. | fill ]
        sample sides x k + 1    [ second of group 7 .. | second of group 2 .... | fill ]

    A document of more than seq_length + 1 tokens is cut there, or its group is left out. A group is always left out if
    one of its documents has no label that counts before the cut. Without `packing` each window has one document.
    Memory: O(groups); tokens stay in the memory-mapped files.
    """

    sides: ClassVar[int]
    noun: ClassVar[str]
    """The name of groups in messages."""

    def __init__(
        self,
        indexed: IndexedDataset,
        answers: IndexedDataset,
        seq_length: int,
        seed: int,
        *,
        fill: int,
        packing: bool = True,
        long_conversations: LongConversations = "truncate",
    ) -> None:
        """`answers`: the mask of answers, 1 for each token of an answer, in documents as long as those of `indexed`;
        `fill`: the token that fills the rest of a window.

        Raises DataError if tokens and mask do not belong together, ConfigError if no group is left.
        """
        lengths = indexed.document_lengths
        if not np.array_equal(lengths, answers.document_lengths) or len(lengths) % self.sides:
            raise DataError(
                f"{answers.prefix}.idx has {len(answers)} documents of {answers.document_lengths.sum()} tokens, "
                f"{indexed.prefix}.idx {len(indexed)} of {lengths.sum()}, or of other lengths, or not {self.sides} for "
                f"each of the {self.noun}; build the corpus again"
            )
        self.seq_length, self.seed, self.packing = seq_length, seed, packing
        self.long_conversations = long_conversations
        self._indexed, self._answers, self._fill = indexed, answers, fill
        window = seq_length + 1
        longest = lengths.reshape(-1, self.sides).max(1)
        long = np.flatnonzero(longest > window)
        cut = [group for group in long.tolist() if long_conversations == "truncate" and self._survives(group)]
        self.num_truncated = len(cut)
        """Groups with documents that are cut."""
        self.num_dropped = len(long) - len(cut)
        """Groups that are left out."""
        kept = np.setdiff1d(np.flatnonzero(longest), np.setdiff1d(long, np.array(cut, dtype=np.int64)))
        if not len(kept):
            raise ConfigError(
                f"seq-length = {seq_length} is too short for each of the {len(longest)} {self.noun} of "
                f"{indexed.prefix}; raise it, or set long-conversations = truncate"
            )
        self.num_kept = len(kept)
        """Groups of an epoch."""
        self._lengths = np.minimum(lengths, window)
        self.num_tokens = int(self._lengths.reshape(-1, self.sides)[kept].sum())
        """Tokens of an epoch, without the fill."""
        shuffled, sizes = kept[permutation((seed, _GROUP_STREAM), len(kept))], np.minimum(longest, window)
        self._windows = best_fit(shuffled, sizes, window) if packing else [[int(group)] for group in shuffled]
        self.samples_per_epoch = self.sides * len(self._windows)
        self._order = lru_cache(_CACHED_EPOCHS)(self._ordered)

    def sample(self, index: int) -> Sample:
        """Sample `index`, a function of (corpus, seq_length, seed, index)."""
        lengths = [(document, int(self._lengths[document])) for document in self._documents(index)]
        documents = ((self._indexed[d][:length], self._answers[d][:length]) for d, length in lengths)
        return sample_of(documents, self.seq_length, self._fill)

    def groups(self, index: int) -> list[int]:
        """The groups whose documents are in sample `index`, in order."""
        epoch, offset = divmod(index, self.samples_per_epoch)
        return self._windows[self._order(epoch)[offset // self.sides]]

    def where(self, index: int, offset: int) -> str:
        """File, document and token, all counted from 0."""
        documents = self._documents(index)
        ends = np.cumsum(self._lengths[documents])
        place = int(np.searchsorted(ends, offset, side="right"))
        if place == len(documents):
            return f"{self._indexed.prefix}.json, the field eod, which fills what {self.noun} leave free"
        token = offset - int(ends[place]) + int(self._lengths[documents[place]])
        return f"{self._indexed.prefix}.bin, document {self._indexed.first_document + documents[place]}, token {token}"

    def identity(self) -> dict[str, Fact]:
        content = f"{self._indexed.describe_content()}, answers {self._answers.describe_content()}"
        return {"data_path": content, "packing": self.packing, "long_conversations": self.long_conversations}

    def describe(self) -> str:
        share = 100.0 * self.num_tokens / (self.samples_per_epoch * (self.seq_length + 1))
        text = f"{self.num_kept:,} {self.noun} in {self.samples_per_epoch:,} samples, {share:.1f} % full"
        if self.num_truncated:
            text += f"; {self.num_truncated:,} cut at {self.seq_length + 1:,} tokens"
        if self.num_dropped:
            text += f"; {self.num_dropped:,} left out, too long"
        return text

    def _survives(self, group: int) -> bool:
        """Whether all documents of a group have a label that counts before they are cut."""
        first = group * self.sides
        return all(self._answers[d][1 : self.seq_length + 1].any() for d in range(first, first + self.sides))

    def _documents(self, index: int) -> list[int]:
        """The documents in the window of sample `index`, in order."""
        return [group * self.sides + index % self.sides for group in self.groups(index)]

    def _ordered(self, epoch: int) -> NDArray[np.int64]:
        return permutation((self.seed, epoch, _SAMPLE_STREAM), len(self._windows))


class PackedConversations(PackedAnswers):
    """Samples of the conversations of `memo data chat`."""

    sides, noun = 1, "conversations"


class PreferencePairs(PackedAnswers):
    """Samples of the pairs of `memo data pairs`: chosen answers in one sample, their rejected answers in the next.

    So a global batch with an even number of samples has whole pairs, and each answer may be as long as a sample.
    """

    sides, noun = 2, "pairs"
