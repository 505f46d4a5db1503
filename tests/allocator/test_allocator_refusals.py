"""What the allocator refuses, each with its message, and the marks of phases. Every test has its own process."""

import dataclasses
import threading

import pytest
import torch
from first_fit import first_fit
from ranks import run_ranks

from memo.allocator.library import Mode
from memo.allocator.planned import PlannedAllocator
from memo.artifacts.memory_plan import NATIVE, MemoryPlan, PlannedPhase, PlannedRequest
from memo.artifacts.memory_trace import Free, Malloc, Phase
from memo.errors import AllocatorError, PlanError, TraceError

BLOCK_BYTES = 4096


def block() -> torch.Tensor:
    return torch.empty(BLOCK_BYTES, dtype=torch.uint8)


def plan(*phases: PlannedPhase, **changes: object) -> MemoryPlan:
    made = MemoryPlan("cpu", "flat", 64, 1024, 4 * BLOCK_BYTES, 0, "feasible", phases)
    return dataclasses.replace(made, **changes)  # type: ignore[arg-type]


def phase(kind: str, *offsets: int) -> PlannedPhase:
    return PlannedPhase(kind, -1, -1, tuple(PlannedRequest(BLOCK_BYTES, offset) for offset in offsets))


def in_own_process(test) -> None:  # type: ignore[no-untyped-def]
    run_ranks(1, test)


def _plans_that_are_refused() -> None:
    allocator = PlannedAllocator.install("cpu")
    good = plan(phase("a", 0))
    refused = {
        "is for device 'cuda', not 'cpu': plan this one": {"device": "cuda"},
        "has alignment_bytes = 32, but cpu needs a multiple of 64": {"alignment_bytes": 32},
        "request 0 has 4096 bytes, but min_bytes is 5000": {"min_bytes": 5000},
        r"request 0 ends at 0 \+ 4096, behind arena_bytes 4095": {"arena_bytes": 4095},
        "request 1 has offset 100, not a multiple of alignment_bytes 64": {"phases": (phase("a", 0, 100),)},
        r"used: there is no memory for an arena of 1152921504606846976 bytes \(.*\): leave more": {
            "arena_bytes": 1 << 60
        },
    }
    for message, changes in refused.items():
        allocator.use(good)
        with pytest.raises(PlanError, match=message):
            allocator.use(dataclasses.replace(good, **changes))
        with allocator.iteration():
            allocator.mark("a")
            kept = block()
        # A plan that was refused unseen leaves the old one at work.
        assert allocator.statistics.hits == int("device" in changes or "alignment_bytes" in changes)
        del kept
    with pytest.raises(PlanError, match="cannot be loaded while recording"), allocator.record():
        allocator.use(good)


def test_plans_that_are_refused() -> None:
    in_own_process(_plans_that_are_refused)


def _larger_plan_while_blocks_live() -> None:
    allocator = PlannedAllocator.install("cpu")
    allocator.use(plan(phase("a", 0)))
    with allocator.iteration():
        allocator.mark("a")
        kept = block().fill_(7)
    larger = plan(phase("a", 0, 4 * BLOCK_BYTES), arena_bytes=5 * BLOCK_BYTES)
    with pytest.raises(PlanError, match=r"1 planned blocks are alive in an arena of 16384 bytes.* needs 20480: drop"):
        allocator.use(larger)
    allocator.use(plan(phase("a", 0, BLOCK_BYTES)))  # not larger: the arena stays
    with allocator.iteration():
        allocator.mark("a")
        other, served = block().fill_(8), block().fill_(9)
    assert served.data_ptr() == kept.data_ptr() + BLOCK_BYTES
    assert [int(t[0]) for t in (kept, other, served)] == [7, 8, 9]
    assert allocator.statistics.fallbacks["overlap"] == 1
    allocator.lend()
    assert allocator.statistics.arena_bytes == 4 * BLOCK_BYTES  # two blocks still live there
    del kept, served
    allocator.use(larger)
    assert allocator.statistics.arena_bytes == 5 * BLOCK_BYTES


def test_arena_is_not_exchanged_under_living_blocks() -> None:
    in_own_process(_larger_plan_while_blocks_live)


def _recordings() -> None:
    allocator = PlannedAllocator.install("cpu")
    with pytest.raises(TraceError, match="0 iterations ran while recording"), allocator.record():
        pass
    with pytest.raises(TraceError, match="2 iterations ran while recording: run one"), allocator.record():
        for _ in range(2):
            with allocator.iteration():
                allocator.mark("a")
                block()
    with pytest.raises(TraceError, match="no request"), allocator.record(), allocator.iteration():
        block()  # before the first phase
    before = block()
    with allocator.record({"seq_length": 8}) as recording, allocator.iteration():
        allocator.mark("a", 3, 1)
        kept = block()
        other = threading.Thread(target=block)
        other.start()
        other.join()
        del before
        allocator.mark("b")
        allocator.mark("a", 3, 1)
        del kept
        after = block()
    del after
    assert recording.trace.run == {"seq_length": 8}
    assert recording.trace.phases == (
        Phase("a", 3, 1, (Malloc(0, BLOCK_BYTES),)),
        Phase("b", -1, -1, ()),
        Phase("a", 3, 1, (Free(0), Malloc(1, BLOCK_BYTES))),
    )


