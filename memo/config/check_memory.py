"""Rules about swapping and recomputation."""

from memo.config.check_fields import Condition, check_conditions, check_fields, given
from memo.config.check_layout import piece
from memo.config.derived import (
    resolved_memory_planner,
    resolved_offload_tiles,
    resolved_slot_tiles,
    sequence_step,
)
from memo.config.memory import READ_WHERE_SOMETHING_MOVES, MemoryConfig
from memo.config.parallel import SWEPT_CP_COMM_TYPES
from memo.config.require import either, neighbours, require, require_divides, require_most
from memo.config.run import RunConfig


def _has_masters(memory: MemoryConfig, share: float | None) -> bool:
    most = memory.optimizer_offload_fraction
    return most is None or share is None or share <= most


_MASTERS = (
    "is above {optimizer_offload_fraction}, but only layers whose masters are in host memory can have more there: give "
    "as much or less"
)
_CONDITIONS: tuple[Condition, ...] = (
    (
        lambda c: c.memory.offload_alpha in ("auto", "off") or c.memory.recompute_granularity == "none",
        "{recompute_granularity} conflicts with {offload_alpha}, which decides by itself what is recomputed: use "
        "--offload-alpha off, or --recompute-granularity none",
    ),
    (
        lambda c: not c.memory.sweeps or c.parallel.cp == 1 or c.parallel.cp_comm_type in SWEPT_CP_COMM_TYPES,
        "{cp} with {cp_comm_type} does not run with {offload_granularity}: its rings would pass all keys and values "
        f"round for every tile: use --cp-comm-type {either(SWEPT_CP_COMM_TYPES)}, or --offload-granularity layer",
    ),
    (lambda c: _has_masters(c.memory, c.memory.gradient_offload_fraction), f"{{gradient_offload_fraction}} {_MASTERS}"),
    (lambda c: _has_masters(c.memory, c.memory.weight_offload_fraction), f"{{weight_offload_fraction}} {_MASTERS}"),
)


def check_memory(config: RunConfig) -> None:
    """Raises ConfigError; the layout is known to fit without tiles."""
    memory, device = config.memory, config.hardware.device
    check_conditions(config, _CONDITIONS)
    check_fields(config, "memory")
    # The default planner depends on the device: it is checked once that is known.
    if device != "auto" and resolved_memory_planner(config.memory, device) == "off":
        off = "--memory-planner is off (the default on a CPU)"
        _refuse_unread(config, off, "--memory-planner auto", "memory_planner_min_bytes", "memory_planner_from")
    if memory.swaps:
        _check_tiles(config)
    elif not config.moves:
        use = "--offload-alpha auto, or --offload-states"
        _refuse_unread(config, "nothing moves to host memory", use, *READ_WHERE_SOMETHING_MOVES)


def _refuse_unread(config: RunConfig, why: str, use: str, *names: str) -> None:
    for name in names:
        written = given(config, name)
        require(not written, f"{written} has no use where {why}: give {use}, or leave it out")


def _check_tiles(config: RunConfig) -> None:
    """Tiles are cut from the two zigzag pieces of a cp rank; where layers are swept, each tile has two zigzag pieces of
    its own. tp splits each tile."""
    memory, seq_length, tiles = config.memory, config.data.seq_length, resolved_offload_tiles(config)
    tp, cp = config.parallel.tp, config.parallel.cp
    step = tiles * sequence_step(tp, cp)
    use = f"--seq-length {neighbours(seq_length, step)}, or a smaller --offload-tiles"
    if memory.offload_alpha != "auto" or memory.sweeps:
        require_divides("--seq-length", seq_length, f"{piece(tp, cp)} x --offload-tiles {tiles} = {step}", step, use)
    if memory.sweeps:
        in_slot, most = resolved_slot_tiles(config), config.parallel.layers_per_chunk(config.model.num_layers)
        again = "--recompute-attention-layers"
        require_most(again, memory.recompute_attention_layers, f"the {most} layers of a pipeline chunk", most)
        use = f"--offload-slot-tiles 1, or --offload-tiles {neighbours(tiles, in_slot)}"
        require_divides("--offload-tiles", tiles, f"--offload-slot-tiles {in_slot}", in_slot, use)
