"""Sections of tensors that move beside the slots of swept layers (memo.executor.sweep), through slots of their own: a
section is written, goes to host memory, and comes back before it is read.

    write    begin slot -> copy the section into it -> end: offload
    read     begin: await the prefetch -> copy it out -> end

Three kinds of tensors move in this way: the inputs of layers that recompute attention, which the first forward writes
and the second reads; hidden states between layers (memo.executor.hidden_states); and keys and values of a store that
slides (memo.executor.key_values).
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
        """`place`: layout of a section, at any offset; `name`: prefix of its buffers' names. Other arguments and errors
        as for memo.executor.runtime.SwapRuntime."""
        self.records = HostRecords(plan, place.num_bytes, device, backend, host, disk, name)
        self.slots = [torch.empty(place.num_bytes, dtype=torch.uint8, device=device) for _ in range(plan.num_slots)]
        self._views = [view_of(replace(place, offset_bytes=0), slot) for slot in self.slots]
        self.swapper = Swapper(plan, self.slots, place.num_bytes, self.records, backend, name)

    def under(self, plan: SwapPlan) -> "SectionStream":
        """A stream on the same slots and records under a second plan, which needs no more of them.

        Only one of the two streams may run at a time.
        """
        other, of = copy.copy(self), self.swapper
        slots = self.slots[: plan.num_slots]
        other.swapper = Swapper(plan, slots, of.moved_bytes, self.records, of.backend, of.name)
        return other

    def put(self, layer: int, section: int, x: Tensor) -> None:
        """Write a section, and issue its offload."""
        self._views[self.swapper.begin("F", layer, section)].copy_(x)
        self.swapper.end("F", layer, section)

    def take(self, layer: int, section: int, out: Tensor) -> None:
        """Copy a section to `out` once it is back from host memory."""
        out.copy_(self._views[self.swapper.begin("B", layer, section)])
        self.swapper.end("B", layer, section)
