"""Owns one rank's memory for swapping (slots and host records), and the swappers that obey the plan."""

import contextlib
from collections.abc import Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from memo.executor.hidden_states import HiddenOnHost
from memo.executor.host_budget import HostBudget
from memo.executor.host_records import HostRecords
from memo.executor.key_values import KeyValues, KeyValueStream, KeyValueSwapper
from memo.executor.recorder import BeginSpan, SwapRecorder
from memo.executor.section_stream import SectionStream
from memo.executor.slots import slot_tensors
from memo.executor.staging import Staging
from memo.executor.streams import Stream, StreamBackend, Timestamp
from memo.executor.swapper import Swapper
from memo.parallel.hidden import Section
from memo.planner.disk_plan import NOTHING_ON_DISK, DiskPlan, DiskPlans
from memo.planner.swap import SwapPlan, SweepPlans
from memo.report.timeline import Kind
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
        disk: DiskPlan | None = None,
    ) -> None:
        """Draws the host records from the budget `host` (None: no limit); records in `disk` go to the budget's disk.

        Raises HostMemoryError or DiskError if the budget is too small.
        """
        self.plan, self.layout = plan, layout
        records = HostRecords(plan, layout.moved_bytes, device, backend, host, disk)
        slots = [_buffer(layout.slot_bytes, device) for _ in range(plan.num_slots)]
        self._workspace = _buffer(layout.workspace_bytes, device)
        self.swapper = Swapper(plan, slots, layout.moved_bytes, records, backend)
        self._views = [slot_tensors(layout, slot, self._workspace) for slot in slots]
        self.unplanned = ScratchMemory(layout, self._views[0])
        self._on_device, self._on_host = [*slots, self._workspace], [records]

    @property
    def device_bytes(self) -> int:
        """Bytes on the device of all slots, workspaces and stores."""
        return sum(tensor.nbytes for tensor in self._on_device)

    @property
    def host_bytes(self) -> int:
        """Bytes of all host records in memory, and of all staging buffers."""
        return sum(records.host_bytes for records in self._on_host)

    @property
    def disk_bytes(self) -> int:
        """Bytes of all records on disk."""
        return sum(records.disk_bytes for records in self._on_host)

    @contextlib.contextmanager
    def recorded(self, origin: Timestamp | None = None) -> Iterator[SwapRecorder]:
        """Record all copies and disk transfers until the end of the block, which must begin between two steps.

        Times count from `origin`, a timestamp of the backend; default: the beginning of the block.
        """
        recorder = SwapRecorder(self.swapper.backend, origin)
        begin_of: dict[Swapper | Staging, BeginSpan] = {}
        for swapper, kind in self._swappers():
            begin_of[swapper] = partial(recorder.begin, kind)
            if swapper.records.staging is not None:
                begin_of[swapper.records.staging] = begin_of[swapper]
        for moving, begin in begin_of.items():
            moving.listeners.append(begin)
        try:
            yield recorder
        finally:
            for moving, begin in begin_of.items():
                moving.listeners.remove(begin)

    def _swappers(self) -> Iterator[tuple[Swapper, Kind]]:
        """Each swapper, with the kind of data that it moves."""
        yield self.swapper, "activations"

    def begin(self, kind: str, layer: int) -> dict[str, Tensor]:
        """Return the tensors of the slot that the plan assigns to this operation, valid for the compute stream."""
        return self._views[self.swapper.begin(kind, layer)]

    def end(self, kind: str, layer: int) -> None:
        self.swapper.end(kind, layer)
        self._spoil_workspace()

    def next_step(self) -> None:
        """Call it before each training step, also after one that an exception has interrupted."""
        self.swapper.reset()
        self._spoil_workspace()

    def _spoil_workspace(self) -> None:
        """Declare the workspace invalid: no operation may read it from an earlier one, not even from its forward."""
        self.swapper.backend.spoil(Stream.COMPUTE, self._workspace, "workspace")


