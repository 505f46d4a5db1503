"""Ways to sweep layers along the sequence: the size of tiles, the layers that recompute attention, and the place of
hidden states."""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import replace

from memo.config import RunConfig
from memo.config.derived import SLOT_TILES, SWEPT_TOKENS, sequence_step, swept_tiles
from memo.config.memory import OffloadAlpha
from memo.config.parallel import SWEPT_CP_COMM_TYPES
from memo.estimate.accounts import Account
from memo.estimate.memory_account import worst_device_bytes
from memo.estimate.node_memory import node_host_bytes
from memo.estimate.verdict import MemoryLimits
from memo.search.candidates import Layout, Strategy, config_of
from memo.search.question import Question
from memo.spec.placement import StatePlacement, with_placement
from memo.spec.shapes import shape_of
from memo.spec.slots import Moved
from memo.spec.sweep import Sweep, with_sweep


def sweeps(
    question: Question, layout: Layout, alpha: OffloadAlpha = "auto", sizes: Sequence[int] | None = None
) -> Iterator[Strategy]:
    """Yield the strategies of a layout that sweep its layers; `sizes` as in `ways_to_sweep`."""
    config = config_of(question, layout, Strategy(alpha))
    for sweep in ways_to_sweep(config, question.gpus, question.limits, sizes):
        yield Strategy(alpha, sweep=sweep)


def tile_sizes(config: RunConfig) -> list[int]:
    """Tokens of a rank in the tiles that are tried, largest first: SWEPT_TOKENS, and for experts, which take few rows
    of a small tile each, also an eighth of the sequence, which is the most."""
    largest = config.data.seq_length // (config.parallel.cp * 2 * SLOT_TILES)
    return sorted({*SWEPT_TOKENS, *([largest] if config.model.num_experts else [])}, reverse=True)


def ways_to_sweep(
    config: RunConfig,
    world_size: int,
    limits: MemoryLimits,
    sizes: Sequence[int] | None = None,
    before: Sweep | None = None,
) -> Iterator[Sweep]:
    """Yield ways to sweep layers, in tiles of about `sizes` tokens on a rank.

    There are none for rings, or if the sequence does not fill two slots of tiles. If host memory may not hold the
    activations, some ways recompute attention: in the fewest layers with which activations alone fit, in the fewest
    with which they fit beside all states, and in all layers. If the device does not hold hidden states, these ways are
    also yielded with hidden states in host memory. All ways are found for the smallest tiles, and each is then yielded
    in all `sizes`, in their order.

    Args:
        sizes: tokens of a tile; default: `tile_sizes`.
        before: a sweep whose tiles and slots are kept; `sizes` is then ignored.
    """
    if before is not None:
        step = sequence_step(config.parallel.tp, config.parallel.cp) * before.tiles
        is_possible = not ring_refusal(config) and config.data.seq_length % step == 0
        counts, in_slot = [before.tiles], before.slot_tiles
    else:
        is_possible, in_slot = not swept_refusal(config), SLOT_TILES
        counts = list(dict.fromkeys(swept_tiles(config, size, in_slot) for size in sizes or tile_sizes(config)))
    if not is_possible:
        return
    for way in _ways(config, world_size, limits, Sweep(max(counts), in_slot)):
        yield from (replace(way, tiles=count) for count in counts if count)


def _ways(config: RunConfig, world_size: int, limits: MemoryLimits, whole: Sweep) -> Iterator[Sweep]:
    yield from _with_attention_again(config, world_size, limits, whole)
    if not _fits_on_device(config, world_size, limits, whole):
        yield from _with_attention_again(config, world_size, limits, replace(whole, hidden_on_host=True))


def swept_refusal(config: RunConfig) -> str:
    """Return why the layers of a run cannot be swept in tiles of SWEPT_TOKENS; empty if they can."""
    ring, least = ring_refusal(config), min(SWEPT_TOKENS)
    if ring or swept_tiles(config, least, SLOT_TILES):
        return ring
    cp, tokens = config.parallel.cp, config.data.seq_length
    return (
        f"--seq-length {tokens} has no two slots of {SLOT_TILES} equal tiles of {least} tokens on a rank, which "
        f"are {2 * SLOT_TILES * least * cp} tokens in all"
    )


def ring_refusal(config: RunConfig) -> str:
    """Return why the exchange of attention under cp excludes swept layers; empty if it does not."""
    kind = config.parallel.cp_comm_type
    if config.parallel.cp == 1 or kind in SWEPT_CP_COMM_TYPES:
        return ""
    return f"--cp-comm-type {kind} would pass all keys and values round for every tile"


def _with_attention_again(config: RunConfig, world_size: int, limits: MemoryLimits, whole: Sweep) -> Iterator[Sweep]:
    yield whole
    per_stage = config.model.num_layers // config.parallel.pp
    everything = with_placement(config, StatePlacement(per_stage, per_stage, per_stage, per_stage))
    beside_all = _fewest_again(everything, world_size, limits, whole)
    if beside_all:
        alone = _fewest_again(config, world_size, limits, whole)
        fewest = {alone, beside_all, per_stage // config.parallel.vpp}
        yield from (replace(whole, recompute_attention_layers=again) for again in sorted(fewest - {0}))


def _fits_on_device(config: RunConfig, world_size: int, limits: MemoryLimits, sweep: Sweep) -> bool:
    """Return whether a device holds the least memory of a run, states included."""
    swept = with_sweep(config, sweep)
    if config.hardware.device != "cuda":
        return worst_device_bytes(swept, world_size) <= limits.device_bytes
    account = Account("memo", shape_of(swept.model, "", swept.data.seq_length), world_size, links=limits.links)
    return account.worst(swept, {}).total <= limits.device_bytes


def _fewest_again(config: RunConfig, world_size: int, limits: MemoryLimits, whole: Sweep) -> int:
    """Return the fewest layers of a chunk that must recompute attention to fit in host memory, or all layers."""
    alpha = config.memory.offload_alpha
    moved: Moved = {} if isinstance(alpha, str) else alpha

    def is_enough(again: int) -> bool:
        swept = with_sweep(config, replace(whole, recompute_attention_layers=again))
        needed_bytes = node_host_bytes(swept, world_size, limits.local_ranks, moved, limits.disk_bytes)
        return needed_bytes <= limits.host_bytes

    return bisect_left(range(config.parallel.layers_per_chunk(config.model.num_layers)), True, key=is_enough)
