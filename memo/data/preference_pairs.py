"""Samples of preferences: what was chosen in one, what was rejected in the next.

    sample 2k        [ chosen of pair 7 ...... | chosen of pair 2 .. | fill ]
    sample 2k + 1    [ rejected of pair 7 .. | rejected of pair 2 .... | fill ]

Both hold the same pairs in the same order, so a global batch of an even number of samples holds whole pairs, and each
answer may be as long as a sample. Which pairs share two windows is decided once, by the longer answer of each
(memo.data.best_fit); all epochs have the same couples of samples, each in its own order.
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

_PAIR_STREAM, _SAMPLE_STREAM = range(2)
_CACHED_EPOCHS = 2


class PreferencePairs:
    """Endless samples from a corpus of `memo data pairs`; sample i belongs to epoch i // samples_per_epoch.

    An answer that is longer, with its prompt, than seq_length + 1 tokens is cut there, or its pair is left out; a pair
    one of whose answers would have nothing left is left out in any case. Without `packing` each window holds one
    document.
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
        """Documents 2i and 2i + 1 are pair i; `answers`: 1 for each token that counts; `fill`: the token that takes
        what stays free.

        Raises DataError when the two do not belong together, ConfigError when no pair is left.
        """
        lengths = indexed.document_lengths
        if not np.array_equal(lengths, answers.document_lengths) or len(lengths) % 2:
            raise DataError(
                f"{answers.prefix}.idx has {len(answers)} documents, {indexed.prefix}.idx {len(indexed)}, or of other "
                "lengths, or not two for each pair; build the corpus again"
            )
        self.seq_length, self.seed, self.packing = seq_length, seed, packing
        self.long_conversations = long_conversations
        self._indexed, self._answers, self._fill = indexed, answers, fill
        window = seq_length + 1
        self._lengths = np.minimum(lengths, window)
        longer = lengths.reshape(-1, 2).max(1)
        cut = [pair for pair in np.flatnonzero(longer > window).tolist() if self._survives(pair)]
        self.num_truncated = len(cut)
        """Pairs that lose an end."""
        self.num_dropped = int((longer > window).sum()) - len(cut)
        """Pairs that are left out."""
        kept = np.sort(np.concatenate((np.flatnonzero(longer <= window), np.array(cut, dtype=np.int64))))
        if not len(kept):
            raise ConfigError(
                f"seq-length = {seq_length} is too short for each of the {len(longer)} pairs of {indexed.prefix}; "
                "raise it, or set long-conversations = truncate"
            )
        self.num_pairs = len(kept)
        self.num_tokens = int(self._lengths.reshape(-1, 2)[kept].sum())
        """Tokens of an epoch, without the fill."""
        shuffled = kept[permutation((seed, _PAIR_STREAM), len(kept))]
        sizes = np.minimum(longer, window)
        self._couples = best_fit(shuffled, sizes, window) if packing else [[int(pair)] for pair in shuffled]
        self.samples_per_epoch = 2 * len(self._couples)
        self._orders: dict[int, NDArray[np.int64]] = {}

    def sample(self, index: int) -> Sample:
        """Sample `index`, a function of (corpus, seq_length, seed, index). Raises IndexError for a negative index."""
        documents = [2 * pair + index % 2 for pair in self.pairs(index)]
        lengths = [(document, int(self._lengths[document])) for document in documents]
        return sample_of(
            ((self._indexed[d][:length], self._answers[d][:length]) for d, length in lengths),
            self.seq_length,
            self._fill,
        )

    def pairs(self, index: int) -> list[int]:
        """Which pairs of the corpus sample `index` holds one answer of, in order. Raises IndexError as `sample`."""
        if index < 0:
            raise IndexError(f"sample index {index} is negative")
        epoch, offset = divmod(index, self.samples_per_epoch)
        return self._couples[self._order(epoch)[offset // 2]]

    def where(self, index: int, offset: int) -> str:
        """Of token `offset` of the window of sample `index`: file, document and token, all counted from 0."""
        begin = 0
        for pair in self.pairs(index):
            document = 2 * pair + index % 2
            length = int(self._lengths[document])
            if offset < begin + length:
                return f"{self._indexed.prefix}.bin, document {document}, token {offset - begin}"
            begin += length
        return f"{self._indexed.prefix}.json, the field eod, which fills what answers leave free"

    def identity(self) -> dict[str, Fact]:
        """What decides its samples, besides lengths and seed, by flag."""
        content = f"{self._indexed.describe_content()}, answers {self._answers.describe_content()}"
        return {"data_path": content, "packing": self.packing, "long_conversations": self.long_conversations}

    def describe(self) -> str:
        """For people to read."""
        share = 100.0 * self.num_tokens / (self.samples_per_epoch * (self.seq_length + 1))
        text = f"{self.num_pairs:,} pairs in {self.samples_per_epoch:,} samples, {share:.1f} % full"
        if self.num_truncated:
            text += f"; {self.num_truncated:,} cut at {self.seq_length + 1:,} tokens"
        if self.num_dropped:
            text += f"; {self.num_dropped:,} left out, too long"
        return text

    def _survives(self, pair: int) -> bool:
        """Whether both answers still have a token that counts where their documents are cut."""
        is_kept = self.long_conversations == "truncate"
        return is_kept and all(
            self._answers[document][1 : self.seq_length + 1].any() for document in (2 * pair, 2 * pair + 1)
        )

    def _order(self, epoch: int) -> NDArray[np.int64]:
        if epoch not in self._orders:
            while len(self._orders) >= _CACHED_EPOCHS:
                del self._orders[next(iter(self._orders))]
            self._orders[epoch] = permutation((self.seed, epoch, _SAMPLE_STREAM), len(self._couples))
        return self._orders[epoch]
