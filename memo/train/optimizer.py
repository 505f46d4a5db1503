"""AdamW over this rank's master shards, gradient clipping, and the learning-rate schedule."""

import contextlib
import importlib.util
import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from memo.config import RunConfig, TrainingConfig
from memo.config.derived import resolved_lr_decay_iters, resolved_lr_wsd_decay_iters
from memo.parallel.data import MasterSegment, ShardedDataParallel


class Optimizer:
    """One AdamW step on the shards of ZeRO-1, with global-norm clipping before it.

    The update runs in torch's fused kernel, or apex's where apex is importable and the shards are on CUDA.
    """

    def __init__(self, data_parallel: ShardedDataParallel, config: TrainingConfig) -> None:
        self.data_parallel, self.config = data_parallel, config
        self.segments = data_parallel.master_segments()
        groups = [
            {"params": [s.weight for s in self.segments if s.shard.decay is decay], "weight_decay": amount}
            for decay, amount in ((True, config.weight_decay), (False, 0.0))
        ]
        # A rank whose shard is all padding has nothing to update.
        groups = [group for group in groups if group["params"]]
        self.adam = _adam(groups, config) if groups else None
        self.before_update: Callable[[], None] = lambda: None
        """Called in every step before masters and moments change: somebody may still read them."""

    def step(self, lr: float) -> tuple[float, bool]:
        """Clip, update, publish the new weights. Returns (gradient norm before clipping, updated).

        A step whose gradient norm is not finite is skipped on every rank: weights and moments stay.
        """
        norm = self.data_parallel.gradient_norm()
        # Made also where it is not used: every step asks for the same memory, and a plan of one is a plan of all.
        factor = (self.config.clip_grad / (norm + 1e-6)).to(self.data_parallel.buckets[0].gradients.dtype)
        norm_value = norm.item()
        if not math.isfinite(norm_value):
            return norm_value, False
        if self.config.clip_grad > 0 and norm_value > self.config.clip_grad:
            self.data_parallel.scale_gradients(factor)
        self.before_update()
        if self.adam is not None:
            for group in self.adam.param_groups:
                group["lr"] = lr
            self.adam.step()
        self.data_parallel.publish_weights()
        return norm_value, True

    @contextlib.contextmanager
    def rehearsing(self) -> Iterator[None]:
        """Inside, `step` asks for all the memory that it ever asks for and updates nothing.

        Weights, masters, moments and the counts of the bias correction keep every bit; only gradients are clipped.
        torch's kernel is told what torch.amp.GradScaler tells it when gradients overflow: it changes nothing, and the
        count goes back. apex's has no such way, and no memory of its own either: it rests.
        """
        self.segment_states()  # moments outlive every step: they must not be made in one
        adam = self.adam
        if isinstance(adam, torch.optim.AdamW):
            found = torch.ones((), dtype=torch.float32, device=self.segments[0].weight.device)
            adam.found_inf = found  # type: ignore[attr-defined]
        else:
            self.adam = None
        try:
            yield
        finally:
            self.adam = adam
            if isinstance(adam, torch.optim.AdamW):
                del adam.found_inf  # type: ignore[attr-defined]

    def segment_states(self) -> list[tuple[MasterSegment, dict[str, Tensor]]]:
        """Master values and moments of every segment, 1-D, as they lie in memory (zeros before step 1)."""
        states = []
        for segment in self.segments:
            assert self.adam is not None
            state = self.adam.state[segment.weight]
            if "exp_avg" not in state:
                state["step"] = torch.zeros((), dtype=torch.float32, device=segment.weight.device)
                state["exp_avg"] = torch.zeros_like(segment.weight)
                state["exp_avg_sq"] = torch.zeros_like(segment.weight)
            tensors = {"master": segment.weight.detach()}
            states.append((segment, tensors | {kind: state[kind] for kind in ("exp_avg", "exp_avg_sq")}))
        return states

    def resume(self, optimizer_steps: int) -> None:
        """After masters and moments were loaded: go on with the bias correction, publish the weights."""
        if self.adam is not None:
            for segment in self.segments:
                self.adam.state[segment.weight]["step"] = torch.tensor(
                    float(optimizer_steps), device=segment.weight.device
                )
            for group in self.adam.param_groups:
                group["step"] = optimizer_steps  # apex counts here
        self.data_parallel.publish_weights()


def _adam(groups: list[dict[str, object]], config: TrainingConfig) -> torch.optim.Optimizer:
    betas, device = (config.adam_beta1, config.adam_beta2), groups[0]["params"][0].device  # type: ignore[index]
    if device.type == "cuda" and _has_apex():
        from apex.optimizers import FusedAdam

        apex_adam: torch.optim.Optimizer = FusedAdam(groups, lr=config.lr, betas=betas, eps=config.adam_eps)
        return apex_adam
    return torch.optim.AdamW(groups, lr=config.lr, betas=betas, eps=config.adam_eps, fused=True)


def _has_apex() -> bool:
    """NVIDIA's apex; PyPI's package of that name is another project and has no optimizers."""
    try:
        return importlib.util.find_spec("apex.optimizers") is not None
    except ModuleNotFoundError:
        return False


def learning_rate(config: RunConfig, iteration: int) -> float:
    """Learning rate of step `iteration` (counted from 1): warm-up, then the chosen decay to min_lr."""
    training, decay_iters = config.training, resolved_lr_decay_iters(config)
    peak, floor, warmup = training.lr, training.min_lr, training.lr_warmup_iters
    if iteration <= warmup:
        return peak * iteration / warmup
    if training.lr_decay_style == "constant":
        return peak
    if iteration >= decay_iters:
        return floor
    if training.lr_decay_style == "WSD":
        length = resolved_lr_wsd_decay_iters(config)
        return peak - (peak - floor) * max(0, iteration - (decay_iters - length)) / length
    done = (iteration - warmup) / (decay_iters - warmup)
    share = 1.0 - done if training.lr_decay_style == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
    return floor + (peak - floor) * share
