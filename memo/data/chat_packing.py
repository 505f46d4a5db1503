"""Samples of a fixed length out of whole conversations, for as many epochs as a run needs.

Conversations are laid into windows of s + 1 tokens, none across two, and what stays free is filled:

    window      [ conversation 7 ........... | conversation 2 .. | fill ]
    loss             answers of 7                 answers of 2

Each conversation is a document of its own: attention, positions and loss stay inside, and so does the fill, which no
loss sees. Which conversations share a window is decided once (memo.data.best_fit), so all epochs have the same samples,
each in its own order.
"""

import numpy as np
from numpy.typing import NDArray

from memo.config.data import LongConversations
from memo.config.identity import Fact
from memo.data.best_fit import best_fit
from memo.data.completions import sample_of
from memo.data.hashing import permutation
from memo.data.indexed import IndexedDataset
from memo.data.sample import Sample
from memo.errors import ConfigError, DataError

_CONVERSATION_STREAM, _SAMPLE_STREAM = range(2)
_CACHED_EPOCHS = 2
"""A global batch can reach from the end of one epoch into the next."""


class PackedConversations:
    """Endless samples from a corpus of `memo data chat`; sample i belongs to epoch i // samples_per_epoch.

    A conversation of more than seq_length + 1 tokens is cut there or left out; one that has no answer before the cut
    is left out in any case. Without `packing`, each window holds one conversation. Memory: O(conversations); tokens
    stay in the memory-mapped files.
    """

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
        """`answers`: 1 for each token of an answer, in documents as long as those of `indexed`; `fill`: the token that
        takes what stays free.

        Raises DataError when the two do not belong together, ConfigError when no conversation is left.
        """
        if seq_length < 1:
            raise ConfigError(f"seq-length = {seq_length}; it must be at least 1")
        if not np.array_equal(indexed.document_lengths, answers.document_lengths):
            raise DataError(
                f"{answers.prefix}.idx has {len(answers)} documents of {answers.document_lengths.sum()} tokens, "
                f"{indexed.prefix}.idx {len(indexed)} of {indexed.document_lengths.sum()}, or of other lengths; "
                "build the corpus again"
            )
        self.seq_length, self.seed, self.packing = seq_length, seed, packing
        self.long_conversations = long_conversations
        self._indexed, self._answers, self._fill = indexed, answers, fill
        window = seq_length + 1
        long = np.flatnonzero(indexed.document_lengths > window)
        cut = [d for d in long if long_conversations == "truncate" and answers[int(d)][1:window].any()]
        self.num_truncated = len(cut)
        """Conversations that lose their end."""
        self.num_dropped = len(long) - len(cut)
        """Conversations that are left out."""
        self._lengths = np.minimum(indexed.document_lengths, window)
        kept = np.setdiff1d(np.flatnonzero(self._lengths), np.setdiff1d(long, np.array(cut, dtype=np.int64)))
        if not len(kept):
            raise ConfigError(
                f"seq-length = {seq_length} is shorter than each of the {len(indexed)} conversations of "
                f"{indexed.prefix}; raise it, or set long-conversations = truncate"
            )
        self.num_conversations = len(kept)
        self.num_tokens = int(self._lengths[kept].sum())
        """Tokens of an epoch, without the fill."""
        shuffled = kept[permutation((seed, _CONVERSATION_STREAM), len(kept))]
        self._windows = best_fit(shuffled, self._lengths, window) if packing else [[int(d)] for d in shuffled]
        self.samples_per_epoch = len(self._windows)
        self._orders: dict[int, NDArray[np.int64]] = {}

    def sample(self, index: int) -> Sample:
        """Sample `index`, a function of (corpus, seq_length, seed, index). Raises IndexError for a negative index."""
        lengths = [(document, int(self._lengths[document])) for document in self._documents(index)]
        documents = ((self._indexed[d][:length], self._answers[d][:length]) for d, length in lengths)
        return sample_of(documents, self.seq_length, self._fill)

    def where(self, index: int, offset: int) -> str:
        """Of token `offset` of the window of sample `index`: file, document and token, all counted from 0."""
        documents = self._documents(index)
        ends = np.cumsum(self._lengths[documents])
        place = int(np.searchsorted(ends, offset, side="right"))
        if place == len(documents):
            return f"{self._indexed.prefix}.json, the field eod, which fills what conversations leave free"
        token = offset - int(ends[place]) + int(self._lengths[documents[place]])
        return f"{self._indexed.prefix}.bin, document {self._indexed.first_document + documents[place]}, token {token}"

    def identity(self) -> dict[str, Fact]:
        """What decides its samples, besides lengths and seed, by flag."""
        content = f"{self._indexed.describe_content()}, answers {self._answers.describe_content()}"
        return {"data_path": content, "packing": self.packing, "long_conversations": self.long_conversations}

    def describe(self) -> str:
        """For people to read."""
        share = 100.0 * self.num_tokens / (self.samples_per_epoch * (self.seq_length + 1))
        text = f"{self.num_conversations:,} conversations in {self.samples_per_epoch:,} samples, {share:.1f} % full"
        if self.num_truncated:
            text += f"; {self.num_truncated:,} cut at {self.seq_length + 1:,} tokens"
        if self.num_dropped:
            text += f"; {self.num_dropped:,} left out, too long"
        return text

    def _documents(self, index: int) -> list[int]:
        """The conversations in the window of sample `index`, in order."""
        if index < 0:
            raise IndexError(f"sample index {index} is negative")
        epoch, offset = divmod(index, self.samples_per_epoch)
        return self._windows[self._order(epoch)[offset]]

    def _order(self, epoch: int) -> NDArray[np.int64]:
        if epoch not in self._orders:
            while len(self._orders) >= _CACHED_EPOCHS:
                del self._orders[next(iter(self._orders))]
            self._orders[epoch] = permutation((self.seed, epoch, _SAMPLE_STREAM), self.samples_per_epoch)
        return self._orders[epoch]
