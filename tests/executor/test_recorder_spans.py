"""The recorder sees what the plan says, at the times at which it happened, and changes nothing."""

import time
from collections import Counter
from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from swap_plans import simulate_swaps
from swap_runs import MOVED_BYTES, SCHEDULES, Forwarding, Layers, make_swapper, stage_ops
from torch import Tensor

from memo.executor.checker import Checked
from memo.executor.cpu_streams import ThreadStreams, VirtualStreams
from memo.executor.state_recorder import StateRecorder
from memo.executor.streams import COPY_STREAMS, AccessMode, Event, Stream, StreamBackend
from memo.planner.swap import SwapStep, swap_plan
from memo.report.timeline import ROWS, Row, SwapSpan, Tenancy, copied_s, hidden_share, stalled_s, tenancies
from memo.simulate.streams import LayerTimes
from memo.spec.layer_ops import LayerOp

BACKENDS: dict[str, Callable[[], StreamBackend]] = {
    "eager": VirtualStreams,
    "lazy": lambda: VirtualStreams("lazy"),
    "random": lambda: VirtualStreams("random", seed=3),
    "threads": ThreadStreams,
    "checked": lambda: Checked(VirtualStreams("lazy")),
}


def record_steps(name: str, backend: StreamBackend, num_steps: int = 2, poison: bool = False) -> list[SwapSpan]:
    layers = Layers(make_swapper(swap_plan(SCHEDULES[name]), backend, poison))
    with layers.swapper.recorded() as recorder:
        for _ in range(num_steps):
            layers.step()
            layers.swapper.next_step()
    assert layers.wrong == []
    finished, spans = recorder.finished(), recorder.spans()
    assert finished == spans  # a step leaves nothing on its way, so a log need not wait
    return spans


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", SCHEDULES)
def test_every_operation_and_copy_of_the_plan_is_seen_once(name: str, backend: str) -> None:
    plan = swap_plan(SCHEDULES[name])
    spans = record_steps(name, BACKENDS[backend](), num_steps=2, poison=backend != "eager")
    seen = Counter((span.row, str(span.step.op)) for span in spans if span.row != "wait")
    expected = Counter(("compute", str(step.op)) for step in plan.steps)
    expected += Counter(("offload", str(step.op)) for step in plan.steps if step.offload)
    expected += Counter(("prefetch", str(step.op)) for step in plan.steps if step.prefetch)
    assert seen == Counter({what: 2 * count for what, count in expected.items()})
    assert [s.step for s in spans if s.row == "compute"] == 2 * list(plan.steps)
    copies = [span for span in spans if span.row in ("offload", "prefetch")]
    assert all(span.num_bytes == MOVED_BYTES and span.step.record is not None for span in copies)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", SCHEDULES)
def test_times_are_those_that_the_waits_allow(name: str, backend: str) -> None:
    spans = record_steps(name, BACKENDS[backend](), num_steps=1)
    assert all(0 <= span.start_s <= span.end_s for span in spans)
    for row in ROWS:
        assert all(first.end_s <= second.start_s for first, second in pairwise(s for s in spans if s.row == row))
    at = {(span.row, span.step.op): span for span in spans}
    for span in spans:
        op = span.step.op
        if span.row == "offload":
            assert at["compute", op].end_s <= span.start_s
        if span.row == "prefetch":
            assert at["offload", LayerOp("F", *op.key)].end_s <= span.start_s
            assert span.end_s <= at["compute", op].start_s
        if span.row == "wait":
            assert span.end_s <= at["compute", op].start_s


class SlowCopies(ThreadStreams):
    """Every copy takes 10 ms longer."""

    def copy(self, stream: Stream, dst: Tensor, src: Tensor, dst_name: str, src_name: str) -> None:
        self._issue(stream, lambda: time.sleep(0.01))
        super().copy(stream, dst, src, dst_name, src_name)


def test_waits_and_copies_in_threads_take_the_time_that_they_took() -> None:
    spans = record_steps("1 stage, 6 layers, 1 microbatch", SlowCopies(), num_steps=1)
    copies = [span for span in spans if span.row in ("offload", "prefetch")]
    assert len(copies) == 8 and all(span.duration_s >= 0.01 for span in copies)
    # Synthetic layers take next to nothing, so forwards 2 .. 5 wait for four offloads that follow each other.
    assert stalled_s(spans) >= 0.04
    assert 0 <= hidden_share(spans) < 1


class Calls(Forwarding):
    """Writes down every call and what it was given, but for the events' identity."""

    def __init__(self, backend: StreamBackend) -> None:
        super().__init__(backend)
        self.calls: list[tuple[object, ...]] = []
        self.events: list[Event] = []

    def copy(self, stream: Stream, dst: Tensor, src: Tensor, dst_name: str, src_name: str) -> None:
        self.calls.append(("copy", stream, dst_name, src_name, dst.shape))
        super().copy(stream, dst, src, dst_name, src_name)

    def record(self, stream: Stream) -> Event:
        self.calls.append(("record", stream))
        self.events.append(super().record(stream))
        return self.events[-1]

    def wait(self, stream: Stream, event: Event | None) -> None:
        number = None if event is None else self.events.index(event)
        self.calls.append(("wait", stream, number))
        super().wait(stream, event)

    def access(self, stream: Stream, buffer_name: str, mode: AccessMode, what: str) -> None:
        self.calls.append(("access", stream, buffer_name, mode, what))
        super().access(stream, buffer_name, mode, what)

    def timestamp(self, stream: Stream) -> object:
        return self.backend.timestamp(stream)


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_backend_is_asked_for_the_same_in_the_same_order(name: str) -> None:
    calls = []
    for recording in (False, True):
        backend = Calls(VirtualStreams("lazy"))
        layers = Layers(make_swapper(swap_plan(SCHEDULES[name]), backend, poison=True))
        if recording:
            with layers.swapper.recorded():
                layers.step()
        else:
            layers.step()
        calls.append(backend.calls)
    assert calls[0] == calls[1]


