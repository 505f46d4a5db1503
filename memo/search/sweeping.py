"""Ways to sweep layers along the sequence: in which tiles, in how many layers attention is recomputed, and where hidden
states are."""

from collections.abc import Iterator
from dataclasses import replace

from memo.config import RunConfig
from memo.config.derived import layers_per_chunk, sequence_step
from memo.config.memory import OffloadAlpha
from memo.config.parallel import SWEPT_CP_COMM_TYPES
from memo.estimate.device_memory import worst_device_bytes
from memo.estimate.own_memory import own_bounds
from memo.estimate.rank_memory import node_host_bytes
from memo.search.candidates import SLOT_TILES, SWEPT_TOKENS, Layout, Strategy, config_of
from memo.search.limits import MemoryLimits, limits_of
from memo.search.question import Question
from memo.spec.placement import StatePlacement, with_placement
from memo.spec.slots import Moved
from memo.spec.sweep import Sweep, with_sweep


def sweeps(question: Question, layout: Layout, alpha: OffloadAlpha = "auto") -> Iterator[Strategy]:
    """Strategies of a layout that sweep its layers; none for Megatron-LM's account, which does not know such layers."""
    if question.program != "memo":
        return
    config = config_of(question, layout, Strategy(alpha))
    for sweep in ways_to_sweep(config, question.gpus, limits_of(question)):
        yield Strategy(alpha, tiles=sweep.tiles, again=sweep.again, hidden_on_host=sweep.hidden_on_host)


def ways_to_sweep(
    config: RunConfig, world_size: int, limits: MemoryLimits, before: Sweep | None = None
) -> Iterator[Sweep]:
    """Layers swept in tiles of about SWEPT_TOKENS on a rank; none in rings, or where there are not two slots of them.

    Where host memory may not hold the activations, also with attention recomputed: in as few layers as make
    activations fit alone, in as few as make them fit beside all states, and in all layers. Where the device does not
    hold hidden states, the same with these in host memory.

    Args:
        before: a sweep whose tiles and slots are to be kept, instead of those of about SWEPT_TOKENS.
    """
    if before is not None:
        is_possible = not ring_refusal(config) and config.data.seq_length % (_step(config) * before.tiles) == 0
        whole = Sweep(before.tiles, before.slot_tiles)
    else:
        is_possible = not swept_refusal(config)
        whole = Sweep(_num_tiles(config), SLOT_TILES)
    if not is_possible:
        return
    yield from _with_attention_again(config, world_size, limits, whole)
    if not _fits_on_device(config, world_size, limits, whole):
        yield from _with_attention_again(config, world_size, limits, replace(whole, hidden_on_host=True))


def swept_refusal(config: RunConfig) -> str:
    """Why the layers of a run cannot be swept in tiles of about SWEPT_TOKENS; empty where they can."""
    ring = ring_refusal(config)
    if ring or _num_tiles(config):
        return ring
    cp, tokens = config.parallel.cp, config.data.seq_length
    least = 2 * SLOT_TILES * SWEPT_TOKENS * cp
    return (
        f"--seq-length {tokens} has no two slots of {SLOT_TILES} equal tiles of {SWEPT_TOKENS} tokens on a rank, which "
        f"are {least} tokens in all"
    )


def ring_refusal(config: RunConfig) -> str:
    """Why the exchange of a run does not go with layers that are swept; empty where it does."""
    kind = config.parallel.cp_comm_type
    if config.parallel.cp == 1 or kind in SWEPT_CP_COMM_TYPES:
        return ""
    return f"--cp-comm-type {kind} would pass all keys and values round for every tile"


def _num_tiles(config: RunConfig) -> int:
    """Of about SWEPT_TOKENS, or more where the sequence does not divide otherwise; 0 where there are not two slots."""
    tokens, step = config.data.seq_length, _step(config) * SLOT_TILES
    most = tokens // (config.parallel.cp * SLOT_TILES * SWEPT_TOKENS)
    return SLOT_TILES * next((count for count in range(most, 1, -1) if tokens % (step * count) == 0), 0)


def _step(config: RunConfig) -> int:
    """Of how many tokens a tile is a multiple."""
    return sequence_step(config.parallel.tp, config.parallel.cp)


def _with_attention_again(config: RunConfig, world_size: int, limits: MemoryLimits, whole: Sweep) -> Iterator[Sweep]:
    yield whole
    per_stage = config.model.num_layers // config.parallel.pp
    everything = with_placement(config, StatePlacement(per_stage, per_stage, per_stage, per_stage))
    beside_all = _fewest_again(everything, world_size, limits, whole)
    if beside_all:
        alone = _fewest_again(config, world_size, limits, whole)
        fewest = {alone, beside_all, per_stage // config.parallel.vpp}
        yield from (replace(whole, again=again) for again in sorted(fewest - {0}))


def _fits_on_device(config: RunConfig, world_size: int, limits: MemoryLimits, sweep: Sweep) -> bool:
    """Whether a device may hold what a run takes at least, its states included."""
    swept = with_sweep(config, sweep)
    if config.hardware.device != "cuda":
        return worst_device_bytes(swept, world_size) <= limits.device_bytes
    bounds = own_bounds(swept, world_size, moved={})
    return max(bound.least.total for bound in bounds.values()) <= limits.device_bytes


def _fewest_again(config: RunConfig, world_size: int, limits: MemoryLimits, whole: Sweep) -> int:
    """The fewest layers of a chunk that must recompute attention for a node's host memory; all, if that is too few."""
    alpha = config.memory.offload_alpha
    moved: Moved = {} if isinstance(alpha, str) else alpha
    low, high = 0, layers_per_chunk(config)
    while low < high:
        middle = (low + high) // 2
        swept = with_sweep(config, replace(whole, again=middle))
        needed_bytes = node_host_bytes(swept, world_size, limits.local_ranks, moved, limits.disk_bytes_of_node)
        if needed_bytes <= limits.host_bytes:
            high = middle
        else:
            low = middle + 1
    return low
