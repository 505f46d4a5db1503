"""Several corpora as one: samples of each as often as its weight says."""

from collections.abc import Sequence

from memo.config.identity import Fact
from memo.data.blend_order import BlendOrder
from memo.data.chat_packing import PackedConversations
from memo.data.packing import PackedDataset
from memo.data.sample import Sample

Corpus = PackedDataset | PackedConversations


class BlendedDataset:
    """Endless samples of several corpora, in the order of `BlendOrder`.

    Each corpus hands out its own samples in its own order, as if it were read alone: when it has given all, it begins
    another epoch, in another order. An epoch of the blend is as many samples as all corpora have together, of which
    some may be read more than once, and of others only a part.
    """

    def __init__(self, corpora: Sequence[Corpus], names: Sequence[str], weights: Sequence[float] | None) -> None:
        """`names`: for people. `weights`: as of `BlendOrder`; None: each corpus has as much as it has samples."""
        self.corpora, self.names = tuple(corpora), tuple(names)
        self.seq_length = corpora[0].seq_length
        self.samples_per_epoch = sum(corpus.samples_per_epoch for corpus in corpora)
        self.order = BlendOrder([corpus.samples_per_epoch for corpus in corpora] if weights is None else weights)

    def sample(self, index: int) -> Sample:
        """Sample `index`, a function of (corpora, weights, seq_length, seed, index). Raises IndexError below 0."""
        corpus, number = self.order.locate(index)
        return self.corpora[corpus].sample(number)

    def where(self, index: int, offset: int) -> str:
        """Of token `offset` of the window of sample `index`, as the corpus says it."""
        corpus, number = self.order.locate(index)
        return self.corpora[corpus].where(number, offset)

    def identity(self) -> dict[str, Fact]:
        """What decides its samples, besides lengths and seed, by flag."""
        facts = [corpus.identity() for corpus in self.corpora]
        shares = zip(self.order.weights.tolist(), facts, strict=True)
        merged = {name: value for each in facts for name, value in each.items()}
        return {**merged, "data_path": " + ".join(f"{weight!r} of {each['data_path']}" for weight, each in shares)}

    def describe(self, num_samples: int | None = None) -> str:
        """For people to read; `num_samples`: of the run, to say how often it reads each corpus."""
        lines = [f"a blend of {len(self.corpora)} corpora, {self.samples_per_epoch:,} samples an epoch"]
        counts = None if num_samples is None else self.order.counts(num_samples).tolist()
        for place, corpus in enumerate(self.corpora):
            line = f"  {100 * self.order.weights[place]:.3g} % {self.names[place]}: {corpus.describe()}"
            if counts is not None:
                line += f"; {counts[place] / corpus.samples_per_epoch:.3g} passes in this run"
            lines.append(line)
        return "\n".join(lines)
