"""Training on preferences: DPO and IPO, as losses over the log-probs of pairs of answers (memo.train.log_probs).

Let r(answer) be log p(answer) of the model minus log p(answer) of the reference, both summed over the tokens that
count, and n the number of these tokens. The loss of one pair is

    dpo    -log sigmoid(beta (r(chosen) - r(rejected)))                              Rafailov et al., 2023, eq. 7
    ipo    (r(chosen) / n(chosen) - r(rejected) / n(rejected) - 1 / (2 beta))^2      Azar et al., 2023, eq. 17

and the loss of a step is the mean over all pairs of the global batch. Both are as in TRL 1.16 (_compute_loss in
trl/trainer/dpo_trainer.py, "sigmoid" and "ipo"). The IPO paper does not divide by n; TRL does, as its authors advised.
"""

import os
from collections.abc import Callable
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
from memo.config.training import TrainingConfig
from memo.data import PreferencePairs, SampleDataset, checked_sample
from memo.errors import ConfigError
from memo.mesh.objects import from_rank_zero
from memo.train.feed import Feed
from memo.train.log_probs import (
    Drawn,
    batches_on,
    check_reference,
    completion_numbers,
    read_log_probs,
    sums_by_completion,
)
from memo.train.parallel_model import ParallelModel

Sums = tuple[Tensor, Tensor]
"""A number for the chosen and for the rejected answer of each pair, such as log p; [pairs] fp64 on the host."""


def preference_losses(training: TrainingConfig, policy: Sums, reference: Sums, lengths: Sums) -> Tensor:
    """The loss of each pair, [pairs]; `lengths`: tokens that count."""
    chosen, rejected = (ours - theirs for ours, theirs in zip(policy, reference, strict=True))
    if training.preference == "dpo":
        return -F.logsigmoid(training.preference_beta * (chosen - rejected))
    return (chosen / lengths[0] - rejected / lengths[1] - 1 / (2 * training.preference_beta)).square()


def rewards(beta: float, policy: Sums, reference: Sums) -> dict[str, float]:
    """Means over pairs by the names of StepRecord: beta r of both answers, their difference, and the share of pairs
    with a difference above zero."""
    chosen, rejected = (beta * (ours - theirs) for ours, theirs in zip(policy, reference, strict=True))
    return {
        "rewards_chosen": chosen.mean().item(),
        "rewards_rejected": rejected.mean().item(),
        "rewards_margins": (chosen - rejected).mean().item(),
        "rewards_accuracies": (chosen > rejected).double().mean().item(),
    }


class PairsOfBatch:
    """One global batch of PreferencePairs: which token belongs to which answer, and the answers' log-probs."""

    def __init__(self, parts: ParallelModel, feed: Feed, first: int) -> None:
        """Take one global batch of a feed for evaluation from sample `first` on. Raises DataError for a sample that the
        model cannot read."""
        dataset, self.end = feed.dataset, first + feed.sampler.global_batch_size
        assert isinstance(dataset, PreferencePairs), "other data are refused before"
        self._parts, self._feed, self._first = parts, feed, first

        def numbers(side: int) -> Tensor:
            indices = range(first + side, self.end, 2)
            return completion_numbers(checked_sample(dataset, index, feed.vocab_size) for index in indices)

        self.numbers = numbers(0), numbers(1)
        """Completion numbers of the chosen and of the rejected side, [samples / 2, s] each."""
        self.pairs = [pair for index in range(first, self.end, 2) for pair in dataset.groups(index)]
        """Numbers of the pairs in the corpus, in the order of the sums."""
        self.counts = torch.stack(self.numbers, 1).flatten(0, 1) >= 0
        """[samples, s]: the labels that count."""
        self.lengths: Sums = self.sums(self.counts.double())

    def log_probs(self, *, reference: bool = False) -> Tensor:
        """Log-probs of all labels, [samples, s]; with `reference` the model runs without its adapters. Collective."""
        self._feed.sampler.consumed_samples = self._first
        return read_log_probs(self._parts, self._feed, self.end - self._first, reference=reference)

    def sums(self, log_probs: Tensor) -> Sums:
        """Sum log-probs [samples, s] over the tokens of each answer."""
        return (
            sums_by_completion(log_probs[0::2], self.numbers[0]),
            sums_by_completion(log_probs[1::2], self.numbers[1]),
        )


