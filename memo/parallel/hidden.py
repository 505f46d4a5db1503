"""Hidden states between embedding, layers and loss, and their gradients: how modules take and put their sections.

Each module goes through the sections in order (layers in backward in reverse order), and reads and writes each section
once: it takes a section, works on it in place, and puts it back. The results do not depend on whether hidden states
stay on the device, as here, or in host memory (memo.executor.hidden_states).

Autograd passes from module to module the tensor [n, b, h] that holds the sections. If they are not on the device, it
passes a stand-in: a tensor of this shape without memory of that size, which no code may read.

Shapes: n tokens of this tp rank, b micro-batch, h hidden size.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


@dataclass(frozen=True)
class Section:
    """The rows of [n, ...] in one section, and the rows of its tiles, counted from the section's beginning.

    The embedding and the loss cut their sums over tokens at tiles, so that the sums do not depend on sections.
    """

    index: int
    rows: slice
    tiles: Sequence[slice]


class Hidden(Protocol):
    """Gives modules the sections of hidden states and of their gradients."""

    sections: Sequence[Section]

    @property
    def unplanned(self) -> "Hidden":
        """The same memory for use between training steps, where only forwards run."""

    def begin(self, shape: tuple[int, int, int], like: Tensor) -> Tensor:
        """For the embedding: the tensor or stand-in that autograd passes on, of this shape and the dtype of `like`."""

    def whole(self, x: Tensor) -> Tensor:
        """Return `x`, which autograd has passed on, in a form whose sections can be overwritten."""

    def room(self, x: Tensor, section: int) -> Tensor:
        """Memory in which the embedding writes a section [c, b, h] of `x`, before it puts the section."""

    def take(self, x: Tensor, section: int) -> Tensor:
        """Return a section [c, b, h] of `x`, which the caller may overwrite until it takes the next section."""

    def put(self, part: Tensor, section: int) -> None:
        """Hand the tensor that `take` or `room` returned to the next module, overwritten or not."""


class HiddenInPlan(Hidden, Protocol):
    """Hidden states that are not on the device; modules and messages between stages use their sections as planned."""

    @property
    def unplanned(self) -> "HiddenInPlan":
        """The same memory under the plan for evaluations."""

    def restart(self) -> None:
        """Return to the beginning of the plan, wherever the last step or evaluation stopped."""


class HiddenOnDevice:
    """Sections of one tensor on the device, which modules overwrite in place."""

    def __init__(self, sections: Sequence[Section]) -> None:
        self.sections = sections

    @property
    def unplanned(self) -> "HiddenOnDevice":
        return self

    def begin(self, shape: tuple[int, int, int], like: Tensor) -> Tensor:
        return like.new_empty(shape)

    def whole(self, x: Tensor) -> Tensor:
        return x.contiguous()

    def room(self, x: Tensor, section: int) -> Tensor:
        return x[self.sections[section].rows]

    def take(self, x: Tensor, section: int) -> Tensor:
        return x[self.sections[section].rows]

    def put(self, part: Tensor, section: int) -> None:
        pass


def in_one_section(num_rows: int) -> HiddenOnDevice:
    """Hidden states in a single section."""
    everything = slice(0, num_rows)
    return HiddenOnDevice([Section(0, everything, [everything])])


def same_memory(x: Tensor) -> Tensor:
    """Return a tensor in the memory of x that autograd does not recognise as x, so that x can be overwritten.

    This is safe because nothing else reads x: the embedding, a layer or a message made it for this module alone.
    """
    with torch.no_grad():
        alias = torch.empty(0, dtype=x.dtype, device=x.device)
        return alias.set_(x.untyped_storage(), x.storage_offset(), x.shape, x.stride())
