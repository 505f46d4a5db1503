"""Training on preferences: DPO and IPO, as losses over the log-probs of pairs of answers (memo.train.log_probs).

Let r(answer) be log p of the answer under the model less the same under the reference, each the sum over the tokens
that count, and n the number of these tokens. Of one pair the loss is

    dpo    -log sigmoid(beta (r(chosen) - r(rejected)))                              Rafailov et al., 2023, eq. 7
    ipo    (r(chosen) / n(chosen) - r(rejected) / n(rejected) - 1 / (2 beta))^2      Azar et al., 2023, eq. 17

and of a step the mean over all pairs of the global batch. Both are those of TRL 1.16 (trl/trainer/dpo_trainer.py,
_compute_loss, "sigmoid" and "ipo"); the paper of IPO does not divide by n, but TRL does, after a word with its authors.
"""

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from memo.artifacts.checksum import checksum_of
from memo.artifacts.reference_log_probs import ReferenceLogProbs
from memo.checkpoint.hugging_face.adapters import ADAPTER_FILE
from memo.checkpoint.hugging_face.files import TensorFiles
from memo.config import RunConfig
from memo.config.training import Preference
from memo.data import PreferencePairs, Sample, SampleDataset, checked_sample
from memo.data.pairs_of_run import check_learned
from memo.errors import ConfigError
from memo.mesh.objects import from_rank_zero
from memo.train.build import ParallelModel
from memo.train.feed import Feed
from memo.train.log_probs import (
    Draw,
    Drawn,
    check_reference,
    completion_numbers,
    read_log_probs,
    sums_by_completion,
    token_weights,
    weighted,
)

Sums = tuple[Tensor, Tensor]
"""Log p of the chosen and of the rejected answer of each pair, [pairs] fp64 on the host."""


@dataclass(frozen=True)
class Objective:
    """Which loss."""

    kind: Preference
    beta: float

    def losses(self, policy: Sums, reference: Sums, lengths: Sums) -> Tensor:
        """Of each pair, [pairs]."""
        chosen, rejected = (ours - theirs for ours, theirs in zip(policy, reference, strict=True))
        if self.kind == "dpo":
            return -F.logsigmoid(self.beta * (chosen - rejected))
        return (chosen / lengths[0] - rejected / lengths[1] - 1 / (2 * self.beta)).square()

    def rewards(self, policy: Sums, reference: Sums) -> dict[str, float]:
        """Means over pairs by the names of StepRecord: beta r of both answers, the difference, and how often it is
        above zero."""
        chosen, rejected = (self.beta * (ours - theirs) for ours, theirs in zip(policy, reference, strict=True))
        return {
            "rewards_chosen": chosen.mean().item(),
            "rewards_rejected": rejected.mean().item(),
            "rewards_margins": (chosen - rejected).mean().item(),
            "rewards_accuracies": (chosen > rejected).double().mean().item(),
        }


class PairsOfBatch:
    """Which token of one global batch of PreferencePairs belongs to which answer."""

    def __init__(self, dataset: PreferencePairs, first: int, count: int, vocab_size: int) -> None:
        """Samples `first` to first + count. Raises DataError for one that the model cannot read."""

        def samples(side: int) -> Iterator[Sample]:
            for index in range(first + side, first + count, 2):
                yield checked_sample(dataset, index, vocab_size)

        self.numbers = completion_numbers(samples(0)), completion_numbers(samples(1))
        """Of both sides, [samples / 2, s]."""
        self.pairs = [pair for index in range(first, first + count, 2) for pair in dataset.groups(index)]
        """Of the corpus, in the order of the sums."""
        self.counts = torch.stack(self.numbers, 1).flatten(0, 1) >= 0
        """[samples, s]: the labels that count."""
        self.lengths: Sums = self.sums(self.counts.double())

    def sums(self, log_probs: Tensor) -> Sums:
        """Of log-probs [samples, s]."""
        return (
            sums_by_completion(log_probs[0::2], self.numbers[0]),
            sums_by_completion(log_probs[1::2], self.numbers[1]),
        )


