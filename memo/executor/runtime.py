"""Owns the memory of swapping on one rank, slots and host records, and the swapper that obeys the plan."""

import torch
from torch import Tensor

from memo.executor.host_budget import HostBudget
from memo.executor.host_pool import HostPool
from memo.executor.slots import slot_tensors, view_of
from memo.executor.streams import StreamBackend
from memo.executor.swapper import Swapper
from memo.planner.swap import SwapPlan
from memo.spec.slots import SlotLayout


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
    ) -> None:
        """Takes the host records from the budget `host` (None: no limit); raises HostMemoryError if it is too small.

        `poison`, for tests, fills what is no longer valid in slots, host records and workspace with NaN, so that
        reading it shows in the results.
        """
        self.plan, self.layout, self._poison = plan, layout, poison
        self.pool = HostPool(plan.num_records, layout.moved_bytes, device, host)
        self._slots = [_buffer(layout.slot_bytes, device) for _ in range(plan.num_slots)]
        self._workspace = _buffer(layout.workspace_bytes, device)
        self.swapper = Swapper(plan, self._slots, layout.moved_bytes, self.pool, backend, poison)
        self._views = [slot_tensors(layout, slot, self._workspace) for slot in self._slots]

    @property
    def device_bytes(self) -> int:
        """Bytes of the slots and the workspace."""
        return sum(buffer.nbytes for buffer in [*self._slots, self._workspace])

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


def _buffer(num_bytes: int, device: torch.device) -> Tensor:
    return torch.empty(num_bytes, dtype=torch.uint8, device=device)
