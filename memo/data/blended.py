"""Several corpora as one dataset, with samples of each corpus in proportion to its weight.

The order is Megatron-LM's (build_blending_indices in megatron/core/datasets/helpers.cpp). Let w be the weights, of sum
1, and c the number of samples that each corpus has given before sample k. Sample k comes from the corpus that lags
most,

    argmax over i of  w_i max(k, 1) - c_i        in float64; ties: the first corpus,

so that after any number of samples each corpus has given its share of them, to about one sample.

The rule is sequential: sample k needs the choices of all samples before it. They are computed when they are first
needed, at about four microseconds and twelve bytes a sample, and kept.
"""

from array import array
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from memo.config.identity import Fact
from memo.data.packed_answers import PackedConversations, PreferencePairs
from memo.data.packing import PackedDataset
from memo.data.sample import Sample

Corpus = PackedDataset | PackedConversations | PreferencePairs


class BlendOrder:
    """The order of samples of a blend."""

    def __init__(self, weights: Sequence[float]) -> None:
        """`weights`: one for each corpus, none of them negative, with a sum above 0."""
        once = np.array(weights, dtype=np.float64) / np.sum(weights, dtype=np.float64)
        self.weights: NDArray[np.float64] = once / once.sum()
        """[number of corpora], with sum 1. Divided twice, as in Megatron-LM, which changes the last bit of some."""
        self._counts = np.zeros(len(once))
        self._corpora, self._numbers = array("i"), array("q")  # of each sample, and its number in its corpus

    def locate(self, index: int) -> tuple[int, int]:
        """(the corpus of sample `index`, the sample's index in it)."""
        self._extend(index + 1)
        return self._corpora[index], self._numbers[index]

    def counts(self, num_samples: int) -> NDArray[np.int64]:
        """[number of corpora]: how many of the first `num_samples` samples come from each corpus."""
        self._extend(num_samples)
        return np.bincount(np.array(self._corpora[:num_samples], dtype=np.int64), minlength=len(self.weights))

    def _extend(self, num_samples: int) -> None:
        """Choose the corpora of the samples before `num_samples`."""
        for sample in range(len(self._corpora), num_samples):
            corpus = int((self.weights * max(sample, 1) - self._counts).argmax())  # the first corpus if several tie
            self._corpora.append(corpus)
            self._numbers.append(int(self._counts[corpus]))
            self._counts[corpus] += 1


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
        """The source of token `offset` of the window of sample `index`, as its corpus describes it."""
        corpus, number = self.order.locate(index)
        return self.corpora[corpus].where(number, offset)

    def identity(self) -> dict[str, Fact]:
        """{flag: fact} of everything that determines its samples, besides lengths and seed."""
        facts = [corpus.identity() for corpus in self.corpora]
        shares = zip(self.order.weights.tolist(), facts, strict=True)
        merged = {name: value for each in facts for name, value in each.items()}
        return {**merged, "data_path": " + ".join(f"{weight!r} of {each['data_path']}" for weight, each in shares)}

    def describe(self, num_samples: int | None = None) -> str:
        """A description for people; with `num_samples` of a run it tells how often the run reads each corpus."""
        lines = [f"a blend of {len(self.corpora)} corpora, {self.samples_per_epoch:,} samples an epoch"]
        counts = None if num_samples is None else self.order.counts(num_samples).tolist()
        for place, corpus in enumerate(self.corpora):
            line = f"  {100 * self.order.weights[place]:.3g} % {self.names[place]}: {corpus.describe()}"
            if counts is not None:
                line += f"; {counts[place] / corpus.samples_per_epoch:.3g} passes in this run"
            lines.append(line)
        return "\n".join(lines)