def test_recordings() -> None:
    in_own_process(_recordings)


def _recording_beside_a_plan() -> None:
    allocator = PlannedAllocator.install("cpu")

    def iteration() -> int:
        with allocator.iteration():
            allocator.mark("a")
            return block().data_ptr() - base

    base = 0
    allocator.use(plan(phase("a", BLOCK_BYTES)))
    address = iteration()
    with allocator.record() as recording:
        iteration()
    assert allocator.statistics.requests == 1
    assert first_fit(recording.trace).phases == (phase("a", 0),)
    assert iteration() == address
    with pytest.raises(ZeroDivisionError), allocator.record():
        raise ZeroDivisionError
    assert iteration() == address


def test_plan_rests_while_recording() -> None:
    in_own_process(_recording_beside_a_plan)


def _phases_by_name() -> None:
    allocator = PlannedAllocator.install("cpu")
    offsets = [i * BLOCK_BYTES for i in range(4)]
    first, second, third = phase("a", offsets[0]), phase("b", offsets[1]), phase("a", offsets[2], NATIVE)
    allocator.use(plan(first, second, third, phase("c", offsets[3])))

    def at(kind: str) -> int:
        allocator.mark(kind)
        return block().data_ptr()

    with allocator.iteration():
        base = at("a")
        assert [at("c") - base, at("b") - base, at("a") - base] == [offsets[3], offsets[1], offsets[2]]
        native = block()
        assert allocator.statistics.native == 1
        assert allocator.statistics.num_fallbacks == allocator.statistics.outside == 0
        at("a")  # a third time
        at("unknown")
        assert allocator.statistics.outside == 2
    with allocator.iteration():
        assert at("a") == base  # counted anew
    del native
    assert allocator.statistics.num_fallbacks == 0
    assert allocator.statistics.mismatches == ()


def test_phases_are_found_by_name_and_turn() -> None:
    in_own_process(_phases_by_name)


def _poison() -> None:
    allocator = PlannedAllocator.install("cpu")
    allocator.use(plan(phase("a", 0, 0)))
    for poisoned in (True, False):
        allocator.set_poison(poisoned)
        with allocator.iteration():
            allocator.mark("a")
            torch.full((BLOCK_BYTES // 4,), 1.0)
            again = torch.empty(BLOCK_BYTES // 4)
            assert bool(again.isnan().all()) == poisoned
            assert bool((again == 1.0).all()) != poisoned
            del again


def test_poison_overwrites_what_is_freed() -> None:
    in_own_process(_poison)


def _raw_interfaces() -> None:
    """What torch does with storages besides plain tensors: resized, shared, pickled, freed at the very end."""
    allocator = PlannedAllocator.install("cpu")
    allocator.use(plan(phase("a", 0, BLOCK_BYTES)))
    with allocator.iteration():
        allocator.mark("a")
        kept, shared = block().fill_(3), block().fill_(4)
        assert allocator.statistics.hits == 2
        assert kept.data_ptr() % 64 == 0
    kept.untyped_storage().resize_(2 * BLOCK_BYTES)
    assert bool((kept == 3).all())
    shared.share_memory_()
    assert bool((shared == 4).all())
    assert allocator.statistics.live_blocks == 0
    assert torch.empty(0).data_ptr() == 0


def test_storages_of_planned_blocks_are_torchs() -> None:
    in_own_process(_raw_interfaces)


def _faults_of_deleters() -> None:
    """What the core keeps (csrc/test has how) is raised where an iteration ends, and not over its own error."""
    allocator = PlannedAllocator.install("cpu")
    faults = iter([b"double free", b"double free", None])
    allocator._library._native.memo_take_fault = lambda: next(faults)
    message = r"^the native allocator failed while it freed a block: double free: start again with --memory-planner off"
    with pytest.raises(AllocatorError, match=message), allocator.iteration():
        pass
    with pytest.raises(ZeroDivisionError), allocator.iteration():
        raise ZeroDivisionError
    with pytest.raises(AllocatorError, match=message), allocator.iteration():
        pass
    with allocator.iteration():
        pass


def test_faults_of_deleters_are_raised_after_the_iteration() -> None:
    in_own_process(_faults_of_deleters)


def _numbers_that_wrap() -> None:
    """2^64 + n is n to ctypes: without a look such a plan would be served at other addresses."""
    allocator = PlannedAllocator.install("cpu")
    large = 1 << 64
    refused = [
        plan(phase("a", 0), arena_bytes=large + 4 * BLOCK_BYTES),
        plan(phase("a", large)),
        plan(PlannedPhase("a", -1, -1, (PlannedRequest(large + BLOCK_BYTES, 0),))),
        plan(phase("a", 0), min_bytes=1024 - large),
        plan(phase("a", 0), alignment_bytes=large + 64),
    ]
    for wrapping in refused:
        with pytest.raises(PlanError, match=r"plan cannot be used: -?\d+ does not fit into 64 bits: plan anew"):
            allocator.use(wrapping)
        assert allocator._mode is Mode.PASSTHROUGH
    with pytest.raises(PlanError, match="used: arena_bytes is -64"):
        allocator.use(plan(phase("a", 0), arena_bytes=-64))


def test_numbers_that_ctypes_would_wrap_are_refused() -> None:
    in_own_process(_numbers_that_wrap)
