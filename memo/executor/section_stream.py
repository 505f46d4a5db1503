"""Sections of tensors that move beside the slots of layers that are swept (memo.executor.sweep), by slots of their own:
one of them is written, goes to host memory, and comes back before it is read.

    write    begin slot -> copy the section into it -> end: offload
    read     begin: await the prefetch -> copy it out -> end

Inputs of layers that recompute attention move in this way, written by the first forward and read by the second one;
and hidden states between layers (memo.executor.hidden_states).
"""

import copy
from dataclasses import replace

import torch
from torch import Tensor

from memo.executor.host_budget import HostBudget
from memo.executor.host_records import HostRecords
from memo.executor.slots import view_of
from memo.executor.streams import StreamBackend
from memo.executor.swapper import Swapper
from memo.planner.disk_plan import DiskPlan
from memo.planner.swap import SwapPlan
from memo.spec.slots import Place


class SectionStream:
    """Sections [c, b, h], which move under a swap plan in which "B" reads what "F" has written."""

    def __init__(
        self,
        plan: SwapPlan,
        place: Place,
        name: str,
        backend: StreamBackend,
        device: torch.device,
        host: HostBudget | None,
        disk: DiskPlan | None = None,
    ) -> None:
        """`place`: of a section, anywhere; `name`: begins those of its buffers. Other arguments and errors as of
        SwapRuntime."""
        self.records = HostRecords(plan, place.num_bytes, device, backend, host, disk, name)
        self.slots = [torch.empty(place.num_bytes, dtype=torch.uint8, device=device) for _ in range(plan.num_slots)]
        self._views = [view_of(replace(place, offset_bytes=0), slot) for slot in self.slots]
        self.swapper = Swapper(plan, self.slots, place.num_bytes, self.records, backend, name)

    def under(self, plan: SwapPlan) -> "SectionStream":
        """The same slots and records under another plan, which needs no more of them; one of both rests meanwhile."""
        other, of = copy.copy(self), self.swapper
        slots = self.slots[: plan.num_slots]
        other.swapper = Swapper(plan, slots, of.moved_bytes, self.records, of.backend, of.name)
        return other

    def put(self, layer: int, section: int, x: Tensor) -> None:
        """Write it."""
        self._views[self.swapper.begin("F", layer, section)].copy_(x)
        self.swapper.end("F", layer, section)

    def take(self, layer: int, section: int, out: Tensor) -> None:
        """Read it."""
        out.copy_(self._views[self.swapper.begin("B", layer, section)])
        self.swapper.end("B", layer, section)
