"""Race campaign: every wait of several schedules is dropped once."""

import pytest
from swap_runs import OWN_PLAN, SCHEDULES, DroppedWait, Layers, caught_drops, make_swapper, run_steps, stage_ops

from memo.errors import RaceError
from memo.executor.checker import Checked
from memo.executor.cpu_streams import VirtualStreams

OTHER_ORDERS = [VirtualStreams("lazy"), *(VirtualStreams("random", seed) for seed in range(3))]


@pytest.mark.parametrize("name", ["1 stage, 5 layers, 2 microbatches", "pp 2 vpp 2 stage 0, 8 layers, 4 microbatches"])
def test_every_dropped_wait_is_caught_or_redundant(name: str) -> None:
    ops = SCHEDULES[name]
    waits, caught = caught_drops(lambda backend: run_steps(ops, backend, num_steps=2), OTHER_ORDERS)
    print(f"\n{name}: {waits} waits, {len(caught)} drops caught, {waits - len(caught)} redundant")
    # Unchecked, the data goes wrong only in some orders: why the checker is needed.
    late = (DroppedWait(VirtualStreams("lazy"), dropped) for dropped in caught)
    assert any(run_steps(ops, backend, poison=True, num_steps=2) for backend in late)


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