class PreferenceSteps:
    """What the steps of a run with --preference train on.

    Args:
        feed: of the training data.
        ask: makes a feed of the same data as an evaluation reads it.
        say: prints a line, on one rank.
        begin: tells the watchdog what is done from now on.
    """

    def __init__(
        self,
        config: RunConfig,
        parts: ParallelModel,
        feed: Feed,
        ask: Callable[[SampleDataset], Feed],
        say: Callable[[str], None],
        begin: Callable[[str], None],
    ) -> None:
        self.config, self.parts, self.feed, self.say, self.begin = config, parts, feed, say, begin
        self.objective, self._ask = objective_of(config), ask
        self._asks: Feed | None = None
        self._stored: dict[int, tuple[float, float]] | None = None

    def draw(self, iteration: int) -> Drawn:
        """Microbatches of the next global batch, whose weights make their gradient that of the loss; collective.

        `iteration`: steps that are complete. Raises as `PairsOfBatch`, and ConfigError and ArtifactError for the file
        of the reference's log-probs.
        """
        self._prepare(iteration)
        batch = self._next()
        log_probs = self._read()
        reference = self._reference(batch)
        policy = batch.sums(log_probs)

        def loss(of: Tensor) -> Tensor:
            return self.objective.losses(batch.sums(of), reference, batch.lengths).mean()

        weights, value = token_weights(log_probs, loss, batch.counts)
        figures: dict[str, Any] = {"lm_loss": value, **self.objective.rewards(policy, reference)}
        return weighted(self.parts, self.feed, weights), figures

    def _next(self) -> PairsOfBatch:
        sampler = self.feed.sampler
        assert isinstance(self.feed.dataset, PreferencePairs), "_prepare has refused other data"
        return PairsOfBatch(
            self.feed.dataset, sampler.consumed_samples, sampler.global_batch_size, self.feed.vocab_size
        )

    def _read(self, first: int | None = None, *, reference: bool = False) -> Tensor:
        """Of the global batch that begins with a sample, by default the next; the sampler of training stays."""
        sampler = self.feed.sampler
        if self._asks is None:
            self._asks = self._ask(self.feed.dataset)
        self._asks.sampler.consumed_samples = sampler.consumed_samples if first is None else first
        return read_log_probs(self.parts, self._asks, sampler.global_batch_size, reference=reference)

    def _reference(self, batch: PairsOfBatch) -> Sums:
        if self._stored is None:
            return batch.sums(self._read(reference=True))
        chosen, rejected = torch.tensor([self._stored[pair] for pair in batch.pairs], dtype=torch.float64).unbind(1)
        return chosen, rejected

    def _prepare(self, iteration: int) -> None:
        """Check the data; read the file of --reference-log-probs, or write it before the first step."""
        check_learned(self.config, isinstance(self.feed.dataset, PreferencePairs), "train_data")
        path = self.config.data.reference_log_probs
        if path is None or self._stored is not None:
            return
        self._stored = from_rank_zero(
            lambda: stored_reference(path, self.config, self.feed.dataset), self.parts.mesh.world
        )
        if self._stored is None:
            if iteration:
                raise ConfigError(
                    f"--reference-log-probs {path} does not exist, and this run is at iteration {iteration}: its "
                    "weights are not the reference any more; bring the file that it has written before its first step"
                )
            self._stored = self._written(path)
            self.begin("step 1")

    def _written(self, path: str) -> dict[int, tuple[float, float]]:
        dataset, sampler = self.feed.dataset, self.feed.sampler
        assert isinstance(dataset, PreferencePairs)
        self.say(f"computing the reference's log-probs of {dataset.num_kept:,} pairs, for {path}")
        found: dict[int, tuple[float, float]] = {}
        tenths = 1
        for first in range(0, dataset.samples_per_epoch, sampler.global_batch_size):
            while first >= tenths * dataset.samples_per_epoch / 10:
                self.say(f"{tenths}0 % of the reference's log-probs")
                tenths += 1
            self.begin(f"log-probs of the reference, samples from {first:,} on")
            batch = PairsOfBatch(dataset, first, sampler.global_batch_size, self.feed.vocab_size)
            sums = batch.sums(self._read(first))
            found |= dict(zip(batch.pairs, zip(*(side.tolist() for side in sums), strict=True), strict=True))
        pairs = sorted(found)
        content = ReferenceLogProbs(
            _content_of(self.config, dataset),
            pairs,
            [found[pair][0] for pair in pairs],
            [found[pair][1] for pair in pairs],
        )
        from_rank_zero(lambda: content.save(path), self.parts.mesh.world)
        return found


