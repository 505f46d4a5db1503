"""Finds microbatches whose requests repeat those of another microbatch; a plan needs only one of them.

    F 0  B 0 | F 1  B 1 | F 2  B 2 | F 3  B 3 | F 4  B 4 | reduction
                  ^          as 1       as 1

The first microbatch differs from all others, and so may the last, in which gradients are reduced. All between make the
same requests, free them themselves, and live beside the same memory. So the addresses of one are right for all, and a
step of hundreds of microbatches takes no longer to plan than one of three.
"""

from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import replace

from memo.artifacts.memory_trace import Malloc, Phase, Trace


def repeated_phases(trace: Trace, planned: Collection[int]) -> dict[int, int]:
    """{phase of a microbatch that repeats the second microbatch: the same phase of the second}.

    `planned`: ids of the requests that get an address, all freed in the iteration; other requests are ignored.
    """
    phases: dict[int, list[int]] = defaultdict(list)
    for index, phase in enumerate(trace.phases):
        phases[phase.microbatch].append(index)
    phases.pop(-1, None)
    between = sorted(phases)[1:-1]
    if not between:
        return {}
    asked = {microbatch: _asked([trace.phases[i] for i in phases[microbatch]], planned) for microbatch in between}
    second = between[0]
    alike = [microbatch for microbatch in between[1:] if asked[microbatch] == asked[second] is not None]
    is_apart = all(phases[i][-1] - phases[i][0] == len(phases[i]) - 1 for i in (second, *alike))
    pairs = [pair for i in alike for pair in zip(phases[i], phases[second], strict=True)]
    return dict(pairs) if is_apart else {}


def without_phases(trace: Trace, left_out: Collection[int]) -> Trace:
    """The trace without the phases `left_out`, and without frees of requests that were made in these."""
    kept = [phase for index, phase in enumerate(trace.phases) if index not in left_out]
    made = {event.id for phase in kept for event in phase.events if isinstance(event, Malloc)}
    return replace(
        trace,
        phases=tuple(replace(phase, events=tuple(e for e in phase.events if e.id in made)) for phase in kept),
    )


def _asked(phases: Sequence[Phase], planned: Collection[int]) -> list[tuple[object, ...]] | None:
    """Requests and frees of these phases, in order; None if they free a block from before, or leave a block."""
    asked: list[tuple[object, ...]] = []
    live: dict[int, int] = {}
    for phase in phases:
        asked.append((phase.kind, phase.layer))
        for event in phase.events:
            if event.id not in planned:
                continue
            if isinstance(event, Malloc):
                live[event.id] = len(asked)
                asked.append(("malloc", event.num_bytes))
            elif event.id in live:
                asked.append(("free", live.pop(event.id)))
            else:
                return None
    return None if live else asked
