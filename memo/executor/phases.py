"""Marks the beginning of each phase of an iteration; wrappers around modules set the marks.

    enter_forward | embedding_forward | layer_forward 0 | layer_forward 1 | ... | loss_forward
    enter_backward | loss_backward | layer_backward n-1 | ... | layer_backward 0 | embedding_backward
    ... | reduction | optimizer

A phase lasts until the next one begins. Each mark tells the listener (a recorder of memory requests, or an allocator
that obeys a memory plan) where in the iteration the program is. Evaluation sets no marks.

Where documents are packed, core attention is a phase of its own within each of these (`Phases.attention`), because the
memory that it requests depends on where documents end.

A phase belongs to the thread that marks it, and on CUDA backward runs in a thread of autograd. The thread of the
schedule allocates the buffers of messages before and after a backward, so it marks the beginning of each action
itself.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from memo.artifacts.memory_trace import ATTENTION
from memo.executor.marks import on_backward
from memo.spec.schedule import Action


class Phases:
    """Passes marks to a listener, with the microbatch that is running."""

    def __init__(self, tell: Callable[[str, int, int], None] = lambda *_: None) -> None:
        """`tell` gets a kind, a layer and a microbatch, in the thread in which the phase begins; -1 stands for none.
        Default: nobody listens."""
        self._tell = tell
        self._now = ("", -1, -1)
        self.microbatch = -1

    def begin(self, kind: str, layer: int = -1, microbatch: int = -1) -> None:
        self._now = kind, layer, microbatch
        self._tell(*self._now)

    @contextlib.contextmanager
    def attention(self) -> Iterator[None]:
        """A context around a part of core attention. The interrupted phase goes on after it."""
        kind, layer, microbatch = self._now
        self.begin(ATTENTION, layer, microbatch)
        try:
            yield
        finally:
            self.begin(kind, layer, microbatch)

    def enter(self, action: Action) -> None:
        """Begin the phase `enter_forward` or `enter_backward` of the schedule's next action.

        The names for chunks above the first contain the chunk, because phases of an iteration must differ.
        """
        self.microbatch = action.microbatch
        chunk = f"_chunk{action.chunk}" if action.chunk else ""
        self.begin(f"enter_{'forward' if action.kind == 'F' else 'backward'}{chunk}", microbatch=action.microbatch)


class MarkedModule(nn.Module):
    """Wraps a module, and marks its forward as phase `name`_forward and its backward as phase `name`_backward."""

    def __init__(self, module: Any, name: str, layer: int, phases: Phases) -> None:
        super().__init__()
        self.module: Any = module
        self.name, self.layer, self.phases = name, layer, phases

    def forward(self, *args: Any) -> Tensor:
        if not torch.is_grad_enabled():
            plain: Tensor = self.module(*args)
            return plain
        begin = functools.partial(self.phases.begin, layer=self.layer, microbatch=self.phases.microbatch)
        begin(f"{self.name}_forward")
        return on_backward(self.module(*args), functools.partial(begin, f"{self.name}_backward"))


def unmarked(module: Any) -> Any:
    """The wrapped module itself, for its methods other than forward."""
    return module.module if isinstance(module, MarkedModule) else module


def mark_phases(chunks: list[Any], phases: Phases) -> None:
    """Wrap embedding, layers and head of these chunks. Layers are numbered from 0 on each stage, chunk by chunk."""
    number = 0
    for chunk in chunks:
        if chunk.embedding is not None:
            chunk.embedding = MarkedModule(chunk.embedding, "embedding", -1, phases)
        for position, layer in enumerate(chunk.layers):
            chunk.layers[position] = MarkedModule(layer, "layer", number, phases)
            number += 1
        if chunk.head is not None:
            chunk.head = MarkedModule(chunk.head, "loss", -1, phases)
