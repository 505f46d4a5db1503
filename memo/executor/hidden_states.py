"""Hidden states between layers, and their gradients, in host memory: what a sweep reads and writes goes through two
slots of a section each, and through one section on the device in which modules work.

    compute     | layer l, section s: take -> work -> put | section s + 1
    offload                                               | output of section s
    prefetch    | input of section s + 1                  | input of section s + 2

Messages between stages go the same way: what is sent is taken, and what is received is put.

The plan (memo.spec.hidden_ops) has every section that any module or message writes and reads, in order, so these need
not say which hidden states they mean: the next ones of that section, or PlanError.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from memo.executor.host_budget import HostBudget
from memo.executor.section_stream import SectionStream
from memo.executor.slots import view_of
from memo.executor.streams import StreamBackend
from memo.parallel.hidden import Section
from memo.planner.swap import SwapPlan
from memo.spec.slots import Place


class _HiddenStates:
    """Takes and puts sections in the order of one plan."""

    def __init__(self, stream: SectionStream, work: Tensor, sections: Sequence[Section]) -> None:
        self.stream, self.work, self.sections = stream, work, sections

    def begin(self, shape: tuple[int, int, int], like: Tensor) -> Tensor:
        """A stand-in; whoever reads it all the same finds NaN."""
        return like.new_full((1, 1, 1), float("nan")).expand(shape)

    def whole(self, x: Tensor) -> Tensor:
        return x

    def room(self, x: Tensor, section: int) -> Tensor:
        return self.work

    def take(self, x: Tensor, section: int) -> Tensor:
        self.stream.take(self._next, section, self.work)
        return self.work

    def put(self, part: Tensor, section: int) -> None:
        self.stream.put(self._next, section, part)

    @property
    def _next(self) -> int:
        return self.stream.swapper.current.op.layer


class HiddenOnHost(_HiddenStates):
    """memo.parallel.hidden.HiddenInPlan, of hidden states of which the device holds three sections."""

    def __init__(
        self,
        plan: SwapPlan,
        evaluation: SwapPlan,
        place: Place,
        sections: Sequence[Section],
        backend: StreamBackend,
        device: torch.device,
        host: HostBudget | None,
    ) -> None:
        """`place`: of one section. Other arguments, and errors, as of memo.executor.runtime.SwapRuntime."""
        stream = SectionStream(plan, place, "hidden states ", backend, device, host)
        # What it holds between two modules is of no use.
        work = torch.empty(place.num_bytes, dtype=torch.uint8, device=device)
        super().__init__(stream, view_of(replace(place, offset_bytes=0), work), sections)
        self.unplanned = _InEvaluation(stream.under(evaluation), self)

    def restart(self) -> None:
        """Before a training step, or an evaluation."""
        self.stream.swapper.reset()
        self.unplanned.stream.swapper.reset()


class _InEvaluation(_HiddenStates):
    """The same between training steps, forwards only."""

    def __init__(self, stream: SectionStream, planned: HiddenOnHost) -> None:
        super().__init__(stream, planned.work, planned.sections)
        self._planned = planned

    @property
    def unplanned(self) -> "_InEvaluation":
        return self

    def restart(self) -> None:
        self._planned.restart()
