"""Traces made from traces, against the same iteration written down in full."""

from itertools import count

import pytest

from memo.artifacts.memory_trace import Free, Malloc, Phase, Trace
from memo.errors import TraceError
from memo.planner.traces import RECORDED_LAYERS, extend_layers, extrapolate, merge


def iteration(layers, microbatches=2, chunks=1, length=64, odd_layer=None, tail=8):
    """What a stage asks for: each layer keeps a block for its backward, passes its output on and scratches."""
    ids, kept, phases = count(), {}, []

    def add(kind, layer, microbatch, *events):
        phases.append(Phase(kind, layer, microbatch, tuple(events)))

    def block(num_bytes):
        return Malloc(next(ids), num_bytes)

    for m in range(microbatches):
        for chunk in range(chunks):
            passed = block(length * 2)
            add(f"enter{chunk}", -1, m, passed)
            for layer in range(chunk * layers, (chunk + 1) * layers):
                scratch, output = block(length * 8), block(length * 2)
                kept[layer, m] = block(length * 3 + (1 if layer == odd_layer else 0))
                frees = [Free(scratch.id), Free(passed.id)]
                add("layer_forward", layer, m, scratch, kept[layer, m], output, *frees)
                passed = output
            loss = block(tail)
            add(f"leave{chunk}", -1, m, loss, Free(passed.id), Free(loss.id))
        for chunk in reversed(range(chunks)):
            grad = block(length * 2)
            add(f"return{chunk}", -1, m, grad)
            for layer in reversed(range(chunk * layers, (chunk + 1) * layers)):
                scratch, new = block(length * 16), block(length * 2)
                frees = [Free(grad.id), Free(kept[layer, m].id), Free(scratch.id)]
                add("layer_backward", layer, m, scratch, new, *frees)
                grad = new
            add(f"end{chunk}", -1, m, Free(grad.id))
    return Trace("cpu", "recorded", tuple(phases))


def renamed(trace):
    """Ids by order of occurrence."""
    order = {}
    phases = []
    for phase in trace.phases:
        events = [event._replace(id=order.setdefault(event.id, len(order))) for event in phase.events]
        phases.append((phase.kind, phase.layer, phase.microbatch, tuple(events)))
    return phases


@pytest.mark.parametrize("layers", [5, 6, 17])
@pytest.mark.parametrize("chunks", [1, 2])
def test_few_layers_stand_for_all(layers, chunks):
    short = iteration(RECORDED_LAYERS, chunks=chunks)
    extended = extend_layers(short, layers)
    assert renamed(extended) == renamed(iteration(layers, chunks=chunks))
    assert extended.source == "composed"


def test_layers_that_differ_cannot_stand_for_others():
    with pytest.raises(TraceError, match=r"layer_forward layer 1 microbatch 0 and layer 2 do not make the same"):
        extend_layers(iteration(RECORDED_LAYERS, odd_layer=2), 8)
    first_and_last = iteration(RECORDED_LAYERS, odd_layer=3)
    assert renamed(extend_layers(first_and_last, 8)) == renamed(iteration(8, odd_layer=7))


def test_two_lengths_make_a_third():
    lines = [(length, iteration(3, length=length)) for length in (64, 128, 192)]
    longer = extrapolate(lines, 1 << 20)
    assert renamed(longer) == renamed(iteration(3, length=1 << 20))
    assert longer.source == "fitted"


def test_a_third_length_off_the_line_is_refused():
    lines = [(64, iteration(3, length=64)), (128, iteration(3, length=128)), (192, iteration(3, length=192, tail=9))]
    with pytest.raises(TraceError, match=r"leave0 .*at length 192: a request has 9 bytes, but its line says 8"):
        extrapolate(lines, 1024)


def test_another_structure_is_refused():
    lines = [(64, iteration(3, length=64)), (128, iteration(3, length=128)), (192, iteration(4, length=192))]
    with pytest.raises(TraceError, match=r"asks in another order|do not match"):
        extrapolate(lines, 1024)


def test_lines_need_three_lengths_and_whole_bytes():
    with pytest.raises(TraceError, match="2 traces are given"):
        extrapolate([(64, iteration(3)), (128, iteration(3))], 1024)
    with pytest.raises(TraceError, match="same sequence length 64"):
        extrapolate([(64, iteration(3)), (64, iteration(3)), (128, iteration(3))], 1024)
    lines = [(s, iteration(3, length=64, tail=tail)) for s, tail in ((64, 8), (66, 9), (68, 10))]
    with pytest.raises(TraceError, match="no whole bytes at 71"):
        extrapolate(lines, 71)


def two_phases(*events, sizes=(64, 32)):
    """A phase that makes two blocks, 0 and 1, and one that makes block 2; `events` go where they stand."""
    first, second = (tuple(e for e in events if e[0] == phase) for phase in (0, 1))
    made = [[Malloc(0, sizes[0]), Malloc(1, sizes[1])], [Malloc(2, 16)]]
    for phase, found in enumerate((first, second)):
        for _, after, block in reversed(found):
            made[phase].insert(after, Free(block))
    phases = (Phase("send", -1, 0, tuple(made[0])), Phase("layer_forward", 0, 0, tuple(made[1])))
    return Trace("cpu", "recorded", phases)


def test_of_two_recordings_the_later_free_counts():
    early = two_phases((0, 1, 0), (1, 0, 1), (1, 1, 2))
    late = two_phases((0, 2, 0), (1, 1, 2))  # block 0 goes later, block 1 never
    assert merge(early, late).phases == late.phases
    assert merge(late, early).phases == late.phases
    assert merge(early, early).phases == early.phases


def test_of_two_recordings_each_may_be_the_later_one():
    one, other = two_phases((0, 1, 0), (1, 1, 1), (1, 1, 2)), two_phases((0, 2, 0), (1, 0, 1), (1, 1, 2))
    assert merge(one, other).phases == two_phases((0, 2, 0), (1, 1, 1), (1, 1, 2)).phases


def test_recordings_of_different_iterations_do_not_merge():
    with pytest.raises(TraceError, match="two iterations ask for different memory in send microbatch 0"):
        merge(two_phases(), two_phases(sizes=(64, 33)))
    with pytest.raises(TraceError, match="two iterations have 2 and 1 phases"):
        merge(two_phases(), Trace("cpu", "recorded", two_phases().phases[:1]))
