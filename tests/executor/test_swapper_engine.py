"""The engine with synthetic layers under every backend and order of copies."""

import pytest
import torch
from swap_runs import (
    CPU,
    MOVED_BYTES,
    SCHEDULES,
    SLOT_BYTES,
    DroppedCopy,
    Layers,
    Logged,
    make_swapper,
    reuse_record,
    run_steps,
    stage_ops,
)

from memo.errors import PlanError, RaceError
from memo.executor import swapper as swapper_module
from memo.executor.checker import Checked
from memo.executor.cpu_streams import ThreadStreams, VirtualStreams
from memo.executor.host_records import HostRecords
from memo.executor.streams import Stream, StreamBackend
from memo.executor.swapper import Swapper
from memo.planner.swap import SwapStep, swap_plan
from memo.spec.layer_ops import LayerOp

ONE_STAGE = SCHEDULES["1 stage, 6 layers, 1 microbatch"]


@pytest.mark.parametrize("name", SCHEDULES)
def test_backwards_find_what_forwards_left(name: str) -> None:
    backends: list[StreamBackend] = [VirtualStreams("eager"), VirtualStreams("lazy"), ThreadStreams()]
    backends += [VirtualStreams("random", seed) for seed in range(10)]
    for backend in backends:
        assert run_steps(SCHEDULES[name], Checked(backend), poison=True, num_steps=3) == []


@pytest.mark.parametrize("max_slots", [1, 2, 3, 4])
def test_any_number_of_slots(max_slots: int) -> None:
    plan = swap_plan(stage_ops(2, 1, 4, 8, 0), max_slots)
    for backend in (VirtualStreams("lazy"), VirtualStreams("random", max_slots)):
        layers = Layers(make_swapper(plan, Checked(backend), poison=True))
        layers.step()
        layers.swapper.next_step()
        layers.step()
        assert layers.wrong == []


def test_copies_of_two_steps() -> None:
    backend = Logged(VirtualStreams())
    assert run_steps(stage_ops(1, 1, 1, 4, 0), backend, num_steps=2) == []
    step = [
        "offload: slot0 -> record0",
        "offload: slot1 -> record1",
        "prefetch: record1 -> slot1",
        "prefetch: record0 -> slot0",
    ]
    assert backend.calls == step * 2


def test_without_moves_there_is_no_event_and_no_copy() -> None:
    backend = Logged(VirtualStreams())
    assert run_steps(stage_ops(1, 1, 3, 2, 0), backend, num_steps=2) == []
    assert backend.calls == []


def test_skipping_an_offload_shows() -> None:
    wrong = run_steps(ONE_STAGE, DroppedCopy(VirtualStreams(), Stream.OFFLOAD), poison=True)
    assert wrong == [LayerOp("B", 0, 0)]


def test_skipping_a_prefetch_shows() -> None:
    wrong = run_steps(ONE_STAGE, DroppedCopy(VirtualStreams(), Stream.PREFETCH), poison=True)
    assert wrong == [LayerOp("B", 0, 3)]


