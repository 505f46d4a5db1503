"""AdamW over this rank's master shards, gradient clipping, and the learning-rate schedule."""

import contextlib
import functools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor

from memo.config import RunConfig, TrainingConfig
from memo.config.derived import (
    resolved_lr,
    resolved_lr_decay_iters,
    resolved_lr_warmup_iters,
    resolved_lr_wsd_decay_iters,
)
from memo.errors import GradientError
from memo.executor.layer_states import Update
from memo.executor.states import StateStreamer
from memo.parallel.data import ShardedDataParallel
from memo.parallel.units import Bucket, MasterSegment, Unit
from memo.train.adamw import AdamW
from memo_kernels import wide_dtype


class _Part:
    """The buckets that one call updates: all buckets on the device, or one layer's buckets in host memory."""

    def __init__(
        self,
        data_parallel: ShardedDataParallel,
        buckets: Sequence[Bucket],
        config: TrainingConfig,
        layer: int | None = None,
    ) -> None:
        """`layer`: the layer's position among the rank's layers if the buckets of one layer are in host memory."""
        self.buckets, self.layer = buckets, layer
        self.segments = [segment for bucket in buckets for segment in data_parallel.segments_of(bucket)]
        groups = [
            {"params": [s.weight for s in self.segments if s.shard.decay is decay], "weight_decay": amount}
            for decay, amount in ((True, config.weight_decay), (False, 0.0))
        ]
        # A rank whose shard is all padding has nothing to update.
        groups = [group for group in groups if group["params"]]
        betas, moments = (config.adam_beta1, config.adam_beta2), data_parallel.rules.moments
        self.adam = AdamW(groups, lr=0.0, betas=betas, eps=config.adam_eps, moments=moments) if groups else None
        self.update_s = 0.0

    def update(self, lr: float, factor: Tensor | None = None) -> None:
        """Update masters and moments, and the copies of weights from which slots are filled.

        `factor`: a scalar of the gradients' dtype, on the CPU, by which they are multiplied first.
        """
        begin_s = time.perf_counter()
        if factor is not None:
            for bucket in self.buckets:
                bucket.gradient_shard.mul_(factor)
        if self.adam is not None:
            for group in self.adam.param_groups:
                group["lr"] = lr
            self.adam.step()
        for bucket in self.buckets:
            bucket.refresh_source()
        self.update_s = time.perf_counter() - begin_s

    def state(self, segment: MasterSegment) -> dict[str, Tensor]:
        """Moments and step count of a segment, zero before the first step; in memory of the segment if it has any."""
        assert self.adam is not None
        return self.adam.state_of(segment.weight, segment.moments)


