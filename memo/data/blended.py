"""Several corpora as one dataset, with samples of each corpus in proportion to its weight.

The order is Megatron-LM's (build_blending_indices in megatron/core/datasets/helpers.cpp). Let w be the weights, of sum
1, and c the number of samples that each corpus has given before sample k. Sample k comes from the corpus that lags
most,

    argmax over i of  w_i max(k, 1) - c_i        in float64; ties: the first corpus,

so that after any number of samples each corpus has given its share of them, to about one sample.

The rule is sequential, but wrong counts c soon converge to the right ones. So blocks of samples are computed in
parallel, each from guessed counts. If the counts at the end of a block differ from the guess for the next block, the
next block is computed again. Once all agree, every choice equals the choice of the sequential rule. Only the counts at
the beginning of each block are kept; a block is computed again when one of its samples is needed.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from memo.config.identity import Fact
from memo.data.packed_answers import PackedConversations, PreferencePairs
from memo.data.packing import PackedDataset
from memo.data.sample import Sample

_BLOCK = 1024
"""Samples of a block."""
_MOST_BLOCKS = 4096
"""Blocks computed in parallel: enough for numpy to be fast, with megabytes of memory."""
_CACHED_BLOCKS = 2
"""A global batch can reach from the end of one block into the next."""

Corpus = PackedDataset | PackedConversations | PreferencePairs


class BlendOrder:
    """The order of samples of a blend, computed when needed. Memory: a few numbers a block."""

    def __init__(self, weights: Sequence[float]) -> None:
        """`weights`: one for each corpus, none of them negative, with a sum above 0."""
        given = np.array(weights, dtype=np.float64)
        once = given / given.sum()
        self.weights: NDArray[np.float64] = once / once.sum()
        """[number of corpora], with sum 1. Divided twice, as in Megatron-LM, which changes the last bit of some."""
        self._starts = np.zeros((1, len(given)))
        self._blocks: dict[int, NDArray[np.int64]] = {}

    def locate(self, index: int) -> tuple[int, int]:
        """(the corpus of sample `index`, the sample's index in it)."""
        block, offset = divmod(index, _BLOCK)
        choices = self._choices(block)
        corpus = int(choices[offset])
        return corpus, int(self._starts[block, corpus]) + int(np.count_nonzero(choices[:offset] == corpus))

    def counts(self, num_samples: int) -> NDArray[np.int64]:
        """[number of corpora]: how many of the first `num_samples` samples come from each corpus."""
        block, offset = divmod(num_samples, _BLOCK)
        here = np.bincount(self._choices(block)[:offset], minlength=len(self.weights))
        return self._starts[block].astype(np.int64) + here

    def _choices(self, block: int) -> NDArray[np.int64]:
        """[_BLOCK]: the corpus of each sample of a block."""
        if block not in self._blocks:
            while (missing := block + 1 - len(self._starts)) > 0:
                self._extend(min(missing, _MOST_BLOCKS))
            while len(self._blocks) >= _CACHED_BLOCKS:
                del self._blocks[next(iter(self._blocks))]
            choices = np.empty((_BLOCK, 1), dtype=np.int64)
            self._run(np.array([block]), self._starts[block][None], choices)
            self._blocks[block] = choices[:, 0]
        return self._blocks[block]

    def _extend(self, count: int) -> None:
        """Compute the counts at the beginning of `count` more blocks."""
        blocks = np.arange(len(self._starts) - 1, len(self._starts) - 1 + count)
        starts = self._guessed(blocks * _BLOCK)
        starts[0] = self._starts[-1]
        ends = np.empty_like(starts)
        again = np.arange(count)
        while len(again):
            ends[again] = self._run(blocks[again], starts[again])
            again = 1 + np.flatnonzero((starts[1:] != ends[:-1]).any(axis=1))
            starts[again] = ends[again - 1]
        self._starts = np.concatenate((self._starts, ends))

    def _guessed(self, samples: NDArray[np.int64]) -> NDArray[np.float64]:
        """[blocks, corpora]: counts after `samples`, close to the true counts: shares, rounded so that they add up."""
        shares = samples[:, None] * self.weights
        counts = np.floor(shares)
        rank = np.argsort(np.argsort(counts - shares, axis=1), axis=1)
        return counts + (rank < (samples - counts.sum(axis=1))[:, None])

    def _run(
        self, blocks: NDArray[np.int64], starts: NDArray[np.float64], choices: NDArray[np.int64] | None = None
    ) -> NDArray[np.float64]:
        """The counts [blocks, corpora] at the end of blocks that begin with `starts`.

        `choices`, [_BLOCK, blocks], gets the corpus of each sample.
        """
        counts = starts.T.copy(order="C")  # [corpora, blocks]
        first, columns = blocks * _BLOCK, np.arange(len(blocks))
        for step in range(_BLOCK):
            lags = self.weights[:, None] * np.maximum(first + step, 1) - counts
            chosen = lags.argmax(axis=0)  # the first corpus if several tie
            counts[chosen, columns] += 1
            if choices is not None:
                choices[step] = chosen
        return counts.T


class BlendedDataset:
    """Endless samples of several corpora, in the order of `BlendOrder`.

    Each corpus yields its samples in its own order, as if it were read alone; after its last sample it begins a new
    epoch in a new order. An epoch of the blend has as many samples as all corpora together. In it some corpora may be
    read more than once, and others only in part.
    """

    def __init__(self, corpora: Sequence[Corpus], names: Sequence[str], weights: Sequence[float] | None) -> None:
        """`names`: for people. `weights`: see `BlendOrder`; None: the number of samples of each corpus."""
        self.corpora, self.names = tuple(corpora), tuple(names)
        self.seq_length = corpora[0].seq_length
        self.samples_per_epoch = sum(corpus.samples_per_epoch for corpus in corpora)
        self.order = BlendOrder([corpus.samples_per_epoch for corpus in corpora] if weights is None else weights)

    def sample(self, index: int) -> Sample:
        """Sample `index`, a function of (corpora, weights, seq_length, seed, index)."""
        corpus, number = self.order.locate(index)
        return self.corpora[corpus].sample(number)

    def where(self, index: int, offset: int) -> str:
        corpus, number = self.order.locate(index)
        return self.corpora[corpus].where(number, offset)

    def identity(self) -> dict[str, Fact]:
        facts = [corpus.identity() for corpus in self.corpora]
        shares = zip(self.order.weights.tolist(), facts, strict=True)
        merged = {name: value for each in facts for name, value in each.items()}
        return {**merged, "data_path": " + ".join(f"{weight!r} of {each['data_path']}" for weight, each in shares)}

    def describe(self, num_samples: int | None = None) -> str:
        """With `num_samples` of a run this also tells how often the run reads each corpus."""
        lines = [f"a blend of {len(self.corpora)} corpora, {self.samples_per_epoch:,} samples an epoch"]
        counts = None if num_samples is None else self.order.counts(num_samples).tolist()
        for place, corpus in enumerate(self.corpora):
            line = f"  {100 * self.order.weights[place]:.3g} % {self.names[place]}: {corpus.describe()}"
            if counts is not None:
                line += f"; {counts[place] / corpus.samples_per_epoch:.3g} passes in this run"
            lines.append(line)
        return "\n".join(lines)