def test_reusing_a_record_early_is_refused_and_would_spoil_data(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = reuse_record(swap_plan(ONE_STAGE))
    with pytest.raises(PlanError, match="record 0 still holds F0 layer 0, not yet prefetched"):
        make_swapper(plan, VirtualStreams())
    monkeypatch.setattr(swapper_module, "validate", lambda plan: None)
    layers = Layers(make_swapper(plan, VirtualStreams()))
    layers.step()
    assert layers.wrong == [LayerOp("B", 0, 0)]


@pytest.mark.parametrize("policy", ["eager", "lazy", "random"])
def test_a_step_cut_short_leaves_a_clean_engine(policy: str) -> None:
    plan = swap_plan(SCHEDULES["pp 2 stage 0, 8 layers, 4 microbatches"])
    backend = Checked(VirtualStreams(policy))  # type: ignore[arg-type]
    layers = Layers(make_swapper(plan, backend, poison=True))
    for stop_after in range(0, len(plan.steps), 3):
        layers.step(stop_after)
        layers.swapper.reset()
        layers.step()
        layers.swapper.next_step()
    assert layers.wrong == []


def test_an_exception_inside_a_layer() -> None:
    layers = Layers(make_swapper(swap_plan(ONE_STAGE), Checked(VirtualStreams("lazy"))))
    layers.step(3)
    layers.swapper.begin("F", 3)  # and the layer raises: no end
    with pytest.raises(PlanError, match=r"begin of F layer 4, but in the swap plan F0 layer 3 .* is still open"):
        layers.swapper.begin("F", 4)
    with pytest.raises(PlanError, match=r"ended after 3 of 12 layer operations"):
        layers.swapper.next_step()
    layers.swapper.reset()
    layers.step()
    assert layers.wrong == []


def test_an_error_of_a_copy_thread_surfaces_and_reset_cleans_up() -> None:
    backend = ThreadStreams()
    logged = Logged(backend)
    layers = Layers(make_swapper(swap_plan(ONE_STAGE), logged))

    def fail() -> None:
        backend.copy(Stream.OFFLOAD, torch.zeros(3), torch.zeros(4), "", "")

    def fail_once() -> None:
        logged.on_copy = None
        fail()

    logged.on_copy = fail_once
    with pytest.raises(RuntimeError, match="size of tensor"):
        layers.step()
        backend.synchronize()
    layers.swapper.reset()
    layers.step(5)
    fail()
    with pytest.raises(RuntimeError, match="size of tensor"):
        layers.swapper.reset()
    layers.step()
    layers.swapper.next_step()
    backend.close()
    assert layers.wrong == []


def test_the_order_of_operations_is_the_plan_s() -> None:
    swapper = make_swapper(swap_plan(stage_ops(1, 1, 1, 2, 0)), VirtualStreams())
    with pytest.raises(PlanError, match=r"begin of F layer 1, but in the swap plan F0 layer 0 \(step 0 of 4\)"):
        swapper.begin("F", 1)
    with pytest.raises(PlanError, match=r"end of F layer 0, but .* comes next"):
        swapper.end("F", 0)
    for kind, layer in (("F", 0), ("F", 1), ("B", 1), ("B", 0)):
        assert swapper.begin(kind, layer) == layer
        assert not swapper.current.prefetch
        swapper.end(kind, layer)
    with pytest.raises(PlanError, match="all 4 steps of the swap plan are done"):
        swapper.begin("F", 0)
    swapper.next_step()
    assert swapper.begin("F", 0) == 0


def test_slots_and_pool_must_fit_the_plan() -> None:
    plan, backend = swap_plan(ONE_STAGE), VirtualStreams()
    slots = [torch.zeros(SLOT_BYTES, dtype=torch.uint8) for _ in range(2)]
    records = HostRecords(plan, MOVED_BYTES, CPU, backend)
    with pytest.raises(PlanError, match="uses 2 slots, but 1"):
        Swapper(plan, slots[:1], MOVED_BYTES, records, backend)
    with pytest.raises(PlanError, match=r"slot 1 is torch\.uint8 \[39\].* moved_bytes = 40"):
        Swapper(plan, [slots[0], slots[1][:39]], MOVED_BYTES, records, backend)
    with pytest.raises(PlanError, match=r"slot 0 is torch\.float64"):
        Swapper(plan, [slot.double() for slot in slots], MOVED_BYTES, records, backend)
    fewer = swap_plan(stage_ops(1, 1, 1, 5, 0))
    with pytest.raises(PlanError, match="needs 4 host records of 40 bytes, but there are 3 of 40"):
        Swapper(plan, slots, MOVED_BYTES, HostRecords(fewer, MOVED_BYTES, CPU, backend), backend)
    with pytest.raises(PlanError, match="needs 4 host records of 40 bytes, but there are 4 of 48"):
        Swapper(plan, slots, MOVED_BYTES, HostRecords(plan, 48, CPU, backend), backend)


def test_an_event_recorded_too_early_is_a_race() -> None:
    """The access that `end` declares is what makes the checker see a copy that begins inside a layer."""

    class Early(Swapper):
        def begin(self, kind: str, layer: int) -> int:
            slot = super().begin(kind, layer)
            self.at_begin = self.backend.record(Stream.COMPUTE)
            return slot

        def _offload(self, step: SwapStep, computed: object) -> None:
            super()._offload(step, self.at_begin)

    good = make_swapper(swap_plan(ONE_STAGE), Checked(VirtualStreams()))
    early = Early(good.plan, good.slots, MOVED_BYTES, good.records, good.backend)
    with pytest.raises(RaceError, match="slot0"):
        Layers(early).step()