class Optimizer:
    """One AdamW step on this rank's shards, with global-norm clipping before it.

    A thread updates layers in host memory on the CPU, in the order in which the next step needs them, and the next step
    begins meanwhile: its first use of a layer waits for the update of that layer, so no weights are ever stale.

    Without clipping, an update does not depend on the norm of all gradients. Then, within `updating`, a thread updates
    a layer in host memory as soon as its gradient has arrived, while backward goes on with the layers below.
    """

    def __init__(
        self, data_parallel: ShardedDataParallel, config: TrainingConfig, states: StateStreamer | None = None
    ) -> None:
        """`states`: streams the states of this rank, if they are not resident."""
        self.data_parallel, self.config, self.states = data_parallel, config, states
        on_host = [unit for unit in data_parallel.units if unit.places.optimizer_on_host and unit.trained_buckets]
        if states is not None:
            on_host = states.in_order_of_updates(on_host)
        on_device = [b for b in data_parallel.trained_buckets if not b.places.optimizer_on_host]
        self.parts = [_Part(data_parallel, on_device, config)] if on_device else []
        self.parts += [_Part(data_parallel, unit.trained_buckets, config, unit.layer) for unit in on_host]
        for part in self.parts:
            for segment in part.segments:
                if segment.moments is not None:
                    part.state(segment)
        self.before_update: Callable[[], None] = lambda: None
        """Called in every step before masters and moments change, because a checkpoint may still be reading them."""
        self._thread = ThreadPoolExecutor(1, "memo-optimizer")
        self._early: set[_Part] = set()
        """The parts whose update in this step has begun during its backward."""

    @contextlib.contextmanager
    def updating(self, lr: float) -> Iterator[Update | None]:
        """A context around backward and `step(lr)` of one training step; yields the function that updates layers during
        backward, or None."""
        if self.states is None or self.config.clip_grad > 0:
            yield None
            return
        try:
            yield functools.partial(self._start_update, lr)
        finally:
            self._early = set()

    def _start_update(self, lr: float, unit: Unit, wait: Callable[[], None]) -> Future[None]:
        """Start the update of a layer in host memory whose gradient arrives when `wait` returns."""
        assert unit.layer is not None, "embedding and head are not updated early"
        part = next(part for part in self.parts if part.layer == unit.layer)
        is_virtual = unit.buckets[0].device.type == "cpu"
        if is_virtual:
            wait()  # virtual copies run in the thread that waits for them

        def update() -> None:
            if not is_virtual:
                wait()
            self.before_update()
            part.update(lr)

        self._early.add(part)
        return self._thread.submit(update)

    @property
    def host_update_s(self) -> float:
        """Seconds that the CPU took to update states in host memory, the last time that it updated each layer."""
        return sum(part.update_s for part in self.parts if part.buckets[0].places.optimizer_on_host)

    @property
    def segments(self) -> list[MasterSegment]:
        self._await_updates()
        return [segment for part in self.parts for segment in part.segments]

    def step(self, lr: float, read: Callable[[Tensor], float] = Tensor.item) -> tuple[float, bool]:
        """Clip, update, publish the new weights. Returns (gradient norm before clipping, whether it has updated).

        A step whose gradient norm is not finite is skipped on every rank: weights and moments stay. `read` brings the
        norm, an fp64 scalar, to the host; the host waits for the device only here.
        """
        data_parallel = self.data_parallel
        if self.states is not None:
            self.states.await_gradients()
        norm_value = read(data_parallel.main_gradients.norm())
        # Allocated even if it is not used, because a memory plan needs every step to make the same memory requests.
        factor = torch.tensor(self.config.clip_grad / (norm_value + 1e-6), dtype=wide_dtype(data_parallel.dtype))
        if self._early:
            self._await_updates()
        if not math.isfinite(norm_value):
            if self._early:
                raise GradientError(
                    f"the gradient norm is {norm_value}, and with --clip-grad 0 and --offload-states layers were"
                    " updated before it was known: resume from the last checkpoint with --clip-grad 1, which skips"
                    " such a step"
                )
            return norm_value, False
        clips = 0 < self.config.clip_grad < norm_value
        self.before_update()
        for part in self.parts:
            self._update(part, lr, factor if clips else None)
        if self.states is not None:
            self.states.forget()
        return norm_value, True

    def _update(self, part: _Part, lr: float, factor: Tensor | None) -> None:
        if part in self._early:
            return
        if self.states is not None and part.layer is not None:
            self.states.update_later(part.layer, self._thread.submit(part.update, lr, factor))
            return
        part.update(lr, factor)
        self.data_parallel.publish_weights(part.buckets, self.states)

    def finish(self) -> None:
        """Wait until all updates have ended, and publish all new weights. Collective."""
        if self.states is not None:
            self.states.receive_all()

    @contextlib.contextmanager
    def rehearsing(self) -> Iterator[None]:
        """A context in which `step` makes all the memory requests of a real step, and updates nothing.

        Weights, masters, moments and step counts keep every bit; only gradients are clipped. torch's kernel is told
        that gradients have overflowed, as torch.amp.GradScaler does it, so the kernel changes nothing.
        """
        self.segment_states()  # moments outlive the step, so they must exist before it
        adams = [part.adam for part in self.parts if part.adam is not None]
        for adam in adams:
            weight = adam.param_groups[0]["params"][0]
            adam.found_inf = torch.ones((), dtype=torch.float32, device=weight.device)
        try:
            yield
        finally:
            self._await_updates()
            for adam in adams:
                adam.found_inf = None

    def segment_states(self) -> list[tuple[MasterSegment, dict[str, Tensor]]]:
        """The masters and moments of every segment, 1-D, without copies; the moments are zero before the first step.
        Segments that nothing updates come last and have no moments."""
        self._await_updates()
        states = []
        for part in self.parts:
            for segment in part.segments:
                state = part.state(segment)
                tensors = {"master": segment.weight.detach()}
                states.append((segment, tensors | {kind: state[kind] for kind in ("exp_avg", "exp_avg_sq")}))
        return states + [(each, {"master": each.weight.detach()}) for each in self.data_parallel.saved_unchanged()]

    def _await_updates(self) -> None:
        if self.states is not None:
            self.states.await_updates()

    def resume(self, optimizer_steps: int) -> None:
        """Set the step counts and publish the weights; call it after masters and moments were loaded."""
        for part in self.parts:
            for segment in part.segments:
                step = torch.tensor(float(optimizer_steps), device=segment.weight.device)
                part.state(segment)["step"] = step
        self.data_parallel.publish_weights(mover=self.states)
        if self.states is not None:
            self.states.forget()


def learning_rate(config: RunConfig, iteration: int) -> float:
    """Learning rate of step `iteration` (counted from 1): warm-up, then the chosen decay to min_lr."""
    training, decay_iters = config.training, resolved_lr_decay_iters(config.training)
    peak, floor, warmup = resolved_lr(config), training.min_lr, resolved_lr_warmup_iters(config)
    if iteration <= warmup:
        return peak * iteration / warmup
    if training.lr_decay_style == "constant":
        return peak
    if iteration >= decay_iters:
        return floor
    if training.lr_decay_style == "WSD":
        length = resolved_lr_wsd_decay_iters(training)
        return peak - (peak - floor) * max(0, iteration - (decay_iters - length)) / length
    done = (iteration - warmup) / (decay_iters - warmup)
    share = 1.0 - done if training.lr_decay_style == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
    return floor + (peak - floor) * share


def schedule_of(config: RunConfig) -> dict[str, object]:
    """{flag: value} of all settings that `learning_rate` reads."""
    training = config.training
    schedule: dict[str, object] = {"--lr": resolved_lr(config), "--lr-decay-style": training.lr_decay_style}
    schedule["--lr-warmup-iters"] = resolved_lr_warmup_iters(config)
    if training.lr_decay_style != "constant":
        schedule |= {"--min-lr": training.min_lr, "--lr-decay-iters": resolved_lr_decay_iters(training)}
    if training.lr_decay_style == "WSD":
        schedule["--lr-wsd-decay-iters"] = resolved_lr_wsd_decay_iters(training)
    return schedule
