"""Inputs of layers that recompute attention, while layers are swept section by section (memo.executor.sweep).

The first forward of such a layer leaves nothing in the slots of sections. Its input goes to host memory by slots of its
own, a section at a time, and comes back before the second forward of that section:

    first forward     begin slot -> copy the section's input into it -> end: offload
    second forward    begin: await the prefetch -> copy it into the section's slot -> end
"""

from dataclasses import replace

import torch
from torch import Tensor

from memo.executor.disk_records import DiskRecords
from memo.executor.host_budget import HostBudget
from memo.executor.host_pool import HostPool
from memo.executor.slots import view_of
from memo.executor.streams import StreamBackend
from memo.executor.swapper import Swapper
from memo.planner.disk_plan import DiskPlan
from memo.planner.swap import SwapPlan
from memo.spec.slots import Place


class LayerInputs:
    """Sections of inputs [n, b, h], which move under a swap plan in which "B" reads what "F" has written."""

    def __init__(
        self,
        plan: SwapPlan,
        place: Place,
        backend: StreamBackend,
        device: torch.device,
        host: HostBudget | None,
        poison: bool = False,
        disk: DiskPlan | None = None,
    ) -> None:
        """`place`: of the input in a slot of sections. The other arguments, and errors, as of SwapRuntime."""
        name = "layer input "
        self.pool = HostPool(
            plan.num_records - (0 if disk is None else len(disk.records)), place.num_bytes, device, host
        )
        self.disk = None if disk is None else DiskRecords(disk, place.num_bytes, device, host, name)
        staging = None if self.disk is None else self.disk.staging
        self._slots = [torch.empty(place.num_bytes, dtype=torch.uint8, device=device) for _ in range(plan.num_slots)]
        self._views = [view_of(replace(place, offset_bytes=0), slot) for slot in self._slots]
        self.swapper = Swapper(plan, self._slots, place.num_bytes, self.pool, backend, poison, name, staging)

    @property
    def device_bytes(self) -> int:
        return sum(slot.nbytes for slot in self._slots)

    def put(self, layer: int, section: int, x: Tensor) -> None:
        """In the first forward."""
        self._views[self.swapper.begin("F", layer, section)].copy_(x)
        self.swapper.end("F", layer, section)

    def take(self, layer: int, section: int, out: Tensor) -> None:
        """In the second forward."""
        out.copy_(self._views[self.swapper.begin("B", layer, section)])
        self.swapper.end("B", layer, section)