class PreferenceSteps:
    """Draws the microbatches of the steps of a run with --preference from the `feed` of its training data. `say` prints
    a line, on one rank; `begin` tells the watchdog which work begins now."""

    def __init__(
        self, parts: ParallelModel, feed: Feed, say: Callable[[str], None], begin: Callable[[str], None]
    ) -> None:
        self.config, self.parts, self.feed, self._say, self._begin = parts.config, parts, feed, say, begin
        self._asks = parts.feed(feed.dataset)
        self._stored: dict[int, tuple[float, float]] | None = None

    def draw(self, iteration: int) -> Drawn:
        """Microbatches of the next global batch, weighted so that a step has the gradient of the loss; collective.

        `iteration`: complete steps. Raises the errors of `PairsOfBatch`, and ConfigError and ArtifactError for the file
        of the reference's log-probs.
        """
        self._prepare(iteration)
        batch = PairsOfBatch(self.parts, self._asks, self.feed.sampler.consumed_samples)
        log_probs, reference, training = batch.log_probs(), self._reference(batch), self.config.training

        def loss(of: Tensor) -> Tensor:
            return preference_losses(training, batch.sums(of), reference, batch.lengths).mean()

        batches, value = batches_on(self.feed, log_probs, batch.counts, loss)
        told = rewards(training.preference_beta, batch.sums(log_probs), reference)
        return batches, {"lm_loss": value, **told}

    def _reference(self, batch: PairsOfBatch) -> Sums:
        if self._stored is None:
            return batch.sums(batch.log_probs(reference=True))
        chosen, rejected = torch.tensor([self._stored[pair] for pair in batch.pairs], dtype=torch.float64).unbind(1)
        return chosen, rejected

    def _prepare(self, iteration: int) -> None:
        """Read the file of --reference-log-probs, or write it before the first step."""
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
            self._begin("step 1")

    def _written(self, path: str) -> dict[int, tuple[float, float]]:
        dataset = self.feed.dataset
        assert isinstance(dataset, PreferencePairs)
        self._say(f"computing the reference's log-probs of {dataset.num_kept:,} pairs, for {path}")
        found: dict[int, tuple[float, float]] = {}
        tenths = 1
        for first in range(0, dataset.samples_per_epoch, self.feed.sampler.global_batch_size):
            while first >= tenths * dataset.samples_per_epoch / 10:
                self._say(f"{tenths}0 % of the reference's log-probs")
                tenths += 1
            self._begin(f"log-probs of the reference, samples from {first:,} on")
            batch = PairsOfBatch(self.parts, self._asks, first)
            sums = batch.sums(batch.log_probs())
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


def stored_reference(path: str, config: RunConfig, dataset: SampleDataset) -> dict[int, tuple[float, float]] | None:
    """{pair: (log p of the chosen, log p of the rejected answer)} of the file; None if there is no file.

    Raises ArtifactError for a file of another kind, and ConfigError for a file of other data or another model.
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
    """The settings on which the log-probs of an answer depend, with fingerprints of the files of weights."""
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


def mean_preference_loss(parts: ParallelModel, feed: Feed, iters: int) -> float:
    """The mean loss over the pairs of `iters` global batches of a feed for evaluation; collective.

    Raises ConfigError if the reference is not in memory.
    """
    check_reference(parts.config.model, "leave out the evaluation")
    losses = []
    for _ in range(iters):
        batch = PairsOfBatch(parts, feed, feed.sampler.consumed_samples)
        policy, reference = (batch.sums(batch.log_probs(reference=without)) for without in (False, True))
        losses.append(preference_losses(parts.config.training, policy, reference, batch.lengths))
    return torch.cat(losses).mean().item()
