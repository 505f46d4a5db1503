"""Records on a disk, with synthetic layers: every order of copies and transfers, dropped waits, and failing disks."""

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from swap_runs import SCHEDULES, DroppedWait, Layers, Logged, caught_drops, on_disk

from memo.errors import DiskError, RaceError
from memo.executor.checker import Checked
from memo.executor.cpu_streams import ThreadStreams, VirtualStreams
from memo.executor.record_file import RecordFile
from memo.executor.streams import Stream, StreamBackend
from memo.planner.disk_plan import disk_plan, mean_waits
from memo.planner.swap import swap_plan
from memo.spec.layer_ops import LayerOp

ONE_STAGE = SCHEDULES["1 stage, 6 layers, 1 microbatch"]


def wrong_reads(
    ops: Sequence[LayerOp], backend: StreamBackend, directory: Path, count: int, num_buffers: int, steps: int = 2
) -> list[LayerOp]:
    layers = Layers(on_disk(swap_plan(ops), backend, directory, count, num_buffers))
    for _ in range(steps):
        layers.step()
        layers.swapper.next_step()
    backend.synchronize()
    return layers.wrong


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("num_buffers", [1, 4])
def test_backwards_find_what_forwards_left(name: str, num_buffers: int, tmp_path: Path) -> None:
    ops = SCHEDULES[name]
    most = swap_plan(ops).num_records
    for count in {1, most // 2, most}:
        for backend in (VirtualStreams(), VirtualStreams("lazy"), VirtualStreams("random", 1), ThreadStreams()):
            assert wrong_reads(ops, Checked(backend), tmp_path, count, num_buffers) == [], (count, backend)


class SameOrder(DroppedWait):
    """Drops a wait, and issues prefetches in the same order whatever runs when: as soon, or as late as can be."""

    def __init__(self, backend: StreamBackend, index: int | None, is_late: bool) -> None:
        super().__init__(backend, index)
        self.is_late = is_late

    def has_happened(self, event: Any) -> bool:
        return not self.is_late


@pytest.mark.parametrize("is_late", [False, True])
def test_every_dropped_wait_is_caught_or_redundant(is_late: bool, tmp_path: Path) -> None:
    waits, caught = caught_drops(
        lambda backend: wrong_reads(SCHEDULES["1 stage, 5 layers, 2 microbatches"], backend, tmp_path, 3, 2),
        [VirtualStreams("lazy"), VirtualStreams("random", 1)],
        lambda backend, index: SameOrder(backend, index, is_late),
    )
    print(f"\n{waits} waits, {len(caught)} drops caught")


class DroppedWaitsOf(DroppedWait):
    """Skips every wait of one stream."""

    def __init__(self, backend: StreamBackend, stream: Stream) -> None:
        super().__init__(backend, None)
        self.stream = stream

    def wait(self, stream: Stream, event: Any) -> None:
        if stream is not self.stream:
            self.backend.wait(stream, event)


@pytest.mark.parametrize(
    ("stream", "message"),
    [
        (Stream.WRITE, "race on buffer0: 'write buffer0 -> record0 on disk' on write reads it, while 'copy slot0 ->"),
        (Stream.READ, "race on record3 on disk: 'read record3 on disk -> buffer0' on read reads it, while 'write"),
        (Stream.PREFETCH, "race on buffer0: 'copy buffer0 -> slot1' on prefetch reads it, while 'read record3"),
        (Stream.OFFLOAD, "race on slot0: 'copy slot0 -> buffer0' on offload reads it, while 'F0 layer 0' on compute"),
    ],
)
def test_a_missing_wait_is_named(stream: Stream, message: str, tmp_path: Path) -> None:
    with pytest.raises(RaceError) as raised:
        wrong_reads(ONE_STAGE, DroppedWaitsOf(Checked(VirtualStreams()), stream), tmp_path, 4, 4)
    assert str(raised.value).startswith(message)


def test_records_that_wait_longest_are_on_disk_and_read_ahead(tmp_path: Path) -> None:
    plan = swap_plan(ONE_STAGE)
    assert mean_waits(plan) == [9.0, 7.0, 5.0, 3.0]
    found = disk_plan(plan, 2, 2)
    assert found.records == (0, 1)
    backend = Logged(VirtualStreams())
    assert wrong_reads(ONE_STAGE, backend, tmp_path, 2, 2, steps=1) == []
    moved = [call for call in backend.calls if "poison" not in call]
    assert moved == [
        "offload: slot0 -> buffer0",
        "write: buffer0 -> record0 on disk",
        "offload: slot1 -> buffer1",
        "write: buffer1 -> record1 on disk",
        "read: record1 on disk -> buffer0",  # both, before the last forward begins
        "read: record0 on disk -> buffer1",
        "offload: slot0 -> record2",
        "offload: slot1 -> record3",
        "prefetch: record3 -> slot1",
        "prefetch: record2 -> slot0",
        "prefetch: buffer0 -> slot1",
        "prefetch: buffer1 -> slot0",
    ]


def test_a_prefetch_is_issued_when_its_record_is_read_and_at_the_latest_when_it_is_needed(tmp_path: Path) -> None:
    """Copies that run late are read late: the layer that begins then issues its prefetch itself."""
    backend = Logged(VirtualStreams("lazy"))
    layers = Layers(on_disk(swap_plan(ONE_STAGE), backend, tmp_path, 4, 4, poison=False))
    layers.step(stop_after=7)
    assert not any("-> slot" in call for call in backend.calls)
    layers.swapper.reset()
    backend.calls.clear()
    layers.step()
    assert layers.wrong == []
    assert [call for call in backend.calls if "-> slot" in call] == [
        f"prefetch: buffer{buffer} -> slot{slot}" for buffer, slot in ((0, 1), (1, 0), (2, 1), (3, 0))
    ]


@pytest.mark.parametrize("policy", ["eager", "lazy", "random"])
@pytest.mark.parametrize("stop_after", [1, 5, 8, 11])
def test_a_step_cut_short_leaves_a_clean_engine(policy: Any, stop_after: int, tmp_path: Path) -> None:
    layers = Layers(on_disk(swap_plan(ONE_STAGE), Checked(VirtualStreams(policy)), tmp_path, 3, 2))
    layers.step(stop_after=stop_after)
    layers.swapper.reset()
    for _ in range(2):
        layers.step()
        layers.swapper.next_step()
    assert layers.wrong == []


@pytest.mark.parametrize("threads", [True, False])
@pytest.mark.parametrize("name", ["write", "read"])
def test_a_failing_disk_ends_the_step(
    name: str, threads: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: RecordFile, index: int, buffer: torch.Tensor) -> None:
        raise DiskError(f"record {index} cannot be moved")

    backend = ThreadStreams() if threads else VirtualStreams()
    layers = Layers(on_disk(swap_plan(ONE_STAGE), backend, tmp_path, 3, 2))
    layers.step()
    layers.swapper.next_step()
    with monkeypatch.context() as patched:
        patched.setattr(RecordFile, name, fail)
        with pytest.raises(DiskError, match="cannot be moved"):
            layers.step()
    with contextlib.suppress(DiskError):  # of what else was on its way
        layers.swapper.reset()
    layers.swapper.reset()
    layers.step()
    assert layers.wrong == []
