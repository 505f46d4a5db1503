"""Replays a swap plan and names what is wrong with it; shares no code with the planner."""

from typing import Any, NoReturn

from memo.errors import PlanError
from memo.planner.swap import SwapPlan, SwapStep
from memo.spec.layer_ops import LayerOp

Key = tuple[Any, ...]


def validate(plan: SwapPlan) -> None:
    """Follow the content of every slot and every host record through the plan.

    Raises PlanError naming the step when activations would be overwritten before they are saved, read where they are
    not, or moved for nothing, or when slots, records, operations or prefetches do not fit together.
    """
    _Replay(plan).run()


class _Replay:
    def __init__(self, plan: SwapPlan) -> None:
        self.plan = plan
        self.index = 0
        self.slots: list[Key | None] = [None] * plan.num_slots
        self.records: list[Key | None] = [None] * plan.num_records
        self.arriving: dict[int, int] = {}  # slot -> step whose prefetch into it has been issued
        self.forwards: set[Key] = set()
        self.backwards: set[Key] = set()
        self.awaited = {step.op.key for step in plan.steps if step.op.kind == "B"}

    def run(self) -> None:
        for index, step in enumerate(self.plan.steps):
            self.index = index
            self._check_fields(step)
            if step.op.kind == "F":
                self._forward(step)
            else:
                self._backward(step)
            if step.next_prefetch is not None:
                self._prefetch(step, step.next_prefetch)
        for record, key in enumerate(self.records):
            if key is not None:
                raise PlanError(f"record {record} keeps {_name(key)} to the end: no prefetch reads it")
        if missing := self.awaited - self.backwards:
            raise PlanError(f"{_name(min(missing))}: its backward is missing")

    def _check_fields(self, step: SwapStep) -> None:
        if not 0 <= step.slot < self.plan.num_slots:
            self._fail(f"slot {step.slot} does not exist, the plan has {self.plan.num_slots}")
        if step.offload and step.op.kind == "B":
            self._fail("a backward offloads")
        if step.prefetch and step.op.kind == "F":
            self._fail("a forward awaits a prefetch")
        moves = step.offload or step.prefetch
        if moves != (step.record is not None):
            self._fail(f"record is {step.record}, but it {'moves' if moves else 'does not move'}")
        if step.record is not None and not 0 <= step.record < self.plan.num_records:
            self._fail(f"record {step.record} does not exist, the plan has {self.plan.num_records}")

    def _forward(self, step: SwapStep) -> None:
        key = step.op.key
        if key in self.forwards:
            self._fail("this forward occurs twice")
        if step.slot in self.arriving:
            self._fail(f"overwrites slot {step.slot} while step {self.arriving[step.slot]} is prefetched into it")
        self._check_saved(step.slot)
        self.forwards.add(key)
        self.slots[step.slot] = key
        if step.offload:
            assert step.record is not None
            tenant = self.records[step.record]
            if tenant is not None:
                self._fail(f"record {step.record} still holds {_name(tenant)}, not yet prefetched")
            self.records[step.record] = key

    def _backward(self, step: SwapStep) -> None:
        key = step.op.key
        if key not in self.forwards:
            self._fail("a backward before its forward")
        if key in self.backwards:
            self._fail("this backward occurs twice")
        arriving = self.arriving.pop(step.slot, None)
        if step.prefetch and arriving is None:
            self._fail(f"nobody issued its prefetch into slot {step.slot}")
        if arriving is not None and (arriving != self.index or not step.prefetch):
            self._fail(f"uses slot {step.slot} while step {arriving} is prefetched into it")
        if self.slots[step.slot] != key:
            self._fail(f"slot {step.slot} holds {_name(self.slots[step.slot])}")
        self.backwards.add(key)
        self.slots[step.slot] = None

    def _prefetch(self, step: SwapStep, target_index: int) -> None:
        if not self.index < target_index < len(self.plan.steps):
            self._fail(f"next_prefetch is {target_index}, not a later step of {len(self.plan.steps)}")
        target = self.plan.steps[target_index]
        if target.slot != step.slot:
            self._fail(f"prefetches for step {target_index} in slot {target.slot}, but frees slot {step.slot}")
        if not target.prefetch or target.record is None or not 0 <= target.record < self.plan.num_records:
            self._fail(f"prefetches for step {target_index}, {target.op}, which reads no record")
        self._check_saved(step.slot)
        found = self.records[target.record]
        if found != target.op.key:
            self._fail(f"prefetches {target.op}, but record {target.record} holds {_name(found)}")
        self.records[target.record] = None
        self.slots[step.slot] = target.op.key
        self.arriving[step.slot] = target_index

    def _check_saved(self, slot: int) -> None:
        """The old content of a slot must not be needed any more, or must be in a record or, prefetched early, in
        another slot."""
        key = self.slots[slot]
        if key is None or key not in self.awaited or key in self.backwards:
            return
        if key not in self.records and self.slots.count(key) == 1:
            self._fail(f"slot {slot} is overwritten, but {_name(key)} was never offloaded")

    def _fail(self, message: str) -> NoReturn:
        raise PlanError(f"step {self.index} ({self.plan.steps[self.index].op}): {message}")


def _name(key: Key | None) -> str:
    return "nothing" if key is None else str(LayerOp("F", *key))
