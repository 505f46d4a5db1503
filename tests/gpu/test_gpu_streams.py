"""Copies on a GPU: they run beside compute, and no wait is missing when one side is late on purpose."""

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from swap_runs import SCHEDULES, DroppedWait, Layers, make_swapper, on_disk
from torch import Tensor

from memo.emulated_gpu.launch import is_emulated
from memo.executor.cuda_streams import CudaStreams
from memo.executor.host_pool import HostPool
from memo.executor.streams import Stream, StreamBackend
from memo.planner.swap import swap_plan
from memo.spec.layer_ops import LayerOp
from memo.units import MIB

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

SLEEP_CYCLES = 20_000_000
"""About 10 ms at the clocks of today's GPUs; what it takes is measured where it matters."""

LATE_S = 0.001
"""Of a thread that is late."""

BLOCK_BYTES = 256 * MIB
REPETITIONS = 3


def device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


def fastest_s(backend: CudaStreams, streams: tuple[Stream, Stream], block: Tensor, record: Tensor) -> float:
    """From the begin of a sleep on the one stream and copies on the other to the end of both."""
    taken = []
    for _ in range(REPETITIONS):
        backend.synchronize()
        begun = backend.timestamp(Stream.COMPUTE)
        event = backend.record(Stream.COMPUTE)
        for stream in set(streams):
            backend.wait(stream, event)
        with torch.cuda.stream(backend._stream(streams[0])):
            torch.cuda._sleep(SLEEP_CYCLES)
        backend.copy(streams[1], record, block, "record", "block")
        for stream in set(streams):
            backend.wait(Stream.COMPUTE, backend.record(stream))
        ended = backend.timestamp(Stream.COMPUTE)
        backend.synchronize()
        taken.append(ended.seconds_since(begun))
    return min(taken)


@pytest.mark.skipif(is_emulated(), reason="an emulated GPU tells nothing about time")
@pytest.mark.parametrize("copies", [Stream.OFFLOAD, Stream.PREFETCH])
def test_copies_run_beside_compute(copies: Stream) -> None:
    """Bound: a tenth of the shorter of the two may show; one after the other all of it does."""
    backend, pool = CudaStreams(device()), HostPool(1, BLOCK_BYTES, device())
    block = torch.ones(BLOCK_BYTES, dtype=torch.uint8, device=device())
    record = pool.record(0)
    if copies is Stream.PREFETCH:
        block, record = record, block
    serial_s = fastest_s(backend, (copies, copies), block, record)
    beside_s = fastest_s(backend, (Stream.COMPUTE, copies), block, record)
    sleep = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    sleep[0].record()
    torch.cuda._sleep(SLEEP_CYCLES)
    sleep[1].record()
    torch.cuda.synchronize()
    sleep_s = sleep[0].elapsed_time(sleep[1]) * 1e-3
    copy_s = serial_s - sleep_s
    assert min(sleep_s, copy_s) > 1e-3, "one of the two is too short to tell"
    assert beside_s < max(sleep_s, copy_s) + 0.1 * min(sleep_s, copy_s)


class LateStreams(CudaStreams):
    """Every operation of one stream begins late: what relied on luck reads or writes too early."""

    def __init__(self, late: Stream) -> None:
        super().__init__(device())
        self.late = late

    def copy(self, stream: Stream, dst: Tensor, src: Tensor, dst_name: str, src_name: str) -> None:
        if stream is self.late:
            self._sleep(stream)
        super().copy(stream, dst, src, dst_name, src_name)

    def call(self, stream: Stream, task: Callable[[], object], reads: str, writes: str) -> None:
        if stream is self.late:
            super().call(stream, lambda: time.sleep(LATE_S), reads, writes)
        super().call(stream, task, reads, writes)

    def access(self, stream: Stream, buffer_name: str, mode: str, what: str) -> None:
        super().access(stream, buffer_name, mode, what)
        if stream is self.late:
            self._sleep(stream)

    def _sleep(self, stream: Stream) -> None:
        with torch.cuda.stream(self._stream(stream)):
            torch.cuda._sleep(SLEEP_CYCLES // 20)


def wrong_reads(ops: list[LayerOp], backend: StreamBackend) -> int:
    """Backwards that found other activations than their forward left, of two training steps."""
    layers = Layers(make_swapper(swap_plan(ops), backend, device=device()))
    for _ in range(2):
        layers.step()
        layers.swapper.next_step()
    torch.cuda.synchronize()
    return len(layers.wrong)


@pytest.mark.parametrize("late", list(Stream), ids=lambda stream: stream.value)
@pytest.mark.parametrize("name", SCHEDULES)
def test_a_late_stream_changes_nothing(name: str, late: Stream) -> None:
    assert wrong_reads(SCHEDULES[name], LateStreams(late)) == 0


@pytest.mark.parametrize("late", list(Stream), ids=lambda stream: stream.value)
@pytest.mark.parametrize("name", SCHEDULES)
def test_a_late_stream_changes_nothing_of_records_on_disk(name: str, late: Stream, tmp_path: Path) -> None:
    """On CUDA threads write and read them, and wait for streams, as the caller waits for the threads."""
    plan = swap_plan(SCHEDULES[name])
    count = plan.num_records - plan.num_records // 3
    layers = Layers(on_disk(plan, LateStreams(late), tmp_path, count, 2, poison=False, device=device()))
    for _ in range(2):
        layers.step()
        layers.swapper.next_step()
    torch.cuda.synchronize()
    assert layers.wrong == []


def test_transfers_of_a_disk_are_recorded(tmp_path: Path) -> None:
    """Their threads have no stream of the device, and their times count on the device's clock all the same."""
    plan = swap_plan(SCHEDULES["1 stage, 5 layers, 2 microbatches"])
    swapper = on_disk(plan, CudaStreams(device()), tmp_path, plan.num_records, 2, poison=False, device=device())
    assert swapper.records.staging is not None
    with swapper.recorded() as recorder:
        swapper.records.staging.listeners.append(partial(recorder.begin, "activations"))
        Layers(swapper).step()
    spans = recorder.spans()
    assert {"write", "read"} <= {span.row for span in spans}
    assert all(0 <= span.start_s <= span.end_s for span in spans)


def test_a_dropped_wait_shows_when_copies_are_late() -> None:
    """Else the test above could not fail: of all waits of a schedule, some leave wrong data when they are missing."""
    ops = SCHEDULES["1 stage, 5 layers, 2 microbatches"]
    complete = DroppedWait(CudaStreams(device()), None)
    assert wrong_reads(ops, complete) == 0
    seen = [wrong_reads(ops, DroppedWait(LateStreams(Stream.PREFETCH), i)) for i in range(complete.num_waits)]
    assert any(seen)
