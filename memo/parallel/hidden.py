"""Hidden states between embedding, layers and loss, and their gradients: the sections in which modules take and leave
them.

Each module goes through the sections in order (layers downward in reverse order), and reads and writes each of them
once: it takes a section, works on it in place, and puts it back. Whether hidden states stay on the device, as here, or
in host memory (memo.executor.hidden_states), makes no difference to what is computed.

What autograd passes from module to module is the tensor [n, b, h] that has the sections, or where they are not on the
device a stand-in: a tensor of its shape without memory of that size, which nobody may read.

Shapes: n tokens of this tp rank, b micro-batch, h hidden size.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


@dataclass(frozen=True)
class Section:
    """Rows [n, ...] of one section, and of the tiles in it, counted from its beginning.

    Sums over tokens that the embedding and the loss make are cut at tiles, so that they do not depend on sections.
    """

    index: int
    rows: slice
    tiles: Sequence[slice]


class Hidden(Protocol):
    """Gives modules the sections of hidden states and of their gradients."""

    sections: Sequence[Section]

    @property
    def unplanned(self) -> "Hidden":
        """The same memory between training steps, where only forwards run."""

    def begin(self, shape: tuple[int, int, int], like: Tensor) -> Tensor:
        """For the embedding: what autograd passes on of hidden states of this shape, in the dtype of `like`."""

    def whole(self, x: Tensor) -> Tensor:
        """`x` that autograd has passed on, such that its sections can be overwritten."""

    def room(self, x: Tensor, section: int) -> Tensor:
        """Where the embedding writes a section [c, b, h] of `x`, before it puts it."""

    def take(self, x: Tensor, section: int) -> Tensor:
        """A section [c, b, h] of `x`, which the caller may overwrite until the next one is taken."""

    def put(self, part: Tensor, section: int) -> None:
        """Leave to the next module what `take` or `room` has returned, overwritten or not."""


class HiddenInPlan(Hidden, Protocol):
    """Hidden states that are not on the device, whose sections follow a plan, where stages hand them on as well."""

    @property
    def unplanned(self) -> "HiddenInPlan":
        """The same memory under the plan of an evaluation."""

    def restart(self) -> None:
        """Return to the beginning of the plan, wherever the last step or evaluation has stopped."""


class HiddenOnDevice:
    """Sections of one tensor, which are overwritten where they lie."""

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
    """Hidden states that nobody cuts."""
    everything = slice(0, num_rows)
    return HiddenOnDevice([Section(0, everything, [everything])])


def same_memory(x: Tensor) -> Tensor:
    """A tensor in the memory of x that autograd takes for another one.

    Nothing else reads x: the embedding, a layer or a message between stages has made it for one module alone.
    """
    with torch.no_grad():
        alias = torch.empty(0, dtype=x.dtype, device=x.device)
        return alias.set_(x.untyped_storage(), x.storage_offset(), x.shape, x.stride())
