"""Owns the memory of swapping on one rank, slots and host records, and the swappers that obey the plan."""

from collections.abc import Sequence

import torch
from torch import Tensor

from memo.executor.disk_records import DiskRecords, disk_bytes, host_bytes
from memo.executor.hidden_states import HiddenOnHost
from memo.executor.host_budget import HostBudget
from memo.executor.host_pool import HostPool
from memo.executor.key_values import KeyValues, KeyValueSwapper
from memo.executor.section_stream import SectionStream
from memo.executor.slots import slot_tensors, view_of
from memo.executor.streams import StreamBackend
from memo.executor.swapper import Swapper
from memo.parallel.hidden import Section
from memo.planner.disk_plan import NOTHING_ON_DISK, DiskPlan, DiskPlans
from memo.planner.swap import SwapPlan, SweepPlans
from memo.spec.slots import SlotLayout
from memo.spec.sweep import KeyValueLayout


class SwapRuntime:
    """Gives each layer operation the named tensors of its slot, in the order of the plan."""

    def __init__(
        self,
        plan: SwapPlan,
        layout: SlotLayout,
        backend: StreamBackend,
        device: torch.device,
        host: HostBudget | None,
        poison: bool = False,
        disk: DiskPlan | None = None,
    ) -> None:
        """Takes the host records from the budget `host` (None: no limit), and those of `disk` from its disk.

        Raises HostMemoryError or DiskError if it is too small.

        `poison`, for tests, fills what is no longer valid in slots, host records and workspace with NaN, so that
        reading it shows in the results.
        """
        self.plan, self.layout, self._poison = plan, layout, poison
        on_disk = 0 if disk is None else len(disk.records)
        self.pool = HostPool(plan.num_records - on_disk, layout.moved_bytes, device, host)
        self.disk = None if disk is None else DiskRecords(disk, layout.moved_bytes, device, host)
        self._slots = [_buffer(layout.slot_bytes, device) for _ in range(plan.num_slots)]
        self._workspace = _buffer(layout.workspace_bytes, device)
        staging = None if self.disk is None else self.disk.staging
        self.swapper = Swapper(plan, self._slots, layout.moved_bytes, self.pool, backend, poison, staging=staging)
        self._views = [slot_tensors(layout, slot, self._workspace) for slot in self._slots]

    @property
    def device_bytes(self) -> int:
        """Bytes of the slots and the workspace."""
        return sum(buffer.nbytes for buffer in [*self._slots, self._workspace])

    @property
    def host_bytes(self) -> int:
        """Bytes of the host records that are in memory, and of staging buffers."""
        return host_bytes(self.pool, self.disk)

    @property
    def disk_bytes(self) -> int:
        """Bytes of the records that are on disk."""
        return disk_bytes(self.disk)

    def begin(self, kind: str, layer: int) -> dict[str, Tensor]:
        """The tensors of the slot that the plan assigns to this operation, valid for the compute stream."""
        return self._views[self.swapper.begin(kind, layer)]

    def end(self, kind: str, layer: int) -> None:
        self.swapper.end(kind, layer)
        self._poison_workspace()

    def next_step(self) -> None:
        """Call it before each training step, also after one that an exception has interrupted."""
        self.swapper.reset()
        self._poison_workspace()

    def _poison_workspace(self) -> None:
        """No operation may rely on what another one left in the workspace, not even a backward on its own forward."""
        if self._poison and self.layout.workspace is not None:
            view_of(self.layout.workspace, self._workspace).fill_(float("nan"))


