"""Reserves a block for the requests of attention that depend on how documents are packed.

    phase ATTENTION as recorded, of two packings          with its block, of both

    malloc part, free part                                malloc BLOCK, free BLOCK
    malloc 2 parts, free both

All these requests are scratch: the results of attention are allocated before (memo.parallel.context). The block holds
the scratch of the most demanding packing that was recorded, served as csrc/core/planned_core.h serves it. It is planned
like any request: other phases use its memory.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import count

from memo.artifacts.memory_trace import ATTENTION, Event, Free, Malloc, Phase, Trace, requests
from memo.errors import TraceError
from memo.units import round_up

_MARGIN = 1000
"""The longest document of a recorded packing may be 1/1000 shorter than in the most demanding packing
(memo.attention.blocks), so a block is larger by this part."""


def with_blocks(traces: Sequence[Trace], min_bytes: int, alignment_bytes: int) -> list[Trace]:
    """The traces, whose phases ATTENTION request nothing but one block each, of the same size in all traces.

    The traces are of one iteration under several packings, as recorded. The native allocator serves requests of
    attention below `min_bytes`. Raises TraceError as `check_trace`, and for numbers of phases that differ.
    """
    if len({len(trace.phases) for trace in traces}) > 1:
        numbers = ", ".join(str(len(trace.phases)) for trace in traces)
        raise TraceError(f"iterations of other packings have {numbers} phases: what runs depends on the data")
    needs = [
        [_needed_bytes(phase, min_bytes, alignment_bytes) if phase.kind == ATTENTION else 0 for phase in trace.phases]
        for trace in traces
    ]
    block_bytes = [max(min_bytes, most + most // _MARGIN) for most in map(max, zip(*needs, strict=True))]
    return [_with_blocks(trace, block_bytes) for trace in traces]


def _with_blocks(trace: Trace, block_bytes: Sequence[int]) -> Trace:
    made = requests(trace)
    ids = count(1 + max(request.id for request in made))
    scratch = {request.id for request in made if trace.phases[request.phase].kind == ATTENTION}
    phases = []
    for phase, num_bytes in zip(trace.phases, block_bytes, strict=True):
        events: list[Event] = [event for event in phase.events if event.id not in scratch]
        if phase.kind == ATTENTION:
            block = Malloc(next(ids), num_bytes)
            events = [block, Free(block.id), *events]
        phases.append(replace(phase, events=tuple(events)))
    return replace(trace, phases=tuple(phases))


def _needed_bytes(phase: Phase, min_bytes: int, alignment_bytes: int) -> int:
    """The end of the block from which the scratch of this phase is served: each request from the lowest address."""
    live: dict[int, tuple[int, int]] = {}
    needed = 0
    for event in phase.events:
        if isinstance(event, Free):
            live.pop(event.id, None)
        elif event.num_bytes >= min_bytes:
            begin = 0
            for other_begin, other_end in sorted(live.values()):
                if other_begin - begin >= event.num_bytes:
                    break
                begin = round_up(other_end, alignment_bytes)
            live[event.id] = begin, begin + event.num_bytes
            needed = max(needed, begin + event.num_bytes)
    return needed
