"""Rules about swapping and recomputation."""

from memo.config.derived import (
    layers_per_chunk,
    resolved_memory_planner,
    resolved_offload_tiles,
    resolved_slot_tiles,
    sequence_step,
)
from memo.config.flag_table import dashed
from memo.config.parallel import SWEPT_CP_COMM_TYPES
from memo.config.require import neighbours, require
from memo.config.run import RunConfig
from memo.config.unread import require_read, require_with

_OF_SWAPPING = (
    "offload_policy",
    "offload_tiles",
    "offload_granularity",
    "offload_slot_tiles",
    "recompute_attention_layers",
    "offload_hidden_states",
    "layer_profile",
    "offload_nvme_path",
    "offload_nvme_gib",
)
_OF_ALL_COPIES = ("offload_host_memory_gib", "offload_backend", "offload_check_races")
"""Fields that are read both where activations move and where states do."""


def check_memory(config: RunConfig) -> None:
    """Raises ConfigError; numbers are known to be finite, and the layout to fit without tiles."""
    memory = config.memory
    require(
        memory.profile_cache and memory.layer_profile != "",
        "--profile-cache and --layer-profile are paths, but one of them is empty: leave it out",
    )
    _check_planner(config)
    _check_states(config)
    _check_disk(config)
    if not memory.swaps:
        _check_unread(config)
        return
    alpha = memory.offload_alpha
    require(
        alpha == "auto" or memory.recompute_granularity == "none",
        f"--recompute-granularity {memory.recompute_granularity} fights with --offload-alpha {alpha}, which decides "
        "by itself what is recomputed: use --offload-alpha off, or --recompute-granularity none",
    )
    if alpha != "auto" or memory.sweeps:
        _check_tiles(config)
    _check_sections(config)


def _check_planner(config: RunConfig) -> None:
    memory = config.memory
    device = config.hardware.device
    if memory.memory_planner is None and device == "auto":  # the default waits until the device is known
        return
    is_read = resolved_memory_planner(config, device) != "off"
    off = "--memory-planner off (the default on a CPU)"
    require_read(memory, "memory_planner_min_bytes", is_read, off, "--memory-planner auto")


def _check_disk(config: RunConfig) -> None:
    path = config.memory.offload_nvme_path
    require(path != "", "--offload-nvme-path is empty, but it is a directory: leave it out")
    require_with(config.memory, "offload_nvme_gib", path, "--offload-nvme-path", "DIR")


def _check_states(config: RunConfig) -> None:
    memory = config.memory
    optimizer, states = memory.optimizer_offload_fraction, f"--offload-states {memory.offload_states}"
    for name in ("optimizer_offload_fraction", "gradient_offload_fraction", "weight_offload_fraction"):
        share = getattr(memory, name)
        is_read = memory.offload_states in ("optimizer", "all")
        require_read(memory, name, is_read, states, "--offload-states optimizer or all")
        require(
            optimizer is None or share is None or share <= optimizer,
            f"{dashed(name)} {share} is above --optimizer-offload-fraction {optimizer}, but only layers whose "
            f"masters are in host memory can have more there: give {optimizer} or less",
        )
    is_read = memory.offload_states in ("all", "auto")
    require_read(memory, "offload_weight_copy", is_read, states, "--offload-states all")


def _check_unread(config: RunConfig) -> None:
    """Refuse settings of swapping that nothing reads: --offload-alpha was probably forgotten."""
    memory = config.memory
    why = f"--recompute-granularity {memory.recompute_granularity}"
    why = "--offload-alpha off" if memory.offload_alpha == "off" else why
    moves_states = memory.offloads_states or config.parallel.shards_gradients
    unread = _OF_SWAPPING if moves_states else (*_OF_SWAPPING, *_OF_ALL_COPIES)
    for name in unread:
        require_read(memory, name, False, why, "--offload-alpha auto without --recompute-granularity")


def _check_tiles(config: RunConfig) -> None:
    """Tiles are cut from the tokens of a cp rank, which are two zigzag pieces, or where layers are swept are two such
    pieces each; and each tile is split over tp."""
    seq_length, tiles = config.data.seq_length, resolved_offload_tiles(config)
    tp, cp = config.parallel.tp, config.parallel.cp
    step = tiles * sequence_step(tp, cp)
    layout = f"--tp {tp}" if cp == 1 else f"2 x --cp {cp} x --tp {tp}"
    require(
        seq_length % step == 0,
        f"--seq-length {seq_length} does not divide by {layout} x --offload-tiles {tiles} = {step}: use --seq-length "
        f"{neighbours(seq_length, step)}, or a smaller --offload-tiles",
    )


def _check_sections(config: RunConfig) -> None:
    """Settings of layers that are swept, whose slots hold a few tiles."""
    memory, cp, kind = config.memory, config.parallel.cp, config.parallel.cp_comm_type
    tiles, in_slot = resolved_offload_tiles(config), resolved_slot_tiles(config)
    again, most = memory.recompute_attention_layers, layers_per_chunk(config)
    whole = f"--offload-granularity {memory.offload_granularity}"
    for name in ("offload_slot_tiles", "recompute_attention_layers", "offload_hidden_states"):
        require_read(memory, name, memory.sweeps, whole, "--offload-granularity tile")
    if not memory.sweeps:
        return
    require(
        again <= most,
        f"--recompute-attention-layers is {again}, but a pipeline chunk has {most} layers: give 0 to {most}",
    )
    require(
        tiles % in_slot == 0,
        f"--offload-slot-tiles is {in_slot}, but --offload-tiles {tiles} are divided into slots of as many: use "
        f"--offload-slot-tiles 1, or --offload-tiles {neighbours(tiles, in_slot)}",
    )
    require(
        cp == 1 or kind in SWEPT_CP_COMM_TYPES,
        f"--cp {cp} with --cp-comm-type {kind} does not run with --offload-granularity tile: its rings would pass all "
        f"keys and values round for every tile: use --cp-comm-type {' or '.join(SWEPT_CP_COMM_TYPES)}, or "
        "--offload-granularity layer",
    )
