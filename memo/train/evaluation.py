"""Evaluation: the loss on held-out samples, on average and by position, and the recall of needles by distance.

Only forwards run. Gradients, buffers of a swap plan and the order of the training data stay as they are, so an
evaluation does not change any later loss. The numbers do not depend on the layout: each rank sums over its own tokens,
and the sums are added over all ranks.

A mean is the sum of the losses of all tokens divided by the sum of their weights, so it does not depend on how the
samples are cut into batches. Sums are in fp64. No term is negative, so the relative error of n tokens added in any
order is at most n 2^-53 (1.2e-10 for 2^20 tokens).
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from memo.config import RunConfig
from memo.data.needle import NeedleDataset
from memo.errors import ConfigError, DataError
from memo.model.transformer import Head, Microbatch
from memo.text_table import text_table
from memo.train.feed import Feed
from memo.train.parallel_model import ParallelModel

_FIRST_EDGE = 512
"""All positions below this are one bucket, because models hardly differ so close to the beginning of a text."""


def perplexity(loss: float) -> float:
    """The perplexity of a loss in nats per token; infinite if fp64 cannot hold it, nan for nan."""
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf


@dataclass(frozen=True)
class PositionBucket:
    """Tokens with at least `first` and fewer than `end` others before them in their document."""

    first: int
    end: int
    num_tokens: int
    """Number of tokens that count in the loss."""
    loss: float
    """Nats per token."""

    @property
    def perplexity(self) -> float:
        return perplexity(self.loss)


@dataclass(frozen=True)
class LossByPosition:
    """Losses by position. Buckets without tokens are left out: packed documents may all be shorter than a sample."""

    loss: float
    """Nats per token over all buckets, as `evaluate` returns it."""
    buckets: tuple[PositionBucket, ...]

    def table(self) -> str:
        """A table for people, with a line for each bucket."""
        rows = [(_span(b.first, b.end), f"{b.num_tokens:,}", *_loss_columns(b.loss)) for b in self.buckets]
        total = f"{sum(b.num_tokens for b in self.buckets):,}"
        rows.append(("all", total, *_loss_columns(self.loss)))
        return text_table([("position", "tokens", "loss", "perplexity"), *rows], left=())


@dataclass(frozen=True)
class DistanceBucket:
    """Questions whose answer is at least `first` and fewer than `end` tokens back."""

    first: int
    end: int
    num_questions: int
    accuracy: float
    """Share of the questions that greedy decoding answers without a wrong token."""
    loss: float
    """Nats per token of an answer."""


@dataclass(frozen=True)
class NeedleRecall:
    """Accuracy and loss of a model's answers to questions about needles; buckets without questions are left out."""

    accuracy: float
    loss: float
    buckets: tuple[DistanceBucket, ...]

    def table(self) -> str:
        """A table for people, with a line for each bucket."""

        def columns(num_questions: int, accuracy: float, loss: float) -> tuple[str, ...]:
            return f"{num_questions:,}", f"{100 * accuracy:.1f} %", f"{loss:.4f}"

        rows = [(_span(b.first, b.end), *columns(b.num_questions, b.accuracy, b.loss)) for b in self.buckets]
        rows.append(("all", *columns(sum(b.num_questions for b in self.buckets), self.accuracy, self.loss)))
        return text_table([("distance", "questions", "found", "loss"), *rows], left=())


Evaluated = float | LossByPosition
"""The result of an evaluation of one set: nats per token, perhaps by position."""


def loss_of(found: Evaluated) -> float:
    """Nats per token."""
    return found.loss if isinstance(found, LossByPosition) else found


def compare_positions(found: Mapping[str, LossByPosition]) -> str:
    """A table of perplexities on the same data, with a line for each bucket and a column for each named model."""
    columns = list(found.values())
    rows = [
        (_span(same[0].first, same[0].end), *(f"{bucket.perplexity:.4g}" for bucket in same))
        for same in zip(*(column.buckets for column in columns), strict=True)
    ]
    rows.append(("all", *(f"{perplexity(column.loss):.4g}" for column in columns)))
    return text_table([("perplexity", *found), *rows], left=())


def num_batches(config: RunConfig, iters: int | None) -> int:
    """Number of global batches of an evaluation; None means --eval-iters. Raises ConfigError for fewer than one."""
    if iters is None:
        return config.training.eval_iters
    if iters < 1:
        raise ConfigError(
            f"an evaluation got iters = {iters}: give at least 1, or leave it out for --eval-iters "
            f"{config.training.eval_iters}"
        )
    return iters


def mean_loss(parts: ParallelModel, feed: Feed, iters: int) -> float:
    """Nats per token over `iters` global batches; collective, the same on all ranks.

    Raises DataError on all ranks if no token counts.
    """
    sums = torch.zeros(2, dtype=torch.float64, device=parts.device)

    def add(batch: Microbatch, losses: Tensor) -> None:
        sums.add_(torch.stack([(losses * batch.loss_weight).sum(), batch.loss_weight.sum()]))

    _read_losses(parts, feed, iters, add)
    weighted, weight = parts.sum_over_ranks(sums).tolist()
    return _mean(weighted, weight, feed, iters)


