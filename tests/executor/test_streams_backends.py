"""Each backend keeps the promises of streams and events, and the choice between backends."""

import gc
import threading

import pytest
import torch
from torch import Tensor

from memo.errors import ConfigError
from memo.executor.checker import Checked
from memo.executor.cpu_streams import ThreadStreams, VirtualStreams
from memo.executor.cuda_streams import CudaStreams
from memo.executor.select import make_backend
from memo.executor.streams import Stream

COMPUTE, OFFLOAD, PREFETCH = Stream.COMPUTE, Stream.OFFLOAD, Stream.PREFETCH
CPU = torch.device("cpu")


def numbers(value: float) -> Tensor:
    return torch.full((4,), value)


def test_eager_copies_at_once_and_lazy_when_compute_waits() -> None:
    for policy, at_once in (("eager", True), ("lazy", False)):
        backend = VirtualStreams(policy)  # type: ignore[arg-type]
        source, target = numbers(1), numbers(0)
        backend.copy(OFFLOAD, target, source, "target", "source")
        event = backend.record(OFFLOAD)
        assert torch.equal(target, source) is at_once
        backend.wait(COMPUTE, event)
        assert torch.equal(target, source)


def test_lazy_runs_what_the_event_needs_and_no_more() -> None:
    backend = VirtualStreams("lazy")
    source, first, second, third = numbers(1), numbers(0), numbers(0), numbers(0)
    backend.copy(OFFLOAD, first, source, "", "")
    offloaded = backend.record(OFFLOAD)
    backend.copy(OFFLOAD, third, source, "", "")
    backend.wait(PREFETCH, offloaded)
    backend.copy(PREFETCH, second, first, "", "")
    backend.wait(COMPUTE, backend.record(PREFETCH))
    assert second.tolist() == [1.0] * 4 and third.tolist() == [0.0] * 4
    backend.synchronize()
    assert third.tolist() == [1.0] * 4


def test_lazy_reads_its_source_late() -> None:
    backend = VirtualStreams("lazy")
    source, target = numbers(1), numbers(0)
    backend.copy(OFFLOAD, target, source, "", "")
    source.fill_(2)
    backend.synchronize()
    assert target.tolist() == [2.0] * 4


def test_random_repeats_with_its_seed_and_differs_between_seeds() -> None:
    def moments(seed: int) -> list[bool]:
        backend, found = VirtualStreams("random", seed), []
        for _ in range(20):
            target = numbers(0)
            backend.copy(OFFLOAD, target, numbers(1), "", "")
            found.append(bool(target[0]))
        return found

    assert moments(1) == moments(1)
    assert len({tuple(moments(seed)) for seed in range(5)}) > 1


def test_waiting_for_nothing_and_for_compute() -> None:
    for backend in (VirtualStreams("lazy"), ThreadStreams(), Checked(VirtualStreams())):
        for stream in Stream:
            backend.wait(stream, None)
            backend.wait(stream, backend.record(COMPUTE))
        backend.synchronize()


def test_copies_on_the_compute_stream_run_in_order() -> None:
    for backend in (VirtualStreams("lazy"), ThreadStreams()):
        target = numbers(0)
        backend.copy(COMPUTE, target, numbers(3), "", "")
        assert target.tolist() == [3.0] * 4


def test_threads_run_beside_the_caller_and_in_event_order() -> None:
    backend = ThreadStreams()
    gate = threading.Event()
    source, host, back = numbers(1), numbers(0), numbers(0)
    backend.wait(OFFLOAD, gate)  # holds the offload stream back until the gate opens
    backend.copy(OFFLOAD, host, source, "", "")
    backend.wait(PREFETCH, backend.record(OFFLOAD))
    backend.copy(PREFETCH, back, host, "", "")
    done = backend.record(PREFETCH)
    assert not done.is_set() and back.tolist() == [0.0] * 4  # the caller did not wait
    gate.set()
    backend.wait(COMPUTE, done)
    assert back.tolist() == [1.0] * 4
    backend.close()


def test_a_thread_s_error_surfaces_at_the_next_call_and_only_once() -> None:
    backend = ThreadStreams()
    backend.copy(OFFLOAD, torch.zeros(3), torch.zeros(4), "", "")
    with pytest.raises(RuntimeError, match="size of tensor"):
        backend.synchronize()
    target = numbers(0)
    backend.copy(OFFLOAD, target, numbers(1), "", "")  # the worker goes on
    backend.wait(COMPUTE, backend.record(OFFLOAD))
    assert target.tolist() == [1.0] * 4
    backend.close()


def test_synchronize_drains_before_it_raises() -> None:
    backend = ThreadStreams()
    gate, target = threading.Event(), numbers(0)
    backend.wait(PREFETCH, gate)
    backend.copy(PREFETCH, target, numbers(1), "", "")
    backend.copy(OFFLOAD, torch.zeros(3), torch.zeros(4), "", "")
    threading.Timer(0.05, gate.set).start()
    with pytest.raises(RuntimeError, match="size of tensor"):
        backend.synchronize()
    assert target.tolist() == [1.0] * 4
    backend.close()


def test_threads_end_with_their_backend() -> None:
    before = set(threading.enumerate())
    backend = ThreadStreams()
    assert len(set(threading.enumerate()) - before) == 2
    del backend
    gc.collect()
    assert set(threading.enumerate()) <= before


def test_make_backend() -> None:
    auto = make_backend("auto", CPU)
    assert isinstance(auto, VirtualStreams) and auto.policy == "eager"
    assert isinstance(make_backend("virtual", CPU), VirtualStreams)
    assert isinstance(make_backend("threads", CPU), ThreadStreams)
    checked = make_backend("auto", CPU, check=True)
    assert isinstance(checked, Checked) and isinstance(checked.backend, VirtualStreams)


def test_auto_is_cuda_on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it asks of CUDA, the tests on emulated GPUs take apart (tests/emulated_gpu/test_lost_orders.py)."""
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: None)
    assert isinstance(make_backend("auto", torch.device("cuda", 1)), CudaStreams)


@pytest.mark.parametrize(
    ("name", "device", "message"),
    [
        ("cuda", "cpu", "'cuda' runs on cuda, but the device is cpu: choose auto"),
        ("threads", "cuda", "'threads' runs on cpu, but the device is cuda"),
        ("virtual", "cuda", "'virtual' runs on cpu, but the device is cuda"),
        ("fast", "cpu", "offload_backend is 'fast': choose auto, cuda, virtual, threads"),
    ],
)
def test_backends_of_other_devices_are_refused(name: str, device: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_backend(name, torch.device(device))
