"""What token-wise layers work with on one rank: slots, host pool, streams, and the engine that obeys the plan."""

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
    """Rounding buffers as named tensors, driven in the plan's order."""

    def __init__(
        self,
        plan: SwapPlan,
        layout: SlotLayout,
        backend: StreamBackend,
        device: torch.device,
        host: HostBudget | None,
        poison: bool = False,
    ) -> None:
        """Records are drawn from `host` (None: there may be any number); HostMemoryError when the plan needs more.

        `poison` fills with NaN what is no longer valid in slots, host records and workspace, so that a stale
        read shows (tests).
        """
        self.plan, self.layout, self._poison = plan, layout, poison
        self.pool = HostPool(plan.num_records, layout.moved_bytes, device, host)
        self._slots = [_buffer(layout.slot_bytes, device) for _ in range(plan.num_slots)]
        self._workspace = _buffer(layout.workspace_bytes, device)
        self.swapper = Swapper(plan, self._slots, layout.moved_bytes, self.pool, backend, poison)
        self._views = [slot_tensors(layout, slot, self._workspace) for slot in self._slots]

    @property
    def device_bytes(self) -> int:
        """Slots and workspace."""
        return sum(buffer.nbytes for buffer in [*self._slots, self._workspace])

    def begin(self, kind: str, layer: int) -> dict[str, Tensor]:
        """The tensors of the slot that the plan gives this operation, ready for the compute stream."""
        return self._views[self.swapper.begin(kind, layer)]

    def end(self, kind: str, layer: int) -> None:
        self.swapper.end(kind, layer)
        self._poison_workspace()

    def next_step(self) -> None:
        """Before each training step, also after one that an exception cut short."""
        self.swapper.reset()
        self._poison_workspace()

    def _poison_workspace(self) -> None:
        """No operation may find there what another one left, not even its own forward."""
        if self._poison and self.layout.workspace is not None:
            view_of(self.layout.workspace, self._workspace).fill_(float("nan"))


def _buffer(num_bytes: int, device: torch.device) -> Tensor:
    return torch.empty(num_bytes, dtype=torch.uint8, device=device)
