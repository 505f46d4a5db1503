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

from memo.executor.disk_records import DiskRecords, disk_bytes, host_bytes
from memo.executor.host_budget import HostBudget
from memo.executor.host_pool import HostPool
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
        poison: bool = False,
        disk: DiskPlan | None = None,
    ) -> None:
        """`place`: of a section, anywhere; `name`: begins those of its buffers. Other arguments and errors as of
        SwapRuntime."""
        self._poison = poison
        on_disk = 0 if disk is None else len(disk.records)
        self.pool = HostPool(plan.num_records - on_disk, place.num_bytes, device, host)
        self.disk = None if disk is None else DiskRecords(disk, place.num_bytes, device, host, name)
        staging = None if self.disk is None else self.disk.staging
        self._slots = [torch.empty(place.num_bytes, dtype=torch.uint8, device=device) for _ in range(plan.num_slots)]
        self._views = [view_of(replace(place, offset_bytes=0), slot) for slot in self._slots]
        self.swapper = Swapper(plan, self._slots, place.num_bytes, self.pool, backend, poison, name, staging)

    @property
    def device_bytes(self) -> int:
        return sum(slot.nbytes for slot in self._slots)

    @property
    def host_bytes(self) -> int:
        """Bytes of the host records that are in memory, and of staging buffers."""
        return host_bytes(self.pool, self.disk)

    @property
    def disk_bytes(self) -> int:
        return disk_bytes(self.disk)

    def under(self, plan: SwapPlan) -> "SectionStream":
        """The same slots and records under another plan, which needs no more of them; one of both rests meanwhile."""
        other, of = copy.copy(self), self.swapper
        slots = self._slots[: plan.num_slots]
        other.swapper = Swapper(plan, slots, of.moved_bytes, self.pool, of.backend, self._poison, of.name)
        return other

    def put(self, layer: int, section: int, x: Tensor) -> None:
        """Write it."""
        self._views[self.swapper.begin("F", layer, section)].copy_(x)
        self.swapper.end("F", layer, section)

    def take(self, layer: int, section: int, out: Tensor) -> None:
        """Read it."""
        out.copy_(self._views[self.swapper.begin("B", layer, section)])
        self.swapper.end("B", layer, section)
