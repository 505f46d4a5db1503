"""Log-probs of the labels of samples, and training steps on any loss over them (preferences, policies).

The loss that memo trains is always a sum over tokens of loss_weight x (-log p of the label). For any loss L of
log-probs

    dL/d(parameters)  =  sum over tokens of  dL/d(log p of the token)  x  d(log p of the token)/d(parameters)

so one step on L has three parts: a forward without gradients computes log p of every label; the gradient of L with
respect to these numbers gives each token the weight -dL/d(log p); an ordinary step uses these weights. The cost is
one more forward. Nothing else changes: logits still exist one chunk at a time, and every layout, swap plan and sweep
works as for a language model. A loss may couple tokens of different ranks, because each rank has the log-probs of
the whole global batch: 8 bytes a token.
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from memo.config.derived import trains_adapters_alone
from memo.config.model import ModelConfig
from memo.data import Sample
from memo.errors import ConfigError
from memo.model.transformer import Head, Microbatch
from memo.parallel.adapter import adapters_off
from memo.parallel.collectives import all_reduce
from memo.train.feed import Feed
from memo.train.parallel_model import ParallelModel
from memo_kernels import wide_dtype

LossOfLogProbs = Callable[[Tensor], Tensor]
"""From log-probs [samples, s], fp64 on the host, to a scalar. Every rank computes it, so it must not be random."""


Drawn = tuple[list[Microbatch], dict[str, Any]]
"""The microbatches of a step, and fields of its StepRecord."""
Draw = Callable[[int], Drawn]
"""From the number of complete steps to this rank's microbatches of the next step."""


class GivenSamples:
    """A caller's samples as a dataset; further indices repeat the last sample with all labels masked."""

    def __init__(self, samples: Sequence[Sample], seq_length: int) -> None:
        self.samples, self.seq_length = list(samples), seq_length
        last = self.samples[-1]
        self._more = replace(last, loss_mask=last.loss_mask * 0)

    def sample(self, index: int) -> Sample:
        return self.samples[index] if index < len(self.samples) else self._more


def read_log_probs(parts: ParallelModel, feed: Feed, num_samples: int, *, reference: bool = False) -> Tensor:
    """log p of each label of the next samples of a feed, [num_samples, s] fp64 on the host; 0 for masked labels.

    Collective, and the same bits on all ranks. `feed` is a feed for evaluation; it advances by whole global batches.
    With `reference` the model runs without its adapters.
    """
    with adapters_off(parts.chunks) if reference else nullcontext():
        found = [_of_global_batch(parts, feed) for _ in range(0, num_samples, feed.sampler.global_batch_size)]
    return torch.cat(found)[:num_samples].double()


def _of_global_batch(parts: ParallelModel, feed: Feed) -> Tensor:
    """log p of each label of the next global batch, in the dtype of the losses."""
    first, of_labels = feed.sampler.consumed_samples, list[tuple[list[int], Tensor]]()

    def read(head: Head, hidden: Tensor, batch: Microbatch, samples: list[int]) -> None:
        losses = head.token_losses(hidden, batch.labels)
        of_labels.append((samples, losses.neg_().masked_fill_(batch.loss_weight == 0, 0.0)))

    parts.at_head(feed, read)
    # Allocated only now, when no logits exist, because it holds the whole global batch.
    shape = (feed.sampler.global_batch_size, feed.dataset.seq_length)
    found = torch.zeros(shape, dtype=wide_dtype(parts.chunks[0].dtype), device=parts.device)
    order = feed.shard_order.to(parts.device)
    for samples, of_tokens in of_labels if parts.mesh.at.tp == 0 else ():  # all tp ranks have the same
        for index, of_sample in zip(samples, of_tokens.unbind(1), strict=True):
            found[index - first, order] = of_sample
    return all_reduce(found, parts.mesh.world).cpu()  # one rank has each number, so no sum rounds