def draw_of(
    config: RunConfig,
    parts: ParallelModel,
    feed: Feed,
    ask: Callable[[SampleDataset], Feed],
    say: Callable[[str], None],
    begin: Callable[[str], None],
) -> Draw:
    """How a run's steps take their data: as texts, or by --preference as pairs; arguments as of PreferenceSteps."""
    if config.training.preference is not None:
        return PreferenceSteps(config, parts, feed, ask, say, begin).draw

    def draw(iteration: int) -> Drawn:
        check_learned(config, isinstance(feed.dataset, PreferencePairs), "train_data")
        return feed.next_global_batch(), {}

    return draw


def stored_reference(path: str, config: RunConfig, dataset: SampleDataset) -> dict[int, tuple[float, float]] | None:
    """What the file says of each pair; None where there is no file.

    Raises ArtifactError for another file, and ConfigError for one of other data or of another model.
    """
    if not os.path.exists(path):
        return None
    stored = ReferenceLogProbs.load(path)
    now = _content_of(config, dataset)
    changes = [(name, stored.of.get(name), value) for name, value in now.items() if stored.of.get(name) != value]
    if changes:
        told = "; ".join(f"{name} {then} then, {value} now" for name, then, value in changes)
        raise ConfigError(
            f"--reference-log-probs {path} is of other data or of another model: {told}: give the file of these, or "
            "another name, under which the run writes one before its first step"
        )
    return stored.by_pair()


def _content_of(config: RunConfig, dataset: SampleDataset) -> dict[str, Any]:
    """What the log-probs of an answer depend on; of files of weights their fingerprints."""
    assert isinstance(dataset, PreferencePairs)
    model, adapter = config.checkpoint.pretrained_checkpoint, config.checkpoint.lora_checkpoint
    facts = dataset.identity()
    return {
        "seq_length": dataset.seq_length,
        **{name: facts[name] for name in ("data_path", "long_conversations")},
        "model": f"of seed {config.training.seed}" if model is None else TensorFiles(model).fingerprint(),
        "adapters": "new" if adapter is None else checksum_of(Path(adapter, ADAPTER_FILE).read_bytes()),
        "quantize": config.model.quantize,
    }


def objective_of(config: RunConfig) -> Objective:
    """Of a run with --preference."""
    assert config.training.preference is not None
    return Objective(config.training.preference, config.training.preference_beta)


def mean_preference_loss(config: RunConfig, parts: ParallelModel, feed: Feed, iters: int) -> float:
    """The mean loss over the pairs of `iters` global batches of an evaluation's feed; collective.

    Raises ConfigError where the reference is not in memory.
    """
    check_reference(config.model)
    dataset, sampler, objective, losses = feed.dataset, feed.sampler, objective_of(config), []
    assert isinstance(dataset, PreferencePairs)
    for _ in range(iters):
        first, count = sampler.consumed_samples, sampler.global_batch_size
        batch = PairsOfBatch(dataset, first, count, feed.vocab_size)
        policy = batch.sums(read_log_probs(parts, feed, count))
        sampler.consumed_samples = first
        reference = batch.sums(read_log_probs(parts, feed, count, reference=True))
        losses.append(objective.losses(policy, reference, batch.lengths))
    return torch.cat(losses).mean().item()