def loss_by_position(
    parts: ParallelModel, feed: Feed, iters: int, edges: Sequence[int] | None = None
) -> LossByPosition:
    """The losses of `iters` global batches by position; collective, the same on all ranks.

    The position is the one that RoPE uses: with packing a token's index in its document, without packing its index in
    the sample. So it is the number of tokens to which the token can attend. `edges` are the ends of buckets besides the
    end of the sequence; default: 512 and its doublings.

    Raises ConfigError for edges that do not increase from 1, and DataError if no token counts.
    """
    seq_length = feed.dataset.seq_length
    bounds = _bounds(edges, seq_length)
    inner = torch.tensor(bounds[1:-1], device=parts.device, dtype=torch.int64)
    sums = torch.zeros(len(bounds) - 1, 3, dtype=torch.float64, device=parts.device)

    def add(batch: Microbatch, losses: Tensor) -> None:
        weight = batch.loss_weight
        values = torch.stack([losses * weight, weight, (weight > 0).double()], dim=-1)
        sums.index_add_(0, torch.bucketize(batch.positions.flatten(), inner, right=True), values.flatten(0, 1))

    _read_losses(parts, feed, iters, add)
    rows = parts.sum_over_ranks(sums).tolist()
    buckets = tuple(
        PositionBucket(first, end, int(count), weighted / weight)
        for (first, end), (weighted, weight, count) in zip(pairwise(bounds), rows, strict=True)
        if count
    )
    return LossByPosition(_mean(sum(row[0] for row in rows), sum(row[1] for row in rows), feed, iters), buckets)


def needle_recall(
    parts: ParallelModel, feed: Feed, needles: NeedleDataset, iters: int, edges: Sequence[int] | None = None
) -> NeedleRecall:
    """The share of the values asked for in `iters` global batches that are found; collective, the same on all ranks.
    `feed` draws from `needles` from its first sample on; `edges`: of distances, as in `loss_by_position`."""
    bounds = _bounds(edges, needles.seq_length)
    num_samples = iters * feed.sampler.global_batch_size
    # For each question: the sum of the losses of its answer's tokens, and how many of the tokens are the likeliest.
    tally = torch.zeros(num_samples * needles.num_needles, 2, dtype=torch.float64, device=parts.device)

    def add(head: Head, hidden: Tensor, batch: Microbatch, samples: list[int]) -> None:
        number = feed.in_shard_order(_question_numbers(needles, samples))
        losses, likeliest = head.losses_and_greedy_tokens(hidden, batch.labels)
        values = torch.stack([losses.double(), (likeliest == batch.labels).double()], dim=-1)
        tally.index_add_(0, number[number >= 0], values[number >= 0])

    for _ in range(iters):
        parts.at_head(feed, add)
    loss, found = (parts.sum_over_ranks(tally) / needles.value_length).cpu().unbind(1)
    found = (found == 1.0).double()
    distances = torch.cat([torch.from_numpy(needles.questions(i).distances) for i in range(num_samples)])
    bucket = torch.bucketize(distances, torch.tensor(bounds[1:-1], dtype=torch.int64), right=True)
    buckets = []
    for index, (first, end) in enumerate(pairwise(bounds)):
        here = bucket == index
        if here.any():
            mean = (found[here].mean().item(), loss[here].mean().item())
            buckets.append(DistanceBucket(first, end, int(here.sum()), *mean))
    return NeedleRecall(found.mean().item(), loss.mean().item(), tuple(buckets))


def _read_losses(parts: ParallelModel, feed: Feed, iters: int, read: Callable[[Microbatch, Tensor], None]) -> None:
    """Run forwards of `iters` global batches and call read(microbatch, losses), fp64 [s, b], on the last stage.

    The weight of a token is its loss mask, so that sums over batches can be added up and divided once at the end.
    """

    def at_head(head: Head, hidden: Tensor, batch: Microbatch, _: list[int]) -> None:
        read(batch, head.token_losses(hidden, batch.labels).double())

    for _ in range(iters):
        parts.at_head(feed, at_head)


def _mean(weighted: float, weight: float, feed: Feed, iters: int) -> float:
    if not weight > 0:
        num_samples = iters * feed.sampler.global_batch_size
        raise DataError(
            f"no token counts in the {num_samples} samples of an evaluation ({iters} global batches of "
            f"{feed.sampler.global_batch_size}): every label of the evaluation data is masked, so there is no loss to "
            "tell: give other --eval-data-path or eval_data=, more --eval-iters, or --eval-interval 0"
        )
    return weighted / weight


def _question_numbers(needles: NeedleDataset, samples: Sequence[int]) -> Tensor:
    """[b, s]: for each token the number of the question whose answer it must predict; -1 for none."""
    numbers = torch.full((len(samples), needles.seq_length), -1, dtype=torch.int64)
    for row, sample in enumerate(samples):
        for place, labels in enumerate(needles.questions(sample).labels):
            numbers[row, torch.from_numpy(labels)] = sample * needles.num_needles + place
    return numbers


def _bounds(edges: Sequence[int] | None, seq_length: int) -> list[int]:
    """[0, the edges within the sequence, its end]."""
    if edges is None:
        doublings = range(((seq_length - 1) // _FIRST_EDGE).bit_length())
        edges = [_FIRST_EDGE << doubling for doubling in doublings]
    if any(edge <= before for before, edge in pairwise((0, *edges))):
        raise ConfigError(f"edges of buckets are {list(edges)}: give increasing numbers above 0, such as 512, 1024")
    return [0, *(edge for edge in edges if edge < seq_length), seq_length]


def _loss_columns(loss: float) -> tuple[str, str]:
    return f"{loss:.4f}", f"{perplexity(loss):.4g}"


def _span(first: int, end: int) -> str:
    return f"{_short(first)} - {_short(end)}"


def _short(tokens: int) -> str:
    """`131072` -> `'128K'`."""
    for unit, size in (("M", 1 << 20), ("K", 1 << 10)):
        if tokens and tokens % size == 0:
            return f"{tokens // size}{unit}"
    return str(tokens)
