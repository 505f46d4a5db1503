"""Ways to make activations fit, all on the same model and trainer, so that a comparison compares nothing else.

none                   everything stays on the device: the ideal, if it fits
full-recompute         Megatron-LM's --recompute-granularity full
selective-recompute    Megatron-LM's selective: core attention
full-recompute-plan    with planned memory (MEMO's ablation, table 4)
layer-input-offload    full recomputation with layer inputs in host memory (TRL, axolotl, Unsloth), on memo's tiles,
                       with copies that overlap (benchmarks/rivals.py)
move-everything        every saved tensor to host memory and back on the compute stream (torch's save_on_cpu,
                       torchtune's OffloadActivations)
full-swap-plan         token-wise layers with alpha = 1 and planned memory (MEMO's ablation)
memo                   alpha solved, planned memory
states-resident        alpha solved, all states on the device; and with --offload-states:
states-optimizer       masters and moments in host memory
states-all             weights and gradients too
states-auto            the placement that a plan of device and host memory chooses
"""

import contextlib
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from rivals import Rival, offload_layer_inputs
from torch import Tensor

from memo import Trainer
from memo.train import build, swap

Context = contextlib.AbstractContextManager[Any]


class HostCopies:
    """Tensors in host memory, pinned if they come from a GPU; counts the bytes of live tensors."""

    def __init__(self) -> None:
        self.num_bytes = self.peak_bytes = 0

    def take(self, x: Tensor) -> Tensor:
        """Start a copy of `x` to the host on the compute stream, and return it."""
        waiting = self.room_for(x)
        self.num_bytes += waiting.nbytes
        self.peak_bytes = max(self.peak_bytes, self.num_bytes)
        weakref.finalize(waiting, self._let_go, waiting.nbytes)
        return waiting.copy_(x, non_blocking=True)

    def room_for(self, x: Tensor) -> Tensor:
        return torch.empty(x.shape, dtype=x.dtype, pin_memory=x.is_cuda)

    def bring(self, waiting: Tensor, device: torch.device) -> Tensor:
        """Start a copy of a waiting tensor to the device on the compute stream, and return it."""
        return waiting.to(device, non_blocking=True, copy=True)

    def _let_go(self, num_bytes: int) -> None:
        self.num_bytes -= num_bytes


@dataclass(frozen=True)
class Way:
    """One way to make activations fit.

    Attributes:
        flags: flags of the trainer, which is built within the context of `building`.
        around: makes the context in which steps run; its HostCopies keep the tensors that it moves by itself.
        start: replaces memo.train.swap.start, and puts layers on tiles; None: nothing replaces it.
        under_autograd: layers are torch modules that the executor does not run, so that autograd saves tensors.
    """

    flags: dict[str, Any]
    around: Callable[[Trainer, HostCopies], Context] = lambda trainer, copies: contextlib.nullcontext()
    start: Rival | None = None
    under_autograd: bool = False

    def building(self) -> Context:
        if self.under_autograd:
            return mock.patch.object(build, "keep_on_device", lambda *_: None)
        return contextlib.nullcontext() if self.start is None else mock.patch.object(swap, "start", self.start)


@dataclass(frozen=True)
class _Away:
    """A saved tensor in host memory."""

    waiting: Tensor
    device: torch.device


_SMALL = 1024
"""Elements below which a copy does not pay (torchtune's bound)."""


def _all_saved_tensors_away(trainer: Trainer, copies: HostCopies) -> Context:
    """Move all tensors that autograd saves, except weights, which stay anyway, and small tensors."""
    weights = {
        bucket.weights.untyped_storage().data_ptr()
        for bucket in trainer.parts.data_parallel.buckets
        if bucket.weights is not None
    }

    def pack(x: Tensor) -> Tensor | _Away:
        if x.numel() < _SMALL or x.untyped_storage().data_ptr() in weights:
            return x
        return _Away(copies.take(x), x.device)

    def unpack(saved: Tensor | _Away) -> Tensor:
        return copies.bring(saved.waiting, saved.device) if isinstance(saved, _Away) else saved

    return torch.autograd.graph.saved_tensors_hooks(pack, unpack)


_PLAIN = {"offload_alpha": "off"}
_FULL = {**_PLAIN, "recompute_granularity": "full"}
_PLANNED = {"memory_planner": "auto", "memory_planner_from": "rehearsal"}
ON_TILES = {"offload_alpha": 0.0}
"""Flags of ways with a `start`, which decides itself which tensors move."""

WAYS = {
    "none": Way(_PLAIN),
    "full-recompute": Way(_FULL),
    "selective-recompute": Way({**_PLAIN, "recompute_granularity": "selective"}),
    "full-recompute-plan": Way({**_FULL, **_PLANNED}),
    "layer-input-offload": Way(ON_TILES, start=offload_layer_inputs),
    "move-everything": Way(_PLAIN, around=_all_saved_tensors_away, under_autograd=True),
    "full-swap-plan": Way({"offload_alpha": 1.0, "offload_policy": "paper", **_PLANNED}),
    "memo": Way({"offload_alpha": "auto", **_PLANNED}),
    "states-resident": Way({"offload_alpha": "auto"}),
    **{
        f"states-{kind}": Way({"offload_alpha": "auto", "offload_states": kind})
        for kind in ("optimizer", "all", "auto")
    },
}
