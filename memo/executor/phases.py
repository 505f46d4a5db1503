"""Marks at the borders of an iteration's phases, set around modules from outside.

    enter_forward | embedding_forward | layer_forward 0 | layer_forward 1 | ... | loss_forward
    enter_backward | loss_backward | layer_backward n-1 | ... | layer_backward 0 | embedding_backward
    ... | reduction | optimizer

A phase lasts until the next begins. Who listens (a recorder of memory requests, an allocator that obeys a plan)
finds its place again at each of them. Evaluation sets no marks.

A phase belongs to the thread that marks it, and backward on CUDA runs in autograd's. So the schedule marks where it
turns to its next action: buffers of messages are asked for by its own thread, before and after a backward.
"""

from typing import Any, Protocol

import torch
from torch import Tensor, nn

from memo.spec.schedule import Action


class PhaseListener(Protocol):
    """Told, by the thread that runs it, which phase begins; -1 for no layer or no microbatch."""

    def phase(self, kind: str, layer: int, microbatch: int) -> None: ...


class Phases:
    """The microbatch that is running, and who is told."""

    def __init__(self, listener: PhaseListener) -> None:
        self.listener = listener
        self.microbatch = -1

    def begin(self, kind: str, layer: int = -1, microbatch: int = -1) -> None:
        self.listener.phase(kind, layer, microbatch)

    def enter(self, action: Action) -> None:
        """The schedule turns to an action: `microbatch` is its, and `enter_forward` or `enter_backward` begins.

        Chunks above the first have their number in the name, as no two phases of an iteration may have the same.
        """
        self.microbatch = action.microbatch
        chunk = f"_chunk{action.chunk}" if action.chunk else ""
        self.begin(f"enter_{'forward' if action.kind == 'F' else 'backward'}{chunk}", microbatch=action.microbatch)


class MarkedModule(nn.Module):
    """Runs a module whose first argument and output are tensors, as the phase `name`_forward or `name`_backward."""

    def __init__(self, module: Any, name: str, layer: int, phases: Phases) -> None:
        super().__init__()
        self.module: Any = module
        self.name, self.layer, self.phases = name, layer, phases

    def forward(self, *args: Any) -> Tensor:
        if not torch.is_grad_enabled():
            plain: Tensor = self.module(*args)
            return plain
        microbatch = self.phases.microbatch
        self.phases.begin(f"{self.name}_forward", self.layer, microbatch)
        output: Tensor = _BackwardMark.apply(self.module(*args), self, microbatch)
        return output


def unmarked(module: Any) -> Any:
    """The module itself, for what evaluation asks of it beside its forward."""
    return module.module if isinstance(module, MarkedModule) else module


class _BackwardMark(torch.autograd.Function):
    """The identity, whose backward comes just before that of the module."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, module: MarkedModule, microbatch: int) -> Tensor:
        ctx.module, ctx.microbatch = module, microbatch
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        module = ctx.module
        module.phases.begin(f"{module.name}_backward", module.layer, ctx.microbatch)
        return grads[0], None, None


def mark_phases(chunks: list[Any], phases: Phases) -> None:
    """Wrap every part of these chunks; layers are numbered chunk by chunk, from 0 on each stage."""
    number = 0
    for chunk in chunks:
        if chunk.embedding is not None:
            chunk.embedding = MarkedModule(chunk.embedding, "embedding", -1, phases)
        for position, layer in enumerate(chunk.layers):
            chunk.layers[position] = MarkedModule(layer, "layer", number, phases)
            number += 1
        if chunk.head is not None:
            chunk.head = MarkedModule(chunk.head, "loss", -1, phases)