class SweepRuntime(SwapRuntime):
    """The same for layers that are swept: slots hold sections, and what moves beside them has plans of its own."""

    def __init__(
        self,
        plan: SwapPlan,
        layout: SlotLayout,
        beside: SweepPlans,
        key_layout: KeyValueLayout,
        sections: Sequence[Section],
        backend: StreamBackend,
        device: torch.device,
        host: HostBudget | None,
        poison: bool = False,
        disk: DiskPlans = NOTHING_ON_DISK,
    ) -> None:
        """`plan` is of sections, whose rows are `sections`. Raises as SwapRuntime."""
        super().__init__(plan, layout, backend, device, host, poison, disk.sections)
        self.keys = KeyValues(key_layout, device)
        self.key_swapper = KeyValueSwapper(beside.keys, key_layout, self.keys, backend, host, poison, disk.keys)
        self.inputs: SectionStream | None = None
        place = layout.places["input"]
        if beside.inputs is not None:
            name = "layer input "
            self.inputs = SectionStream(beside.inputs, place, name, backend, device, host, poison, disk.inputs)
        self.hidden: HiddenOnHost | None = None
        if beside.hidden is not None and beside.evaluation is not None:
            self.hidden = HiddenOnHost(beside.hidden, beside.evaluation, place, sections, backend, device, host, poison)
        self.unplanned = ScratchMemory(layout, self._views[0], self.keys)

    @property
    def device_bytes(self) -> int:
        """Bytes of all slots, the workspace, the keys and values, the sums of their gradients, and what serves other
        sections that move."""
        beside = sum(each.device_bytes for each in (self.inputs, self.hidden) if each is not None)
        return super().device_bytes + self.keys.device_bytes + beside

    @property
    def host_bytes(self) -> int:
        """Bytes of the host records that are in memory, and of staging buffers, of all that moves."""
        beside = sum(each.host_bytes for each in (self.inputs, self.hidden) if each is not None)
        return super().host_bytes + host_bytes(self.key_swapper.pool, self.key_swapper.disk) + beside

    @property
    def disk_bytes(self) -> int:
        """Bytes of the records that are on disk, of all that moves."""
        inputs = 0 if self.inputs is None else self.inputs.disk_bytes
        return super().disk_bytes + disk_bytes(self.key_swapper.disk) + inputs

    def begin_section(self, kind: str, layer: int, section: int) -> dict[str, Tensor]:
        """The tensors of the slot that the plan assigns to this section; `keys` has what was computed before it."""
        self.key_swapper.begin(kind, layer, section)
        return self._views[self.swapper.begin(kind, layer, section)]

    def end_section(self, kind: str, layer: int, section: int) -> None:
        """Copies of a stream run one after another, so the one that is waited for first is issued first.

        The next layer's backward begins with all keys and values, and needs the slot that is fetched now a section
        later. The next sections of a forward wait for the slot, and for keys and values not before the next layer.
        """
        if kind == "B":
            self.key_swapper.end(kind, layer, section)
        self.swapper.end(kind, layer, section)
        self._poison_workspace()
        if kind == "F":
            self.key_swapper.end(kind, layer, section)

    def put_input(self, layer: int, section: int, x: Tensor) -> None:
        """The input [n, b, h] of a section whose layer runs forward once more before its backward."""
        assert self.inputs is not None, "no layer of the plan recomputes attention"
        self.inputs.put(layer, section, x)

    def take_input(self, layer: int, section: int, out: Tensor) -> None:
        """Writes it to `out`."""
        assert self.inputs is not None, "no layer of the plan recomputes attention"
        self.inputs.take(layer, section, out)

    def next_step(self) -> None:
        super().next_step()
        self.key_swapper.next_step()
        if self.inputs is not None:
            self.inputs.swapper.reset()
        if self.hidden is not None:
            self.hidden.restart()


class ScratchMemory:
    """A slot without a plan, and keys and values where layers are swept: for a layer that is measured or evaluated."""

    def __init__(self, layout: SlotLayout, tensors: dict[str, Tensor], keys: KeyValues | None = None) -> None:
        self.layout, self.tensors, self._keys = layout, tensors, keys

    @property
    def keys(self) -> KeyValues:
        assert self._keys is not None, "a layer is swept in memory without keys and values"
        return self._keys

    @property
    def unplanned(self) -> "ScratchMemory":
        return self

    def begin(self, kind: str, layer: int) -> dict[str, Tensor]:
        return self.tensors

    def end(self, kind: str, layer: int) -> None:
        pass

    def begin_section(self, kind: str, layer: int, section: int) -> dict[str, Tensor]:
        return self.tensors

    def end_section(self, kind: str, layer: int, section: int) -> None:
        pass

    def put_input(self, layer: int, section: int, x: Tensor) -> None:
        pass

    def take_input(self, layer: int, section: int, out: Tensor) -> None:
        pass


def scratch_memory(layout: SlotLayout, device: torch.device, keys: KeyValueLayout | None = None) -> ScratchMemory:
    """`keys`: where layers are swept."""
    slot, workspace = (_buffer(size, device) for size in (layout.slot_bytes, layout.workspace_bytes))
    values = None if keys is None else KeyValues(keys, device)
    return ScratchMemory(layout, slot_tensors(layout, slot, workspace), values)


def _buffer(num_bytes: int, device: torch.device) -> Tensor:
    return torch.empty(num_bytes, dtype=torch.uint8, device=device)
