"""Hidden states between layers, and their gradients, in host memory. A sweep reads and writes them through two slots of
one section each, and modules work in memory for one more section on the device.

    compute     | layer l, section s: take -> work -> put | section s + 1
    offload                                               | output of section s
    prefetch    | input of section s + 1                  | input of section s + 2

Messages between stages use the same calls: `take` before a section is sent, `put` after it is received.

The plan (memo.spec.hidden_ops) lists every section that a module or message writes and reads, in order. So a caller
names only the section, and gets the next hidden states of the plan; a section out of order raises PlanError.
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
        """A stand-in for hidden states of this shape; its elements are NaN, in case code reads them by mistake."""
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
    """A memo.parallel.hidden.HiddenInPlan that holds three sections on the device, and all others in host memory."""

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
        """`place`: layout of one section. Other arguments and errors as for memo.executor.runtime.SwapRuntime."""
        stream = SectionStream(plan, place, "hidden states ", backend, device, host)
        # Its content is not needed between two modules.
        work = torch.empty(place.num_bytes, dtype=torch.uint8, device=device)
        super().__init__(stream, view_of(replace(place, offset_bytes=0), work), sections)
        self.unplanned = _InEvaluation(stream.under(evaluation), self)

    def restart(self) -> None:
        """Call before each training step and each evaluation."""
        self.stream.swapper.reset()
        self.unplanned.stream.swapper.reset()


class _InEvaluation(_HiddenStates):
    """Hidden states of evaluations, which run between training steps and have no backward."""

    def __init__(self, stream: SectionStream, planned: HiddenOnHost) -> None:
        super().__init__(stream, planned.work, planned.sections)
        self._planned = planned

    @property
    def unplanned(self) -> "_InEvaluation":
        return self

    def restart(self) -> None:
        self._planned.restart()