def token_weights(log_probs: Tensor, loss: LossOfLogProbs, counts: Tensor) -> tuple[Tensor, float]:
    """Return -dL/d(log p) of every token in the shape of `log_probs`, 0 where `counts` is false, and the value of L.

    Raises ConfigError if L is not a differentiable scalar function of the log-probs.
    """
    leaf = log_probs.detach().requires_grad_()
    with torch.enable_grad():
        value = loss(leaf)
    if not isinstance(value, Tensor) or value.numel() != 1 or not value.requires_grad:
        found = f"a {type(value).__name__}"
        if isinstance(value, Tensor):
            found = f"a tensor of shape {tuple(value.shape)}{'' if value.requires_grad else ' without a gradient'}"
        raise ConfigError(
            f"the loss over log-probs has returned {found}: return one number, a tensor that "
            "torch has computed from the log-probs that the loss was given"
        )
    (grad,) = torch.autograd.grad(value.reshape(()), leaf)
    # Not in place: the elements of a gradient may share memory.
    return -grad.masked_fill(~counts, 0.0), float(value.detach())


def batches_on(feed: Feed, log_probs: Tensor, counts: Tensor, loss: LossOfLogProbs) -> tuple[list[Microbatch], float]:
    """Return this rank's microbatches of the next global batch, weighted so that a step has the gradient of `loss`, and
    the value of `loss`. The next global batch of `feed`, for training, begins with the samples of `log_probs` [samples,
    s]; `counts` [samples, s] is true for labels that count."""
    weights, value = token_weights(log_probs, loss, counts)
    first, missing = feed.sampler.consumed_samples, feed.sampler.global_batch_size - len(weights)
    whole = torch.cat([weights, weights.new_zeros(missing, weights.shape[1])])
    rows = [[index - first for index in group] for group in feed.own_samples()]
    batches = feed.next_global_batch(per_token=True)
    return [
        replace(batch, loss_weight=feed.in_shard_order(whole[own])) for own, batch in zip(rows, batches, strict=True)
    ], value


def batches_on_samples(parts: ParallelModel, samples: GivenSamples, loss: LossOfLogProbs) -> Drawn:
    """Draw the microbatches of a step that trains on `loss` of the log-probs of a caller's samples."""
    log_probs = read_log_probs(parts, parts.feed(samples), len(samples.samples))
    counts = torch.from_numpy(np.stack([sample.loss_mask for sample in samples.samples]) > 0)
    batches, value = batches_on(parts.feed(samples), log_probs, counts, loss)
    return batches, {"lm_loss": value}


def completion_numbers(samples: Iterable[Sample]) -> Tensor:
    """[samples, s] int64: the number of the completion that a label belongs to, -1 for a label that does not count.

    A completion is a document with a label that counts. Completions are numbered from 0 in the order of the samples.
    """
    numbers, known = [], 0
    for sample in samples:
        counts = sample.loss_mask > 0
        has_some = np.add.reduceat(counts, sample.cu_seqlens[:-1], dtype=np.int64) > 0
        own = np.repeat(known + np.cumsum(has_some) - 1, np.diff(sample.cu_seqlens))
        numbers.append(np.where(counts, own, -1))
        known += int(has_some.sum())
    return torch.from_numpy(np.stack(numbers))


def sums_by_completion(values: Tensor, numbers: Tensor) -> Tensor:
    """The sum of `values` over the labels of each completion, [completions]; for log-probs, log p of each completion.

    `numbers` come from `completion_numbers`. Differentiable; on the host it adds in the order of tokens.
    """
    counts = numbers >= 0
    return values.new_zeros(int(numbers.max()) + 1).index_add(0, numbers[counts], values[counts])


def check_samples(samples: Sequence[Sample], name: str, most: int | None = None) -> Sequence[Sample]:
    """Return `samples`; raises ConfigError if there are none, or more than `most`, the size of a global batch."""
    if not samples or (most is not None and len(samples) > most):
        limit = "at least one" if most is None else f"1 to {most}, as --global-batch-size is {most}"
        raise ConfigError(f"{name}() got {len(samples)} samples: give {limit}")
    return samples


def check_reference(model: ModelConfig, otherwise: str) -> None:
    """Raises ConfigError if training changes the model without its adapters, which then cannot be the reference.

    `otherwise`: what to do if more than adapters is to be trained.
    """
    if not trains_adapters_alone(model):
        told = f"--train-only {model.train_only}" if model.lora_rank else "--lora-rank 0"
        raise ConfigError(
            f"{told} leaves no reference in memory, which is the model without its adapters: train adapters alone, "
            f"with --lora-rank, or {otherwise}"
        )
