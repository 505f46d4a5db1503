"""Keys and values on a disk, whose parts share staging buffers: every order of copies and transfers, dropped waits.

A synthetic layer writes a pattern into the keys and values of each section of a forward, and reads those of all
sections up to it; its backward goes through the sections from the last to the first.
"""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from swap_runs import SCHEDULES, Logged, Poisoned, caught_drops, stage_ops

from memo.errors import PlanError
from memo.executor.checker import Checked
from memo.executor.cpu_streams import ThreadStreams, VirtualStreams
from memo.executor.disk_budget import DiskBudget
from memo.executor.host_budget import HostBudget
from memo.executor.key_values import KeyValues, KeyValueSwapper
from memo.executor.streams import StreamBackend
from memo.planner.disk_plan import DiskPlan, disk_plan
from memo.planner.swap import SwapPlan, swap_plan
from memo.spec.disk import BLOCK_BYTES, RecordKind
from memo.spec.layer_ops import LayerOp, with_attention_again
from memo.spec.sweep import KeyValueLayout

SECTIONS = 4
LAYOUT = KeyValueLayout(
    (2 * SECTIONS, 1, 4),
    sections=SECTIONS,
    dtype="fp32",
    sum_dtype="fp32",
    cp=1,
    gathers=False,
    held=SECTIONS,
)
ONE_STAGE = SCHEDULES["1 stage, 6 layers, 1 microbatch"]
SCHEDULES_OF_KEYS = {
    **{name: SCHEDULES[name] for name in list(SCHEDULES)[1:3]},
    "1 stage, 6 layers, 3 recompute attention": with_attention_again(ONE_STAGE, range(3)),
}


class SweptKeys:
    """The keys and values of synthetic layers."""

    def __init__(self, plan: SwapPlan, disk: DiskPlan, backend: StreamBackend, directory: Path) -> None:
        self.plan, self.values = plan, KeyValues(LAYOUT, torch.device("cpu"))
        host = HostBudget(2**30, "a test", disk=DiskBudget(str(directory), 2**30))
        self.swapper = KeyValueSwapper(plan, LAYOUT, self.values, Poisoned(backend), host, disk)
        self.host = host
        self.wrong: list[tuple[LayerOp, int]] = []

    def step(self, stop_after: int | None = None) -> None:
        """One training step, perhaps cut short after so many sections."""
        sections = [(op, s) for op in (step.op for step in self.plan.steps) for s in self._order(op)]
        for op, section in sections[:stop_after]:
            self.swapper.begin(op.kind, op.layer, section)
            if op.kind == "F":
                self._part(section).fill_(_pattern(op, section))
            for before in range(section + 1):
                if not bool((self._part(before) == _pattern(op, before)).all()):
                    self.wrong.append((op, section))
            self.swapper.end(op.kind, op.layer, section)

    def _order(self, op: LayerOp) -> range:
        return range(SECTIONS) if op.kind == "F" else range(SECTIONS)[::-1]

    def _part(self, section: int) -> torch.Tensor:
        return self.values.moved[2 * section : 2 * section + 2]


def _pattern(op: LayerOp, section: int) -> float:
    return 10000.0 * op.microbatch + 100 * op.layer + section


def keys_on_disk(
    ops: Sequence[LayerOp], backend: StreamBackend, directory: Path, share: float, num_buffers: int
) -> SweptKeys:
    """So large a share of the records is on disk."""
    plan = swap_plan(ops, max_slots=1)
    disk = disk_plan(plan, round(share * plan.num_records), num_buffers, SECTIONS)
    return SweptKeys(plan, disk, backend, directory)


def wrong_reads(keys: SweptKeys, backend: StreamBackend, steps: int = 2) -> list[tuple[LayerOp, int]]:
    for _ in range(steps):
        keys.step()
        keys.swapper.next_step()
    backend.synchronize()
    return keys.wrong