def test_a_step_that_was_cut_short_leaves_no_half_operation() -> None:
    plan = swap_plan(SCHEDULES["1 stage, 5 layers, 2 microbatches"])
    swapper = make_swapper(plan, VirtualStreams())
    with swapper.recorded() as recorder:
        swapper.begin("F", 0)  # fails in the middle of the very operation that comes first in the next step
        swapper.reset()
        layers = Layers(swapper)
        layers.step(stop_after=3)
        swapper.reset()
        layers.step()
    steps = [span.step for span in recorder.spans() if span.row == "compute"]
    assert steps == [*plan.steps[:3], *plan.steps]


def test_what_has_not_ended_is_not_waited_for() -> None:
    swapper = make_swapper(swap_plan(SCHEDULES["1 stage, 6 layers, 1 microbatch"]), VirtualStreams("lazy"))
    layers = Layers(swapper)
    with swapper.recorded() as recorder:
        layers.step(stop_after=1)
    assert Counter(span.row for span in recorder.finished()) == {"compute": 1}
    assert Counter(span.row for span in recorder.spans()) == {"compute": 1, "offload": 1}


def test_copies_of_states_count_once_when_they_have_ended() -> None:
    """Of the lazy kind: what nobody waits for has not run."""
    backend = VirtualStreams("lazy")
    source, target = torch.ones(2), torch.zeros(2)
    first = StateRecorder(backend)
    first.copy(Stream.PREFETCH, target, source, "", "")
    assert first.take_copies_s() == 0.0
    assert target.tolist() == [0, 0]
    second = StateRecorder(backend, first)
    second.wait(Stream.COMPUTE, second.record(Stream.PREFETCH))
    assert second.take_copies_s() > 0.0
    assert second.take_waited_s() > 0.0
    assert second.take_copies_s() == second.take_waited_s() == 0.0


def test_two_recordings_at_one_time_see_the_same() -> None:
    """memo.Trainer.trace records steps in which copies are timed for the log."""
    layers = Layers(make_swapper(swap_plan(SCHEDULES["1 stage, 6 layers, 1 microbatch"]), VirtualStreams()))
    with layers.swapper.recorded() as outer:
        with layers.swapper.recorded() as inner:
            layers.step()
        layers.swapper.next_step()
        layers.step()
    seen = [[(span.row, str(span.step.op)) for span in recorder.spans()] for recorder in (outer, inner)]
    assert seen[0] == 2 * seen[1] != []


def test_nothing_is_recorded_after_an_error() -> None:
    swapper = make_swapper(swap_plan(SCHEDULES["1 stage, 6 layers, 1 microbatch"]), VirtualStreams())
    with pytest.raises(ZeroDivisionError), swapper.recorded() as recorder:
        raise ZeroDivisionError
    Layers(swapper).step()
    assert recorder.spans() == []


def test_looking_at_a_lazy_stream_runs_no_copy() -> None:
    backend = VirtualStreams("lazy")
    source, target = torch.ones(2), torch.zeros(2)
    for stream in COPY_STREAMS:
        backend.copy(stream, target, source, "", "")
        backend.timestamp(stream)
    assert target.tolist() == [0, 0]
    backend.synchronize()
    assert target.tolist() == [1, 1]


def span(row: Row, start_s: float, end_s: float, kind: str = "F", layer: int = 0, slot: int = 0) -> SwapSpan:
    return SwapSpan(row, SwapStep(LayerOp("F" if kind == "F" else "B", 0, layer), slot), start_s, end_s)


def test_hidden_share_counts_what_lies_under_layers() -> None:
    layers = [span("compute", 0, 1), span("wait", 1, 2), span("compute", 2, 3), span("compute", 3, 4)]
    assert hidden_share(layers) == 1.0  # nothing is copied
    # 0.5 of the first second, nothing of the second, all of the third and a quarter of the fourth.
    assert hidden_share([*layers, span("offload", 0.5, 3.25)]) == pytest.approx((0.5 + 1 + 0.25) / 2.75)
    both = [*layers, span("offload", 2, 4), span("prefetch", 4, 6)]
    assert copied_s(both) == 4 and hidden_share(both) == 0.5
    assert hidden_share([*layers, span("prefetch", 1, 2)]) == 0.0
    assert stalled_s(both) == 1


def test_tenancies_by_hand() -> None:
    """Four layers: 0 and 1 leave with the offload and come back with the prefetch; 2 and 3 stay."""
    spans = simulate_swaps(swap_plan(stage_ops(1, 1, 1, 4, 0)), LayerTimes(1.0, 2.0, 0.5, 1.0))
    expected = {
        Tenancy(0, (0, 0), 0, 1.5),
        Tenancy(1, (0, 1), 1, 2.5),
        Tenancy(0, (0, 2), 2, 8),
        Tenancy(1, (0, 3), 3, 6),
        Tenancy(1, (0, 1), 6, 10),
        Tenancy(0, (0, 0), 8, 12),
    }
    assert set(tenancies(spans)) == expected and len(tenancies(spans)) == len(expected)
