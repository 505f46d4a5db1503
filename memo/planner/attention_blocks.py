"""Reserves a block for the requests of attention that depend on how documents are packed.

    phase ATTENTION as recorded, of two packings          with its block, of both

    malloc part, free part                                malloc BLOCK, free BLOCK
    malloc 2 parts, free both

All these requests are scratch: the results of attention are allocated before (memo.parallel.context). The block holds
the scratch of the most demanding packing that was recorded, served as csrc/core/planned_core.h serves it. It is planned
like any request: other phases use its memory.

A layer calls attention several times in a microbatch, as often and in the same order in every microbatch. The same call
gets a block of one size in all microbatches, so a packing may be recorded in one of them alone.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain, count

from memo.artifacts.memory_trace import ATTENTION, Event, Free, Malloc, Phase, Trace, requests
from memo.errors import TraceError
from memo.units import round_up

_MARGIN = 1000
"""The longest document of a recorded packing may be 1/1000 shorter than in the most demanding packing
(memo.attention.blocks), so a block is larger by this part."""


_Call = tuple[int, int]
"""A call of attention: the layer, and its number among the calls of the layer in a microbatch."""


def with_blocks(
    traces: Sequence[Trace], min_bytes: int, alignment_bytes: int, parts: Sequence[Trace] = ()
) -> list[Trace]:
    """The traces, whose phases ATTENTION request nothing but one block each, of the same size in all traces.

    The traces are of one iteration, as recorded under the same packing or under several. `parts` are of single
    microbatches under further packings; only their attention counts. The native allocator serves requests of attention
    below `min_bytes`. Raises TraceError as `check_trace`, and for numbers of phases that differ.
    """
    if len({len(trace.phases) for trace in traces}) > 1:
        numbers = ", ".join(str(len(trace.phases)) for trace in traces)
        raise TraceError(f"iterations of other packings have {numbers} phases: what runs depends on the data")
    most: defaultdict[_Call, int] = defaultdict(int)
    for trace in chain(traces, parts):
        for phase, call in zip(trace.phases, _calls(trace), strict=True):
            if call is not None:
                most[call] = max(most[call], _needed_bytes(phase, min_bytes, alignment_bytes))
    block_bytes = {call: max(min_bytes, needed + needed // _MARGIN) for call, needed in most.items()}
    return [_with_blocks(trace, block_bytes) for trace in traces]


def _calls(trace: Trace) -> Iterator[_Call | None]:
    """For each phase of a trace, the call of attention that it is; None: it is none."""
    seen = Counter[tuple[int, int]]()
    for phase in trace.phases:
        if phase.kind != ATTENTION:
            yield None
        else:
            yield phase.layer, seen[phase.layer, phase.microbatch]
            seen[phase.layer, phase.microbatch] += 1


def _with_blocks(trace: Trace, block_bytes: Mapping[_Call, int]) -> Trace:
    made = requests(trace)
    ids = count(1 + max(request.id for request in made))
    scratch = {request.id for request in made if trace.phases[request.phase].kind == ATTENTION}
    phases = []
    for phase, call in zip(trace.phases, _calls(trace), strict=True):
        events: list[Event] = [event for event in phase.events if event.id not in scratch]
        if call is not None:
            block = Malloc(next(ids), block_bytes[call])
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
