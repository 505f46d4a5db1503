"""Makes traces from traces: one from two recordings, all layers from a few, a longer sequence from shorter ones.

A run that just fits cannot be recorded with an allocator that fragments. But all layers make the same requests, and the
size of every request grows linearly with the sequence. Both facts are checked: TraceError names a request that differs.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count, groupby

from memo.artifacts.memory_trace import Free, Malloc, Phase, Trace, check_trace
from memo.errors import TraceError

RECORDED_LAYERS = 4
"""Layers of each chunk that must be recorded: the first, two that must make the same requests, and the last."""


def merge(one: Trace, other: Trace) -> Trace:
    """One trace from two recordings of the same iteration, in which every block lives until the later one of its ends.

    Threads that send messages free the blocks of these a little earlier or later each time, while the order of requests
    is the same. Raises TraceError if it is not.
    """
    if len(one.phases) != len(other.phases):
        raise TraceError(f"two iterations have {len(one.phases)} and {len(other.phases)} phases")
    for mine, theirs in zip(one.phases, other.phases, strict=True):
        if str(mine) != str(theirs) or _sizes(mine) != _sizes(theirs):
            raise TraceError(
                f"two iterations ask for different memory in {mine}: what runs depends on the data, or on threads"
            )
    freed: dict[_Place, list[int]] = defaultdict(list)
    for block, places in enumerate(zip(_ends(one), _ends(other), strict=True)):
        freed[max(places)].append(block)
    blocks, phases = count(), []
    for index, phase in enumerate(one.phases):
        events: list[Malloc | Free] = [Free(block) for block in freed[index, 0]]
        for made, size in enumerate(_sizes(phase), start=1):
            events.append(Malloc(next(blocks), size))
            events += [Free(block) for block in freed[index, made]]
        phases.append(replace(phase, events=tuple(events)))
    return replace(one, phases=tuple(phases))


_Place = tuple[int, int]
"""(index of a phase, number of requests that it has made before)."""


def _sizes(phase: Phase) -> list[int]:
    return [event.num_bytes for event in phase.events if isinstance(event, Malloc)]


def _ends(trace: Trace) -> list[_Place]:
    """The place at which each block is freed, in the order of requests."""
    ends: dict[int, _Place] = {}
    for index, phase in enumerate(trace.phases):
        made = 0
        for event in phase.events:
            if isinstance(event, Malloc):
                made += 1
                ends[event.id] = (len(trace.phases), 0)  # unless it is freed: it outlives the iteration
            else:
                ends[event.id] = (index, made)
    return list(ends.values())


def extend_layers(trace: Trace, layers: int) -> Trace:
    """The trace of a stage whose chunks have `layers` layers, from one in which each chunk has fewer: RECORDED_LAYERS.

    Layers are numbered chunk by chunk, from 0. The first layer of a chunk, its second, the last but one and the last
    are as recorded; all between repeat the second and third, which must agree.

    Raises TraceError if they do not.
    """
    check_trace(trace)
    short = [_Template(phase, own) for phase, own in zip(trace.phases, _blocks(trace), strict=True)]
    _check_repetition(short)
    runs = groupby(short, lambda t: (t.phase.kind, t.phase.layer // RECORDED_LAYERS, t.phase.microbatch))
    full = [entry for _, run in runs for entry in _stretched(list(run), layers)]
    source = "composed" if trace.source == "recorded" else trace.source
    return replace(trace, source=source, phases=_instantiate(full, layers))


def extrapolate(traces: Sequence[tuple[int, Trace]], length: int) -> Trace:
    """The trace at sequence length `length` from traces at other lengths: every request is linear in the length.

    Two traces determine the lines; every further trace, of which there must be one, must lie on them to the byte.

    Raises TraceError if there is no further trace, if the traces differ in structure, or if one leaves the lines.
    """
    if len(traces) < 3:
        raise TraceError(f"{len(traces)} traces are given: two fix the lines and a third must confirm them")
    (first_length, first), (second_length, second), *others = sorted(traces, key=lambda entry: entry[0])
    if first_length == second_length:
        raise TraceError(f"two traces have the same sequence length {first_length}: record two different ones")
    for at, other in others:
        _match(_on_line(first, second, (first_length, second_length, at)), other, at)
    return replace(_on_line(first, second, (first_length, second_length, length)), source="fitted")


@dataclass(frozen=True)
class _Origin:
    """The block that an event makes or frees: the `ordinal`-th of the phase with this name."""

    kind: str
    layer: int
    microbatch: int
    ordinal: int


@dataclass(frozen=True)
class _Template:
    """A recorded phase in which the ids of blocks are replaced by their origins."""

    phase: Phase
    origins: tuple[_Origin, ...]
    """One for each event."""

    def relative(self) -> list[tuple[int | None, str, int, int, int]]:
        """Events that another layer must repeat: (bytes or None, kind, distance in layers, microbatch, ordinal)."""
        own = self.phase.layer
        return [
            (
                event.num_bytes if isinstance(event, Malloc) else None,
                origin.kind,
                origin.layer if origin.layer < 0 else origin.layer - own,
                origin.microbatch,
                origin.ordinal,
            )
            for event, origin in zip(self.phase.events, self.origins, strict=True)
        ]


def _blocks(trace: Trace) -> Iterator[tuple[_Origin, ...]]:
    """The origins of the events of every phase."""
    origins: dict[int, _Origin] = {}
    for phase in trace.phases:
        made = 0
        for event in phase.events:
            if isinstance(event, Malloc):
                origins[event.id] = _Origin(phase.kind, phase.layer, phase.microbatch, made)
                made += 1
        yield tuple(origins[event.id] for event in phase.events)


def _check_repetition(templates: Sequence[_Template]) -> None:
    by_name = {(t.phase.kind, t.phase.layer, t.phase.microbatch): t for t in templates}
    for (kind, layer, microbatch), second in by_name.items():
        if layer < 0 or layer % RECORDED_LAYERS != 1:
            continue
        third = by_name.get((kind, layer + 1, microbatch))
        if third is None or second.relative() != third.relative():
            raise TraceError(
                f"{second.phase} and layer {layer + 1} do not make the same requests, so no layer can stand for the "
                "others: record the whole iteration"
            )


def _stretched(run: list[_Template], layers: int) -> Iterator[tuple[_Template, int]]:
    """(template, layer of the full stage) in order of execution; `run`: the layers of one chunk in one pass."""
    if run[0].phase.layer < 0:
        yield from ((template, template.phase.layer) for template in run)
        return
    found = [template.phase.layer % RECORDED_LAYERS for template in run]
    chunk = run[0].phase.layer // RECORDED_LAYERS
    ascending = list(range(RECORDED_LAYERS))
    if found not in (ascending, ascending[::-1]):
        raise TraceError(
            f"the phases {run[0].phase.kind} of chunk {chunk} are those of layers {found}, not {ascending} in one "
            "or the other order: record a schedule that runs a chunk without a break"
        )
    by_layer = {template.phase.layer % RECORDED_LAYERS: template for template in run}
    order = range(layers) if found[0] == 0 else range(layers - 1, -1, -1)
    for layer in order:
        yield by_layer[_recorded(layer, layers)], chunk * layers + layer


def _recorded(layer: int, layers: int) -> int:
    """The recorded layer of a chunk that stands for one of `layers`."""
    if layer >= layers - 2:
        return layer - layers + RECORDED_LAYERS
    return min(layer, 1)


def _instantiate(entries: Sequence[tuple[_Template, int]], layers: int) -> tuple[Phase, ...]:
    """Phases with new ids; a free ends the block of the layer at the recorded distance."""
    ids: dict[_Origin, int] = {}
    phases = []
    for template, layer in entries:
        own = template.phase
        events: list[Malloc | Free] = []
        for event, origin in zip(own.events, template.origins, strict=True):
            here = replace(origin, layer=_target_layer(origin.layer, own.layer, layer, layers))
            if isinstance(event, Malloc):
                ids[here] = len(ids)
                events.append(Malloc(ids[here], event.num_bytes))
            elif here in ids:
                events.append(Free(ids[here]))
            else:
                raise TraceError(f"{own} frees a block of {origin.kind} layer {origin.layer} that does not repeat")
        phases.append(Phase(own.kind, layer, own.microbatch, tuple(events)))
    return tuple(phases)


def _target_layer(origin: int, recorded: int, layer: int, layers: int) -> int:
    """The layer of the full stage that made a block which `recorded` frees, if `recorded` stands for `layer`."""
    if origin < 0:
        return origin
    if recorded >= 0 and origin // RECORDED_LAYERS == recorded // RECORDED_LAYERS:
        return layer + origin - recorded
    chunk, within = divmod(origin, RECORDED_LAYERS)  # other chunks free blocks of its first and last layers alone
    return chunk * layers + (within if within < 2 else within - RECORDED_LAYERS + layers)


def _on_line(first: Trace, second: Trace, lengths: tuple[int, int, int]) -> Trace:
    """The trace at the third length on the lines through the first two."""
    low, high, at = lengths
    _match_structure(first, second)
    sizes: dict[int, int] = {}
    phases = []
    for one, other in zip(first.phases, second.phases, strict=True):
        events: list[Malloc | Free] = []
        for event, later in zip(one.events, other.events, strict=True):
            if isinstance(event, Malloc) and isinstance(later, Malloc):
                grown, rest = divmod((later.num_bytes - event.num_bytes) * (at - low), high - low)
                if rest or event.num_bytes + grown <= 0:
                    raise TraceError(
                        f"{one}: a request has {event.num_bytes} bytes at length {low} and {later.num_bytes} at "
                        f"{high}, on a line that has no whole bytes at {at}: record a length that is nearer"
                    )
                sizes[event.id] = event.num_bytes + grown
                events.append(Malloc(event.id, sizes[event.id]))
            else:
                events.append(Free(event.id))
        phases.append(replace(one, events=tuple(events)))
    return replace(first, phases=tuple(phases))


def _match_structure(one: Trace, other: Trace) -> None:
    """Raises TraceError unless the traces have the same phases with the same order of requests and frees."""
    if _shape(one) == _shape(other):
        return
    for mine, theirs in zip(one.phases, other.phases, strict=False):
        if _shape(replace(one, phases=(mine,))) != _shape(replace(other, phases=(theirs,))):
            raise TraceError(
                f"{mine} asks in another order at another length ({len(mine.events)} and {len(theirs.events)} events): "
                "record lengths that run the same kernels"
            )
    raise TraceError(
        f"the traces have {len(one.phases)} and {len(other.phases)} phases that do not match: record the same run "
        "at different lengths"
    )


def _shape(trace: Trace) -> list[tuple[str, int, int, tuple[tuple[str, int], ...]]]:
    """The structure of a trace: ids are replaced by their order, and sizes are left out."""
    order: dict[int, int] = defaultdict(lambda: len(order))
    return [
        (p.kind, p.layer, p.microbatch, tuple((type(event).__name__, order[event.id]) for event in p.events))
        for p in trace.phases
    ]


def _match(predicted: Trace, found: Trace, length: int) -> None:
    _match_structure(predicted, found)
    for mine, theirs in zip(predicted.phases, found.phases, strict=True):
        for event, real in zip(mine.events, theirs.events, strict=True):
            if isinstance(event, Malloc) and isinstance(real, Malloc) and event.num_bytes != real.num_bytes:
                raise TraceError(
                    f"{mine} at length {length}: a request has {real.num_bytes} bytes, but its line says "
                    f"{event.num_bytes}: memory is not linear in the length here; record the length itself"
                )
