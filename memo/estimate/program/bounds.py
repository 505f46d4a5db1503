"""Between which bytes the peak of a step lies: what a search asks first, at a twentieth of the walk's cost.

    at least   states, buffers, batches, what is in flight at the first backward, and the worst moment of that backward
    at most    the same with every message, output and transient that might live beside it, and all reduced gradients

Both follow memo.estimate.program.step, whose walk tells the peak to the byte; the tests hold it between the two.
"""

from dataclasses import dataclass, replace

from memo.config import RunConfig
from memo.config.derived import num_microbatches, resolved_offload_tiles
from memo.estimate.program.embedding_and_loss import (
    end_sizes,
)
from memo.estimate.program.ledger import Ledger
from memo.estimate.program.passes import LayerPasses, Pass, end_passes, layer_passes
from memo.estimate.program.reductions import NORM_CHUNK
from memo.estimate.program.sizes import LayerSizes, layer_sizes
from memo.estimate.program.step import make_lasting
from memo.estimate.program.tiles import slot_of
from memo.estimate.state_memory import StateBytes, placed_bytes, state_sizes
from memo.estimate.swap_memory import swap_bytes
from memo.spec.buckets import RankUnits, rank_units
from memo.spec.layer_ops import layers_in_flight
from memo.spec.placement import placement_of
from memo.spec.slots import Moved

_MESSAGES = 5
"""Hidden states at most that messages, and who sends and receives them, hold beside what is in flight."""


@dataclass(frozen=True)
class MemoryBounds:
    """Bytes of one rank.

    Attributes:
        kept: part of both: what layers keep between forward and backward, but for the one at work.
        least, most: all of the device, states and buffers with it.
    """

    states: StateBytes
    rounding_buffers: int
    kept: int
    least: int
    most: int


def memory_bounds(config: RunConfig, world_size: int, stage: int, moved: Moved | None) -> MemoryBounds:
    """`moved`: what a swap plan moves; None: none runs. Else as of memo.estimate.program.memory.program_memory."""
    units, sizes = rank_units(config, world_size, stage), state_sizes(config, world_size)
    states = placed_bytes(units, placement_of(config, world_size), sizes)
    buffers = 0 if moved is None else swap_bytes(config, world_size, stage, moved).rounding_buffers
    first = layer_sizes(config, 0, config.hardware.num_threads or 1)
    slot = None if moved is None else slot_of(moved, resolved_offload_tiles(config))
    lasting = Ledger(never=first.never)
    make_lasting(lasting, config, first, num_microbatches(config, world_size))
    base = states.device + buffers + lasting.live_bytes
    is_breadth_first = config.parallel.gradient_accumulation_order == "breadth_first"
    ends = end_passes(first, end_sizes(config, first), not is_breadth_first)
    has_loss = stage == config.parallel.pp - 1
    loss, waiting = (_end_bytes(ends.loss_backward), ends.of_head_bytes) if has_loss else (0, 0)
    others = max(map(_end_bytes, (ends.rope, ends.embedding, ends.embedding_backward)))
    if has_loss:
        others = max(others, _end_bytes(ends.loss))
    least = most = 0
    for ring_rank in {0, first.ring - 1}:
        layer = layer_passes(config, replace(first, ring_rank=ring_rank), slot)
        flights = _flights(config, world_size, stage, layer, ends.rope_bytes)
        backwards = [layer.backward.transient_bytes]
        if config.parallel.pp > 1:  # only a message's gradient is held
            backwards.append(layer.held_backward.transient_bytes)
        at_work = max(layer.hidden_bytes + waiting + min(backwards), loss)
        messages = _MESSAGES if config.parallel.pp > 1 else 1
        beside = waiting + messages * layer.hidden_bytes
        beside += max(*backwards, layer.forward.transient_bytes, loss, others)
        reduced = _reduced_bytes(first, units, sizes.shards)
        least = max(least, base + flights.in_flight + at_work)
        most = max(most, base + beside + max(flights.in_flight_at_most, flights.last + reduced))
    return MemoryBounds(states, buffers, flights.kept, least, most)  # the same for all ranks of a ring


def _end_bytes(recorded: Pass) -> int:
    """All of its own at its worst moment."""
    return recorded.peak.num_bytes


@dataclass(frozen=True)
class _Flights:
    """Bytes of what waits for its backward: of all layers but one, of all, with messages, and of the last ones."""

    kept: int
    in_flight: int
    in_flight_at_most: int
    last: int


def _flights(config: RunConfig, world_size: int, stage: int, layer: LayerPasses, rope: int) -> _Flights:
    parallel, hidden = config.parallel, layer.hidden_bytes
    pp, vpp = parallel.pp, parallel.vpp
    layers = config.model.num_layers // (pp * vpp)
    passes = layers_in_flight(config, num_microbatches(config, world_size), stage)
    count = passes // layers
    kept = layer.kept_bytes + (hidden if layer.keeps_input else 0)
    # Each keeps what entered, of which the lowest layer may be the keeper, and its output.
    around = ((0 if layer.keeps_input else 1) + 1) * hidden if pp > 1 else 0
    at_ends = 0
    if pp > 1 and stage == 0 and not layer.keeps_input:  # nothing enters the model's first chunk
        at_ends += _of_chunk(count, pp, vpp, 0) * hidden
    if pp > 1 and stage == pp - 1:  # and nothing leaves its last one
        at_ends += _of_chunk(count, pp, vpp, vpp - 1) * hidden
    # While the last microbatch's gradients are reduced, only the chunks of the last group are in flight.
    last = min(count, pp * (vpp - 1) + 1)
    if parallel.gradient_accumulation_order == "breadth_first":
        # Between two layers wait all hidden states, or their gradients; the one at work is counted with its layer.
        last, around, at_ends = count, hidden, hidden
    each = layers * kept + rope + around
    return _Flights((passes - 1) * kept, count * each - at_ends, count * each, last * each)


def _of_chunk(forwards: int, pp: int, vpp: int, chunk: int) -> int:
    """How many of the first forwards of interleaved 1F1B are of a chunk: its stages take turns of pp microbatches."""
    rounds, rest = divmod(forwards, pp * vpp)
    return rounds * pp + min(max(rest - chunk * pp, 0), pp)


def _reduced_bytes(z: LayerSizes, units: RankUnits, shards: int) -> int:
    """Of everything that is reduced and gathered at the end of a step, with the largest piece that is at work."""
    norm = 8 * NORM_CHUNK
    if shards == 1:
        return norm
    sizes = [units.layer.size] * units.layers + [end.size for end in units.ends]
    copies = 0 if z.on_cuda else sum(sizes) * z.wide  # gloo's
    largest = max(units.layer.largest, *(end.largest for end in units.ends)) if units.ends else units.layer.largest
    return norm + sum(sizes) * z.wide // shards + copies + 2 * largest * z.narrow
