"""Order among streams, as the CUDA programming guide and the runtime's reference give it.

Under the lazy schedule nothing runs but what a wait needs, so what has run after it is what CUDA promises, no more.
"""

import ctypes

import pytest
from cuda_calls import BLOCKING, LEGACY, NON_BLOCKING, NOT_READY, SUCCESS, Cuda

from memo.emulated_gpu.face import EmulatedGpu

cuda_device_synchronize = "cudaDeviceSynchronize"


@pytest.fixture
def cuda(gpu: EmulatedGpu) -> Cuda:
    return Cuda()


def test_a_stream_runs_in_the_order_of_issue(cuda: Cuda) -> None:
    notes: list[str] = []
    stream = cuda.stream()
    for name in "abc":
        cuda.note(stream, notes, name)
    assert notes == []
    cuda.ok("cudaStreamSynchronize", stream)
    assert notes == ["a", "b", "c"]


@pytest.mark.parametrize(("flags", "expected"), [(BLOCKING, ["a", "b", "c"]), (NON_BLOCKING, ["c"])])
def test_the_legacy_stream_and_blocking_streams_wait_for_each_other(
    cuda: Cuda, flags: int, expected: list[str]
) -> None:
    """Programming guide, "Default stream": the legacy stream waits for all blocking streams, and they for it."""
    notes: list[str] = []
    first, second = cuda.stream(flags), cuda.stream(flags)
    cuda.note(first, notes, "a")
    cuda.note(LEGACY, notes, "b")
    cuda.note(second, notes, "c")
    cuda.ok("cudaStreamSynchronize", second)
    assert notes == expected
    cuda.ok(cuda_device_synchronize)


def test_two_blocking_streams_do_not_wait_for_each_other(cuda: Cuda) -> None:
    notes: list[str] = []
    first, second = cuda.stream(BLOCKING), cuda.stream(BLOCKING)
    cuda.note(first, notes, "a")
    cuda.note(second, notes, "b")
    cuda.ok("cudaStreamSynchronize", second)
    assert notes == ["b"]
    cuda.ok(cuda_device_synchronize)


def test_a_wait_is_for_what_was_recorded_and_for_nothing_later(cuda: Cuda) -> None:
    notes: list[str] = []
    producer, consumer = cuda.stream(), cuda.stream()
    event = cuda.event()
    cuda.note(producer, notes, "before")
    cuda.ok("cudaEventRecord", event, producer)
    cuda.note(producer, notes, "after")
    cuda.ok("cudaStreamWaitEvent", consumer, event, 0)
    cuda.note(consumer, notes, "consumer")
    cuda.ok("cudaStreamSynchronize", consumer)
    assert notes == ["before", "consumer"]
    cuda.ok(cuda_device_synchronize)


def test_an_event_that_is_recorded_again_moves_for_later_waits_alone(cuda: Cuda) -> None:
    """Reference of cudaStreamWaitEvent: later calls of cudaEventRecord do not affect a wait."""
    notes: list[str] = []
    producer, early, late = (cuda.stream() for _ in range(3))
    event = cuda.event()
    cuda.note(producer, notes, "1")
    cuda.ok("cudaEventRecord", event, producer)
    cuda.ok("cudaStreamWaitEvent", early, event, 0)
    cuda.note(producer, notes, "2")
    cuda.ok("cudaEventRecord", event, producer)
    cuda.ok("cudaStreamWaitEvent", late, event, 0)
    cuda.ok("cudaStreamSynchronize", early)
    assert notes == ["1"]
    cuda.ok("cudaStreamSynchronize", late)
    assert notes == ["1", "2"]


def test_an_event_that_was_never_recorded_is_done(cuda: Cuda) -> None:
    event, stream, notes = cuda.event(), cuda.stream(), list[str]()
    assert cuda.call("cudaEventQuery", event) == SUCCESS
    cuda.ok("cudaStreamWaitEvent", stream, event, 0)
    cuda.ok("cudaEventSynchronize", event)
    cuda.note(stream, notes, "ran")
    cuda.ok("cudaStreamSynchronize", stream)
    assert notes == ["ran"]


def test_a_wait_for_an_event_waits_for_what_that_waits_for(cuda: Cuda) -> None:
    notes: list[str] = []
    streams, event = [cuda.stream() for _ in range(4)], cuda.event()
    for stream in streams:
        cuda.ok("cudaStreamWaitEvent", stream, event, 0)
        cuda.note(stream, notes, str(len(notes)))
        cuda.ok("cudaEventRecord", event, stream)
    cuda.ok("cudaEventSynchronize", event)
    assert len(notes) == 4


def test_queries_tell_whether_work_is_left(cuda: Cuda) -> None:
    stream, event, notes = cuda.stream(), cuda.event(), list[str]()
    cuda.note(stream, notes, "ran")
    cuda.ok("cudaEventRecord", event, stream)
    assert cuda.call("cudaStreamQuery", stream) == NOT_READY
    assert cuda.call("cudaEventQuery", event) == NOT_READY
    cuda.ok("cudaEventSynchronize", event)
    assert cuda.call("cudaEventQuery", event) == SUCCESS
    assert cuda.call("cudaStreamQuery", stream) == SUCCESS
    assert cuda.call("cudaGetLastError") == NOT_READY


def test_a_loop_of_queries_ends(cuda: Cuda) -> None:
    """A device works on its own, however lazy."""
    stream, notes = cuda.stream(), list[str]()
    cuda.note(stream, notes, "ran")
    for _ in range(1000):
        if cuda.call("cudaStreamQuery", stream) == SUCCESS:
            break
    assert notes == ["ran"]
    cuda.call("cudaGetLastError")


def test_a_destroyed_stream_finishes_its_work(cuda: Cuda) -> None:
    stream, notes = cuda.stream(), list[str]()
    cuda.note(stream, notes, "ran")
    cuda.ok("cudaStreamDestroy", stream)
    cuda.ok(cuda_device_synchronize)
    assert notes == ["ran"]


def test_a_host_function_may_take_a_lock_that_the_waiting_thread_gave_up(cuda: Cuda) -> None:
    """The device's own lock is not held meanwhile: else a host function that calls Python could stop both."""
    stream, seen = cuda.stream(), list[int]()
    count = ctypes.c_int()

    def ask() -> None:
        cuda.ok("cudaGetDeviceCount", ctypes.byref(count))
        seen.append(cuda.call("cudaStreamQuery", cuda_other))

    cuda_other = cuda.stream()
    cuda.host_function(stream, ask)
    cuda.ok("cudaStreamSynchronize", stream)
    assert seen == [SUCCESS]


def test_time_between_events(cuda: Cuda) -> None:
    begin, end, elapsed = cuda.event(), cuda.event(), ctypes.c_float()
    assert cuda.call("cudaEventElapsedTime", ctypes.byref(elapsed), begin, end) != SUCCESS
    stream, notes = cuda.stream(), list[str]()
    cuda.ok("cudaEventRecord", begin, stream)
    cuda.note(stream, notes, "work")
    cuda.ok("cudaEventRecord", end, stream)
    assert cuda.call("cudaEventElapsedTime", ctypes.byref(elapsed), begin, end) == NOT_READY
    cuda.ok("cudaEventSynchronize", end)
    cuda.ok("cudaEventElapsedTime", ctypes.byref(elapsed), begin, end)
    assert elapsed.value >= 0
    cuda.call("cudaGetLastError")