class SweepRuntime(SwapRuntime):
    """A SwapRuntime for swept layers: each slot holds one section of the sequence.

    Keys and values, layer inputs and hidden states move under plans of their own (`beside`).
    """

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
        disk: DiskPlans = NOTHING_ON_DISK,
    ) -> None:
        """`plan` moves sections, whose rows `sections` gives. Raises the same errors as SwapRuntime."""
        super().__init__(plan, layout, backend, device, host, disk.sections)
        self.keys = KeyValues(key_layout, device)
        swapper = KeyValueStream if key_layout.slides else KeyValueSwapper
        self.key_swapper = swapper(beside.keys, key_layout, self.keys, backend, host, disk.keys)
        self._with_keys = {step.op.layer for step in beside.keys.steps}
        self._on_device += [*self.keys.tensors, *self.key_swapper.slots]
        self._on_host.append(self.key_swapper.records)
        self.inputs: SectionStream | None = None
        place = layout.places["input"]
        if beside.inputs is not None:
            self.inputs = SectionStream(beside.inputs, place, "layer input ", backend, device, host, disk.inputs)
            self._on_device += self.inputs.slots
            self._on_host.append(self.inputs.records)
        self.hidden: HiddenOnHost | None = None
        if beside.hidden is not None and beside.evaluation is not None:
            self.hidden = HiddenOnHost(beside.hidden, beside.evaluation, place, sections, backend, device, host)
            self._on_device += [*self.hidden.stream.slots, self.hidden.work]
            self._on_host.append(self.hidden.stream.records)
        self.unplanned = ScratchMemory(layout, self._views[0], self.keys)

    def _swappers(self) -> Iterator[tuple[Swapper, Kind]]:
        yield from super()._swappers()
        for swapper in self.key_swapper.swappers:
            yield swapper, "keys and values"
        if self.inputs is not None:
            yield self.inputs.swapper, "layer inputs"
        if self.hidden is not None:
            yield self.hidden.stream.swapper, "hidden states"

    def begin_section(self, kind: str, layer: int, section: int) -> dict[str, Tensor]:
        """Return the tensors of the slot that the plan assigns to this section.

        `keys` holds the keys and values that were computed before the section.
        """
        self.key_swapper.prefetch_what_is_read(section)
        if layer in self._with_keys:
            self.key_swapper.begin(kind, layer, section)
        return self._views[self.swapper.begin(kind, layer, section)]

    def end_section(self, kind: str, layer: int, section: int) -> None:
        """Issue the copies that follow a section, in the order in which compute will wait for them.

        Copies of one stream run one after another. In backward, keys and values go first: the next layer's backward
        begins by reading all of them, and needs the slot fetched here one section later. In forward, the slot goes
        first: the next sections wait for it, whereas only the next layer waits for keys and values.
        """
        has_keys = layer in self._with_keys
        if kind == "B" and has_keys:
            self.key_swapper.end(kind, layer, section)
        self.swapper.end(kind, layer, section)
        self._spoil_workspace()
        if kind == "F" and has_keys:
            self.key_swapper.end(kind, layer, section)

    def take_keys(self, layer: int, section: int) -> None:
        """Fetch the keys and values of a section into `keys`; sections come in the order that `keys.begin` returned."""
        self.key_swapper.take(layer, section)

    def put_input(self, layer: int, section: int, x: Tensor) -> None:
        """Offload the input [c / tp, b, h] of a section; the layer runs forward once more before its backward."""
        assert self.inputs is not None, "no layer of the plan recomputes attention"
        self.inputs.put(layer, section, x)

    def take_input(self, layer: int, section: int, out: Tensor) -> None:
        """Copy the input that `put_input` has offloaded to `out`."""
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
    """A slot without a plan, for measuring or evaluating a layer; with keys and values if layers are swept."""

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

    def take_keys(self, layer: int, section: int) -> None:
        pass

    def put_input(self, layer: int, section: int, x: Tensor) -> None:
        pass

    def take_input(self, layer: int, section: int, out: Tensor) -> None:
        pass


def scratch_memory(layout: SlotLayout, device: torch.device, keys: KeyValueLayout | None = None) -> ScratchMemory:
    """Allocate the memory of a slot without a plan. `keys`: layout of keys and values if layers are swept."""
    slot, workspace = (_buffer(size, device) for size in (layout.slot_bytes, layout.workspace_bytes))
    values = None if keys is None else KeyValues(keys, device)
    return ScratchMemory(layout, slot_tensors(layout, slot, workspace), values)


def _buffer(num_bytes: int, device: torch.device) -> Tensor:
    return torch.empty(num_bytes, dtype=torch.uint8, device=device)