@pytest.mark.parametrize("name", SCHEDULES_OF_KEYS)
@pytest.mark.parametrize("num_buffers", [1, 3])
def test_backwards_find_what_forwards_left(name: str, num_buffers: int, tmp_path: Path) -> None:
    for share in (0.5, 1.0):
        for backend in (VirtualStreams(), VirtualStreams("lazy"), VirtualStreams("random", 1), ThreadStreams()):
            checked = Checked(backend)
            keys = keys_on_disk(SCHEDULES_OF_KEYS[name], checked, tmp_path, share, num_buffers)
            assert wrong_reads(keys, checked) == [], (share, backend)


@pytest.mark.parametrize("num_buffers", [1, 3])
def test_host_memory_is_that_of_the_shared_buffers(num_buffers: int, tmp_path: Path) -> None:
    """Not of all parts, which are as long as the sequence."""
    keys = keys_on_disk(ONE_STAGE, VirtualStreams(), tmp_path, 1.0, num_buffers)
    kind = RecordKind(keys.plan.num_records, SECTIONS * LAYOUT.part_bytes, num_buffers, SECTIONS)
    assert keys.host.drawn_bytes == kind.staging_bytes == num_buffers * BLOCK_BYTES
    assert keys.host.disk is not None and keys.host.disk.drawn_bytes == kind.number * kind.stride_bytes


def test_every_dropped_wait_is_caught_or_redundant(tmp_path: Path) -> None:
    ops = stage_ops(1, 1, 1, 3, 0)
    waits, caught = caught_drops(lambda backend: wrong_reads(keys_on_disk(ops, backend, tmp_path, 1.0, 2), backend))
    print(f"\n{waits} waits, {len(caught)} drops caught")


@pytest.mark.parametrize("policy", ["eager", "lazy", "random"])
@pytest.mark.parametrize("stop_after", [6, 26])
def test_a_step_cut_short_leaves_a_clean_engine(policy: str, stop_after: int, tmp_path: Path) -> None:
    backend = Checked(VirtualStreams(policy))  # type: ignore[arg-type]
    keys = keys_on_disk(ONE_STAGE, backend, tmp_path, 1.0, 2)
    keys.step(stop_after)
    keys.swapper.next_step()
    assert wrong_reads(keys, backend) == []


def test_a_part_leaves_the_device_after_its_section_and_comes_back_last_part_first(tmp_path: Path) -> None:
    backend = Logged(VirtualStreams())
    plan = swap_plan(ONE_STAGE[4:8], max_slots=1)  # F4 F5 B5 B4
    keys = SweptKeys(plan, disk_plan(plan, 1, 2, SECTIONS), backend, tmp_path)
    moves: list[list[str]] = []
    for kind, layer in (("F", 4), ("F", 5), ("B", 5)):
        for section in range(SECTIONS) if kind == "F" else range(SECTIONS)[::-1]:
            backend.calls.clear()
            keys.swapper.begin(kind, layer, section)
            keys.swapper.end(kind, layer, section)
            moves.append([call.replace("key/value ", "") for call in backend.calls if "poison" not in call])
    forward = [
        [f"offload: part {s} slot0 -> buffer{s % 2}", f"write: buffer{s % 2} -> part {s} record0 on disk"]
        for s in range(SECTIONS)
    ]
    ahead = ["read: part 3 record0 on disk -> buffer0", "read: part 2 record0 on disk -> buffer1"]
    assert moves[:4] == [*forward[:3], [*forward[3], *ahead]]
    assert moves[4:8] == [[]] * 4, "the last layer stays"
    assert moves[8:] == [
        ["prefetch: buffer0 -> part 3 slot0", "read: part 1 record0 on disk -> buffer0"],
        ["prefetch: buffer1 -> part 2 slot0", "read: part 0 record0 on disk -> buffer1"],
        ["prefetch: buffer0 -> part 1 slot0"],
        ["prefetch: buffer1 -> part 0 slot0"],
    ]


def test_parts_in_another_order_than_planned_are_refused(tmp_path: Path) -> None:
    keys = keys_on_disk(ONE_STAGE, VirtualStreams(), tmp_path, 1.0, 2)
    keys.swapper.begin("F", 0, 1)
    with pytest.raises(PlanError, match="part 1 of record 0 passes in turn 1 of the disk plan, but turn 0 comes next"):
        keys.swapper.end("F", 0, 1)
