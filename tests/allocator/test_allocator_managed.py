"""Recording in CUDA's managed memory: what is refused, and how it is told. csrc/test/core_test.cpp has the counting."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from layouts import tiny
from ranks import run_ranks

from memo.allocator.library import RawManagedUse
from memo.allocator.planned import PlannedAllocator
from memo.artifacts.memory_trace import Trace
from memo.cli.main import main
from memo.errors import AllocatorError, ResourceError
from memo.train import profile as profile_module
from memo.train.setup import prepare
from memo.units import GIB

FREE_BYTES = 8 * GIB
RUN = "--num-layers 2 --hidden-size 32 --seq-len 64 --num-threads 1 --peak-tflops 1 --profile-cache off"


class Library:
    """Answers like the native one on a device of which FREE_BYTES are free."""

    def __init__(self) -> None:
        self.limits: list[int] = []
        self.is_open = False
        self.use = RawManagedUse()

    def open_managed(self, limit_bytes: int) -> None:
        self.limits.append(limit_bytes)
        self.is_open = True

    def close_managed(self) -> None:
        self.is_open = False

    def managed_use(self) -> RawManagedUse:
        return self.use


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Library:
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (FREE_BYTES, 10 * FREE_BYTES))
    return Library()


def allocator(library: Library) -> PlannedAllocator:
    return PlannedAllocator(library, "cuda")  # type: ignore[arg-type]


@contextlib.contextmanager
def refused(library: Library, num_bytes: int) -> Iterator[None]:
    """The iteration ends as it does where a request is refused."""
    yield
    library.use.refused_bytes = num_bytes
    raise torch.OutOfMemoryError("managed memory for 1 bytes more would pass the limit")


def test_more_than_is_free_is_refused_with_both_figures_and_the_flag(library: Library) -> None:
    with pytest.raises(AllocatorError) as told, allocator(library).managed_memory(), refused(library, 9 * GIB):
        assert library.is_open and library.limits == [FREE_BYTES]
    assert "--managed-memory: the iteration asks for 9.00 GiB or more at once" in str(told.value)
    assert "the device has 8.00 GiB free: record a shorter sequence" in str(told.value)
    assert "or give --oversubscribe, with which pages move" in str(told.value)
    assert not library.is_open


def test_other_errors_are_told_as_they_are(library: Library) -> None:
    with pytest.raises(RuntimeError, match=r"^something else$"), allocator(library).managed_memory():
        raise RuntimeError("something else")
    assert not library.is_open


def test_only_oversubscribing_has_no_limit(library: Library) -> None:
    for oversubscribe in (False, True):
        with allocator(library).managed_memory(oversubscribe):
            assert library.is_open
        assert not library.is_open
    assert library.limits == [FREE_BYTES, 2**63 - 1]


def on_the_cpu() -> None:
    found = PlannedAllocator.install("cpu")
    with pytest.raises(AllocatorError, match="managed memory is CUDA's, but this is the allocator of device 'cpu'"):
        found.managed_memory().__enter__()
    with pytest.raises(AllocatorError, match=r"^managed memory cannot be used: this device has no managed memory"):
        found._library.open_managed(FREE_BYTES)
    assert found._library.managed_use().limit_bytes == 0


def test_the_cpu_has_none() -> None:
    run_ranks(1, on_the_cpu)


def test_a_run_that_does_not_fit_may_be_prepared_for_recording() -> None:
    config = tiny("llama-tiny", "fp32", seq_length=1 << 20, num_layers=400, peak_tflops=1.0, num_threads=1)
    with pytest.raises(ResourceError):
        prepare(config)
    assert prepare(config, must_fit=False).config.model.num_layers == 400


def profiled(flags: str) -> int:
    profile_module.shutdown = lambda: None  # the group is the test's
    return main(["profile", *RUN.split(), *flags.split()])


def test_profile_records_a_step_up_to_the_optimizer(tmp_path: Path) -> None:
    out = tmp_path / "trace.json"
    assert run_ranks(1, profiled, f"--device cpu --offload-alpha off --trace-out {out}") == [0]
    trace: Any = Trace.load(out)
    assert (trace.device, trace.source, trace.run["seq_length"]) == ("cpu", "recorded", 64)
    kinds = [phase.kind for phase in trace.phases]
    assert kinds[:2] == ["enter_forward", "embedding_forward"] and kinds[-2:] == ["reduction", "optimizer"]
    assert trace.phases[-1].events
