"""Blocks for attention: as large as the most demanding packing needs, planned like any other request."""

from dataclasses import replace

import pytest

from memo.artifacts.memory_trace import ATTENTION, Event, Free, Malloc, Phase, Trace
from memo.errors import TraceError
from memo.planner.attention_blocks import with_blocks
from memo.planner.memory.trace_plan import solve_trace
from memo.planner.traces import merge

MIN_BYTES, ALIGNMENT_BYTES = 200, 64
MARGIN = 1.001


def layer(*attention: Event) -> Trace:
    """A forward that makes the results of attention, 1 and 2; its attention frees its input, request 0."""
    return Trace(
        "cpu",
        "recorded",
        (
            Phase("layer_forward", 0, 0, (Malloc(0, 1000), Malloc(1, 300), Malloc(2, 500))),
            Phase(ATTENTION, 0, 0, attention),
            Phase("layer_forward", 0, 0, (Malloc(90, 2000), Free(1), Free(90), Free(2))),
        ),
    )


WHOLE = layer(Malloc(3, 4000), Free(3), Free(0))
PARTS = layer(
    Malloc(3, 2000),  # at 0
    Malloc(4, 3000),  # at 2048
    Free(0),
    Free(3),
    Malloc(5, 1900),  # at 0
    Malloc(6, 100),  # too small
    Malloc(7, 300),  # at 5056: 1920 to 2048 is too little
    Free(7),
    Free(6),
    Free(4),
    Free(5),
)


def test_the_block_holds_the_scratch_of_each_packing() -> None:
    """What is freed that was made before stays as it is."""
    whole, parts = with_blocks([WHOLE, PARTS], MIN_BYTES, ALIGNMENT_BYTES)
    needed = int(MARGIN * (5056 + 300))
    for trace in (whole, parts):
        block = trace.phases[1].events[0].id
        assert trace.phases[1].events == (Malloc(block, needed), Free(block), Free(0))
    assert (whole.phases[0], whole.phases[2]) == (WHOLE.phases[0], WHOLE.phases[2])
    merge(whole, parts)


def test_a_packing_of_one_microbatch_counts_in_all() -> None:
    """Only its attention counts, and call by call."""
    second = tuple(replace(phase, microbatch=1) for phase in layer(Malloc(13, 400), Free(13)).phases)
    trace = replace(WHOLE, phases=(*WHOLE.phases, *map(_renumbered, second)))
    one = replace(PARTS, phases=PARTS.phases[:2])
    (found,) = with_blocks([trace], MIN_BYTES, ALIGNMENT_BYTES, [one])
    blocks = [phase.events[0] for phase in found.phases if phase.kind == ATTENTION]
    assert [block.num_bytes for block in blocks if isinstance(block, Malloc)] == 2 * [int(MARGIN * (5056 + 300))]


def _renumbered(phase: Phase) -> Phase:
    events = (
        Malloc(100 + event.id, event.num_bytes) if isinstance(event, Malloc) else Free(100 + event.id)
        for event in phase.events
    )
    return replace(phase, events=tuple(events))


def test_attention_that_asks_for_nothing_large_has_a_block_all_the_same() -> None:
    (trace,) = with_blocks([layer(Malloc(3, 10), Free(3))], MIN_BYTES, ALIGNMENT_BYTES)
    assert [e.num_bytes for e in trace.phases[1].events if isinstance(e, Malloc)] == [MIN_BYTES]


def test_traces_without_attention_stay_as_they_are() -> None:
    plain = replace(WHOLE, phases=tuple(replace(phase, kind="layer_forward") for phase in WHOLE.phases))
    assert with_blocks([plain, plain], MIN_BYTES, ALIGNMENT_BYTES) == [plain, plain]


def test_other_numbers_of_phases_are_refused() -> None:
    shorter = replace(WHOLE, phases=WHOLE.phases[:2])
    with pytest.raises(TraceError, match="other packings have 3, 2 phases"):
        with_blocks([WHOLE, shorter], MIN_BYTES, ALIGNMENT_BYTES)


def test_a_layer_and_its_attention_are_planned_as_one_phase() -> None:
    (trace,) = with_blocks([WHOLE], MIN_BYTES, ALIGNMENT_BYTES)
    planning = solve_trace(trace, "paper", MIN_BYTES, ALIGNMENT_BYTES)
    assert [(part.name, part.num_phases, part.num_blocks) for part in planning.parts] == [
        ("layer_forward", 1, 5),
        ("arenas and what crosses phases", 3, 1),
    ]
    assert [request.num_bytes for request in planning.plan.phases[1].requests] == [4004]
    assert planning.plan.arena_bytes == 1024 + 320 + 512 + 4032  # all at once, in multiples of the alignment
