"""Bounds of the peak of a step, which a search asks for first, at a twentieth of the cost of the walk.

    at least   states, buffers, batches, what is in flight at the first backward, and the worst moment of that backward
    at most    the same with every message, output and transient that might live then, and all reduced gradients

The walk of memo.estimate.program.step gives the exact peak; tests check that it lies between the two.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from memo.config import RunConfig
from memo.config.derived import layers_per_chunk
from memo.estimate.program.embedding_and_loss import end_sizes
from memo.estimate.program.ledger import Ledger
from memo.estimate.program.passes import EndPasses, LayerPasses, end_passes, layer_passes
from memo.estimate.program.reductions import NORM_CHUNK
from memo.estimate.program.sizes import LayerSizes, layer_sizes
from memo.estimate.program.step import make_lasting
from memo.estimate.program.tiles import kept_groups
from memo.estimate.state_memory import StateBytes, placed_bytes, state_sizes
from memo.estimate.swap_memory import SwapBytes, laid_out_bytes
from memo.spec.buckets import RankUnits, rank_units
from memo.spec.layer_ops import layers_in_flight
from memo.spec.placement import placement_of
from memo.spec.slots import Moved, slot_dims, slot_layout

_NO_SWAP = SwapBytes(0, 0, 0)
_MESSAGES = 5
"""Hidden states that messages, their sender and their receiver hold at most, in addition to what is in flight."""


@dataclass(frozen=True)
class MemoryBounds:
    """Bytes of one rank.

    Attributes:
        swap: rounding buffers, and host memory of the swap plan.
        kept: what layers keep between forward and backward, except the layer that runs; part of `least` and `most`.
        least, most: bounds of all allocated bytes of the device, including states and rounding buffers.
    """

    states: StateBytes
    swap: SwapBytes
    kept: int
    least: int
    most: int


def memory_bounds(
    config: RunConfig, world_size: int, stages: Sequence[int], moved: Moved | None
) -> dict[int, MemoryBounds]:
    """Bounds of `program_memory` by stage; `moved` is what a swap plan moves, None if there is no swap plan."""
    sizes, placement = state_sizes(config, world_size), placement_of(config, world_size)
    slots = None if moved is None else slot_layout(config, moved)
    first = layer_sizes(config, 0, config.hardware.num_threads or 1)
    groups = None if moved is None else kept_groups(moved, slot_dims(config).tiles)
    lasting = Ledger(never=first.never)
    make_lasting(lasting, config, first, sizes.microbatches)
    is_breadth_first = config.parallel.gradient_accumulation_order == "breadth_first"
    ends = end_passes(first, end_sizes(config, first), not is_breadth_first)
    ring = [first] if first.ring == 1 else [first, first._replace(ring_rank=first.ring - 1)]
    layers = [layer_passes(config, place, groups) for place in ring]
    found = {}
    for stage in stages:
        units = rank_units(config, world_size, stage)
        states = placed_bytes(units, placement, sizes)
        swap = _NO_SWAP if slots is None else laid_out_bytes(config, world_size, stage, slots)
        base = states.device + swap.rounding_buffers + lasting.live_bytes
        reduced = _reduced_bytes(first, units, sizes.shards)
        found[stage] = _of_stage(config, sizes.microbatches, stage, layers, ends, states, swap, base, reduced)
    return found


def _of_stage(
    config: RunConfig,
    microbatches: int,
    stage: int,
    layers: list[LayerPasses],
    ends: EndPasses,
    states: StateBytes,
    swap: SwapBytes,
    base: int,
    reduced: int,
) -> MemoryBounds:
    """`layers`: of the places of a ring that may need most; `base`: bytes that live during all of a step."""
    has_loss = stage == config.parallel.pp - 1
    loss, waiting = (ends.loss_backward.peak.num_bytes, ends.of_head_bytes) if has_loss else (0, 0)
    others = [ends.rope, ends.embedding, ends.embedding_backward, *([ends.loss] if has_loss else [])]
    passes = layers_in_flight(config, microbatches, stage)
    least = most = 0
    for layer in layers:
        flights = _flights(config, passes, stage, layer, ends.rope_bytes)
        backwards = [layer.backward.transient_bytes]
        if config.parallel.pp > 1:  # only a gradient that was received is kept alive during the backward
            backwards.append(layer.held_backward.transient_bytes)
        # The loss keeps and overwrites the output of a sweep, which is what the chunk received, so in flight already.
        shared = layer.hidden_bytes if has_loss and layer.in_place and config.parallel.pp > 1 else 0
        at_work = max(layer.hidden_bytes + waiting + min(backwards), loss) - shared
        beside = waiting + (_MESSAGES if config.parallel.pp > 1 else 1) * layer.hidden_bytes
        beside += max(*backwards, layer.forward.transient_bytes, loss, *(each.peak.num_bytes for each in others))
        messages = _certain_messages(config, microbatches, stage, layer.in_place) * layer.hidden_bytes
        least = max(least, base + flights.in_flight + messages + at_work)
        most = max(most, base + beside + max(flights.in_flight_at_most, flights.last + reduced))
    return MemoryBounds(states, swap, flights.kept, least, most)  # the same for all ranks of a ring


def _certain_messages(config: RunConfig, microbatches: int, stage: int, in_place: bool) -> int:
    """Messages that are held for certain beside what is in flight; the gradient of the backward that runs not counted.

    At the first backward these are the last one sent, until the next one on its link, and the input of the next
    forward, which is under way. What a chunk sends that works in place is what it received, and so in flight already.
    On the first stage, where a sweep has nothing in flight, two backwards follow each other at the end, and during the
    first the gradient of the second is under way.
    """
    pp = config.parallel.pp
    sends = stage < pp - 1 and not in_place
    if config.parallel.vpp > 1:
        return int(sends)
    if stage == 0 and in_place and pp > 1:
        return 1 + (microbatches > 1)
    return sends + (stage > 0 and microbatches > pp - stage)


@dataclass(frozen=True)
class _Flights:
    """Bytes that wait for their backward.

    Attributes:
        kept: what all layers in flight but one keep.
        in_flight: everything in flight.
        in_flight_at_most: the same, with hidden states that some chunks do not hold.
        last: what is in flight while the gradients of the last microbatch are reduced.
    """

    kept: int
    in_flight: int
    in_flight_at_most: int
    last: int


def _flights(config: RunConfig, passes: int, stage: int, layer: LayerPasses, rope: int) -> _Flights:
    """`passes`: layers x microbatches in flight."""
    parallel, hidden = config.parallel, layer.hidden_bytes
    pp, vpp = parallel.pp, parallel.vpp
    layers = layers_per_chunk(config)
    count = passes // layers
    kept = layer.kept_bytes + (hidden if layer.keeps_input else 0)
    # Each microbatch in a chunk keeps the chunk's input, which the lowest layer may keep already.
    around = hidden if pp > 1 and not layer.keeps_input else 0
    at_ends = 0
    if stage == 0:  # the model's first chunk receives nothing
        at_ends = _of_chunk(count, pp, vpp, 0) * around
    # While the last microbatch's gradients are reduced, only the chunks of the last group are in flight.
    last = min(count, pp * (vpp - 1) + 1)
    if parallel.gradient_accumulation_order == "breadth_first":
        # The hidden states of all microbatches, or their gradients, wait between two layers; those of the microbatch
        # that runs are counted with its layer.
        last, around, at_ends = count, hidden, hidden
    each = layers * kept + rope + around
    return _Flights((passes - 1) * kept, count * each - at_ends, count * each, last * each)


def _of_chunk(forwards: int, pp: int, vpp: int, chunk: int) -> int:
    """How many of the first `forwards` forwards of interleaved 1F1B run `chunk`; a stage runs pp microbatches through a
    chunk before it goes on to the next one."""
    rounds, rest = divmod(forwards, pp * vpp)
    return rounds * pp + min(max(rest - chunk * pp, 0), pp)


def _reduced_bytes(z: LayerSizes, units: RankUnits, shards: int) -> int:
    """Bytes of everything that is reduced and gathered at the end of a step, all at once."""
    norm = 8 * NORM_CHUNK
    if shards == 1:
        return norm
    sizes = [units.layer.size] * units.layers + [end.size for end in units.ends]
    copies = 0 if z.on_cuda else sum(sizes) * z.wide  # gloo's
    largest = max(units.layer.largest, *(end.largest for end in units.ends)) if units.ends else units.layer.largest
    return norm + sum(sizes) * z.wide // shards + copies + 2 * largest * z.narrow
