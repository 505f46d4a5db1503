"""Race campaign: every wait of several schedules is dropped once."""

import pytest
from swap_runs import OWN_PLAN, SCHEDULES, DroppedWait, Layers, make_swapper, run_steps, stage_ops

from memo.errors import RaceError
from memo.executor.checker import Checked
from memo.executor.streams import StreamBackend, VirtualStreams
from memo.spec.layer_ops import LayerOp

SEEDS = range(3)


def races(ops: list[LayerOp], backend: StreamBackend, dropped: int) -> bool:
    """Whether the checker objects; if it does not, the data must be right."""
    try:
        wrong = run_steps(ops, DroppedWait(Checked(backend), dropped), num_steps=2)
    except RaceError:
        return True
    assert not wrong, f"wait {dropped}: no race reported, but {wrong[0]} read wrong activations"
    return False


def other_orders() -> list[StreamBackend]:
    return [VirtualStreams("lazy"), *(VirtualStreams("random", seed) for seed in SEEDS)]


@pytest.mark.parametrize("name", ["1 stage, 5 layers, 2 microbatches", "pp 2 vpp 2 stage 0, 8 layers, 4 microbatches"])
def test_every_dropped_wait_is_caught_or_redundant(name: str) -> None:
    ops = SCHEDULES[name]
    complete = DroppedWait(Checked(VirtualStreams()), None)
    assert run_steps(ops, complete, num_steps=2) == []
    caught, is_visible = 0, False
    for dropped in range(complete.num_waits):
        if races(ops, VirtualStreams(), dropped):
            caught += 1
            # Unchecked, the data goes wrong only in some orders: why the checker is needed.
            late = DroppedWait(VirtualStreams("lazy"), dropped)
            is_visible = is_visible or bool(run_steps(ops, late, poison=True, num_steps=2))
        else:
            assert not any(races(ops, backend, dropped) for backend in other_orders())
    print(f"\n{name}: {complete.num_waits} waits, {caught} drops caught, {complete.num_waits - caught} redundant")
    assert caught >= complete.num_waits // 2
    assert is_visible


def test_the_verdict_depends_on_order_of_issue_alone() -> None:
    ops = SCHEDULES["1 stage, 5 layers, 2 microbatches"]
    complete = DroppedWait(VirtualStreams(), None)
    run_steps(ops, complete, num_steps=2)
    for dropped in range(complete.num_waits):
        verdicts = {races(ops, backend, dropped) for backend in [VirtualStreams(), *other_orders()]}
        assert len(verdicts) == 1, dropped


def test_a_race_names_the_buffer_and_both_accesses() -> None:
    ops = SCHEDULES["1 stage, 6 layers, 1 microbatch"]
    with pytest.raises(RaceError) as raised:
        run_steps(ops, DroppedWait(Checked(VirtualStreams()), 0))
    message = str(raised.value)
    assert "slot0" in message and "copy slot0 -> record0" in message and "F0 layer 0" in message
    assert "offload" in message and "compute" in message


def test_no_wait_is_issued_twice() -> None:
    complete = DroppedWait(VirtualStreams(), None)
    run_steps(stage_ops(1, 1, 1, 4, 0), complete)
    # 2 offloads after their forwards, 2 forwards after those; 2 prefetches after the backward and after the
    # offload of their record, 2 backwards after those.
    assert complete.num_waits == 2 + 2 + 4 + 2


def test_a_prefetch_right_behind_its_own_offload() -> None:
    """The planner's order implies this wait by others; a sound plan of another origin may need it."""
    complete = DroppedWait(Checked(VirtualStreams("lazy")), None)
    layers = Layers(make_swapper(OWN_PLAN, complete, poison=True))
    layers.step()
    assert layers.wrong == [] and complete.num_waits == 4
    with pytest.raises(RaceError, match="race on record0: 'copy record0 -> slot1' on prefetch"):
        Layers(make_swapper(OWN_PLAN, DroppedWait(Checked(VirtualStreams()), 2))).step()
