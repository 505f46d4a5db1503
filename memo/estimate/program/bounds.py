"""Bounds of the peak of a step, which a search asks for first, at a twentieth of the cost of the walk.

    at least   states, buffers, batches, what is in flight at the first backward, and the worst moment of that backward
    at most    the same with every message, output and transient that might live then, and with reduced gradients

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
from memo.estimate.program.tiles import kept_values
from memo.estimate.state_memory import StateBytes, placed_bytes, state_sizes
from memo.estimate.swap_memory import SwapBytes, laid_out_bytes
from memo.spec.buckets import RankUnits, rank_units
from memo.spec.layer_ops import layers_in_flight
from memo.spec.placement import placement_of
from memo.spec.slots import Moved, slot_layout
from memo.spec.stack import kinds_of_stage, runs_of_kinds

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
    swap = dict.fromkeys(stages, _NO_SWAP)
    if moved is not None:
        slots = slot_layout(config, moved)
        swap = {stage: laid_out_bytes(config, world_size, stage, slots) for stage in stages}
    sizes, placement = state_sizes(config, world_size), placement_of(config, world_size)
    runs = runs_of_kinds(config)
    of_runs = [layer_sizes(run, 0, config.hardware.num_threads or 1) for run in runs]
    kinds, first = [_of_kind(run, z, moved) for run, z in zip(runs, of_runs, strict=True)], of_runs[0]
    lasting = Ledger(never=first.never)
    make_lasting(lasting, config, first, sizes.microbatches)
    is_breadth_first = config.parallel.gradient_accumulation_order == "breadth_first"
    ends = end_passes(first, end_sizes(config, first), not is_breadth_first)
    found = {}
    for stage in stages:
        units = rank_units(config, world_size, stage)
        states = placed_bytes(units, placement, sizes)
        base = states.device + swap[stage].rounding_buffers + lasting.live_bytes
        end = _end_of_step(first, units, sizes.shards, has_head=stage == config.parallel.pp - 1)
        here = kinds_of_stage(config.model, config.parallel.pp, config.parallel.vpp, stage)
        layers = [kinds[place] for place in set(here)]
        by_kept = sorted((of_ring[0] for of_ring in layers), key=lambda layer: layer.between.num_bytes)
        fewest, flights = (
            _flights(config, sizes.microbatches, stage, layer, ends.rope_bytes) for layer in (by_kept[0], by_kept[-1])
        )
        # The first backward is that of the last layer, when all others wait.
        least = max(_least(config, sizes.microbatches, stage, layer, ends, fewest) for layer in kinds[here[-1]])
        most = max(_most(config, stage, layer, ends, flights, end) for of_ring in layers for layer in of_ring)
        found[stage] = MemoryBounds(states, swap[stage], flights.kept, base + least, base + most)
    return found


def _of_kind(config: RunConfig, first: LayerSizes, moved: Moved | None) -> list[LayerPasses]:
    """Of layers that are all alike, on the ranks of a ring that may need most, of which this is the first."""
    ring = [first] if first.ring == 1 else [first, first._replace(ring_rank=first.ring - 1)]
    groups = None if moved is None else kept_values(config, moved)
    return [layer_passes(config, place, groups) for place in ring]


def _least(
    config: RunConfig, microbatches: int, stage: int, layer: LayerPasses, ends: EndPasses, flights: "_Flights"
) -> int:
    """What lives for certain at the worst moment of the first backward."""
    pp, has_loss = config.parallel.pp, stage == config.parallel.pp - 1
    loss, waiting = (ends.loss_backward.peak.num_bytes, ends.of_head_bytes) if has_loss else (0, 0)
    # The loss keeps and overwrites the output of a sweep, which is what the chunk received, so in flight already.
    shared = layer.hidden_bytes if has_loss and layer.in_place and pp > 1 else 0
    at_work = max(layer.hidden_bytes + waiting + layer.backward.transient_bytes, loss) - shared
    messages = _certain_messages(config, microbatches, stage, layer.in_place) * layer.hidden_bytes
    return flights.in_flight + messages + at_work


def _most(
    config: RunConfig, stage: int, layer: LayerPasses, ends: EndPasses, flights: "_Flights", end: "_EndOfStep"
) -> int:
    """What may live at once: beside what is in flight the largest pass that runs then, and messages.

    The gradients of the last microbatch are reduced as the layers of its chunks leave, from the last chunk on. Both
    go on evenly, so most lives when the first or the last of its chunks begins, or ends. The loss precedes them.
    """
    parallel = config.parallel
    pp, vpp, has_loss = parallel.pp, parallel.vpp, stage == parallel.pp - 1
    of_loss = max(ends.loss.peak.num_bytes, ends.loss_backward.peak.num_bytes) if has_loss else 0
    of_layers = [layer.forward.transient_bytes, layer.backward.transient_bytes, ends.rope.peak.num_bytes]
    of_embedding = max(ends.embedding.peak.num_bytes, ends.held_embedding_backward.peak.num_bytes) if stage == 0 else 0
    each, around, at_once = flights.each, flights.around, flights.at_once
    begins, leaves = [flights.count * each], [(flights.count - at_once) * each + at_once * around]
    for chunk in {0, vpp - 1}:
        others, reduced = pp * chunk * each, end.head + (vpp - 1 - chunk) * flights.layers * end.layer
        begins.append(others + at_once * each + reduced)
        leaves.append(others + at_once * around + reduced + flights.layers * end.layer)
    # A layer's reduced gradients are there before its last tensors have left.
    beside = end.layer + (ends.of_head_bytes if has_loss else 0) + (_MESSAGES if pp > 1 else 1) * layer.hidden_bytes
    working = max(
        flights.count * each + of_loss,
        max(*begins, *leaves) + max(of_layers),
        max(leaves) + max(of_embedding, end.embedding),
    )
    return end.beside + max(beside + working, end.weights)


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
    """What waits for its backward: `count` microbatches, each in a chunk of so many `layers`, and their bytes.

    Attributes:
        kept: what all layers in flight but one keep.
        in_flight: everything in flight.
        each: of one microbatch in one chunk at most, as some chunks hold no hidden states.
        around: the same without what its layers keep.
        at_once: microbatches that enter and leave a chunk's layers together.
    """

    count: int
    layers: int
    kept: int
    in_flight: int
    each: int
    around: int
    at_once: int


def _flights(config: RunConfig, microbatches: int, stage: int, layer: LayerPasses, rope: int) -> _Flights:
    parallel, hidden = config.parallel, layer.hidden_bytes
    pp, vpp = parallel.pp, parallel.vpp
    passes, layers, at_once = layers_in_flight(config, microbatches, stage), layers_per_chunk(config), 1
    count = passes // layers
    kept = layer.between.num_bytes
    # Each microbatch in a chunk keeps the chunk's input, which the lowest layer may keep already.
    around = hidden if pp > 1 and not layer.keeps_input else 0
    at_ends = 0
    if stage == 0:  # the model's first chunk receives nothing
        at_ends = _of_chunk(count, pp, vpp, 0) * around
    if parallel.gradient_accumulation_order == "breadth_first":
        # The hidden states of all microbatches, or their gradients, wait between two layers; those of the microbatch
        # that runs are counted with its layer.
        at_once, around, at_ends = count, hidden, hidden
    each = layers * kept + rope + around
    return _Flights(count, layers, (passes - 1) * kept, count * each - at_ends, each, rope + around, at_once)


def _of_chunk(forwards: int, pp: int, vpp: int, chunk: int) -> int:
    """How many of the first `forwards` forwards of interleaved 1F1B run `chunk`; a stage runs pp microbatches through a
    chunk before it goes on to the next one."""
    rounds, rest = divmod(forwards, pp * vpp)
    return rounds * pp + min(max(rest - chunk * pp, 0), pp)


@dataclass(frozen=True)
class _EndOfStep:
    """Bytes of what ends a step.

    Attributes:
        head, layer, embedding: reduced gradients, in the order in which they are there; those of one layer.
        beside: what reductions take beside them, and the norm.
        weights: what is gathered and sent at the very end, when nothing is in flight.
    """

    head: int
    layer: int
    embedding: int
    beside: int
    weights: int


def _end_of_step(z: LayerSizes, units: RankUnits, shards: int, *, has_head: bool) -> _EndOfStep:
    norm = 8 * NORM_CHUNK
    if shards == 1:
        return _EndOfStep(0, 0, 0, norm, 0)
    sizes = [end.size * z.wide for end in units.ends]
    head = sizes[-1] if has_head and sizes else 0
    layer, embedding = units.layer.size * z.wide, sum(sizes) - head
    copies = 0 if z.on_cuda else len(units.layers) * layer + embedding + head  # gloo's
    largest = max(units.layer.largest, *(end.largest for end in units.ends)) if units.ends else units.layer.largest
    reduced = (head // shards, layer // shards, embedding // shards)
    return _EndOfStep(*reduced, norm + copies, 2 * largest * z.narrow)
