"""Reserves a block for what attention asks for where the requests depend on how documents are packed.

    phase ATTENTION as recorded, of two packings          with its block, of both

    malloc dq, malloc part, free part                     malloc dq, malloc BLOCK, free BLOCK
    malloc dq, malloc 2 parts, free both, malloc lse ...

What outlives the phase is a result: its size does not depend on the packing, and it gets an address like any request.
All else is scratch. The block holds the scratch of the most demanding packing that was recorded, served as
csrc/core/planned_core.h serves it. It is planned like any request: other phases use its memory.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import count

from memo.artifacts.memory_trace import ATTENTION, Event, Free, Malloc, Phase, Trace, requests
from memo.errors import TraceError
from memo.units import round_up

_MARGIN = 1000
"""Packings are recorded whose longest document may be this part shorter than in the most demanding one
(memo.attention.blocks)."""


def with_blocks(traces: Sequence[Trace], min_bytes: int, alignment_bytes: int) -> list[Trace]:
    """The traces, whose phases ATTENTION make their results, in the order of size, and a block as large in all of them.

    The traces are of one iteration under several packings, as recorded. Requests of attention below `min_bytes` are
    left out, because the native allocator serves them. Raises TraceError as `check_trace`, and for numbers of phases
    that differ.
    """
    if len({len(trace.phases) for trace in traces}) > 1:
        numbers = ", ".join(str(len(trace.phases)) for trace in traces)
        raise TraceError(f"iterations of other packings have {numbers} phases: what runs depends on the data")
    needs = [
        [_needed_bytes(phase, min_bytes, alignment_bytes) if phase.kind == ATTENTION else 0 for phase in trace.phases]
        for trace in traces
    ]
    block_bytes = [max(min_bytes, most + most // _MARGIN) for most in map(max, zip(*needs, strict=True))]
    return [_with_blocks(trace, block_bytes, min_bytes) for trace in traces]


def _with_blocks(trace: Trace, block_bytes: Sequence[int], min_bytes: int) -> Trace:
    made = requests(trace)
    ids = count(1 + max(request.id for request in made))
    attention = {index for index, phase in enumerate(trace.phases) if phase.kind == ATTENTION}
    is_scratch = {r.id for r in made if r.phase in attention and (r.num_bytes < min_bytes or r.freed_in == r.phase)}
    phases = []
    for index, phase in enumerate(trace.phases):
        events: list[Event] = [event for event in phase.events if event.id not in is_scratch]
        if index in attention:
            results = sorted((e for e in events if isinstance(e, Malloc)), key=lambda malloc: malloc.num_bytes)
            block = Malloc(next(ids), block_bytes[index])
            events = [*results, block, Free(block.id), *(e for e in events if isinstance(e, Free))]
        phases.append(replace(phase, events=tuple(events)))
    return replace(trace, phases=tuple(phases))


def _needed_bytes(phase: Phase, min_bytes: int, alignment_bytes: int) -> int:
    """The end of the block from which the scratch of this phase is served: each request from the lowest address."""
    freed = {event.id for event in phase.events if isinstance(event, Free)}
    live: dict[int, tuple[int, int]] = {}
    needed = 0
    for event in phase.events:
        if isinstance(event, Free):
            live.pop(event.id, None)
        elif event.id in freed and event.num_bytes >= min_bytes:
            begin = 0
            for other_begin, other_end in sorted(live.values()):
                if other_begin - begin >= event.num_bytes:
                    break
                begin = round_up(other_end, alignment_bytes)
            live[event.id] = begin, begin + event.num_bytes
            needed = max(needed, begin + event.num_bytes)
    return needed
