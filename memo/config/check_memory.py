"""Rules about swapping and recomputation."""

from memo.config.derived import (
    layers_per_chunk,
    resolved_memory_planner,
    resolved_offload_tiles,
    resolved_slot_tiles,
    sequence_step,
)
from memo.config.flag_table import changed, dashed
from memo.config.memory import MemoryConfig
from memo.config.parallel import SWEPT_CP_COMM_TYPES
from memo.config.require import neighbours, require
from memo.config.run import RunConfig

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
        isinstance(alpha, str) or 0 <= alpha <= 1,
        f"--offload-alpha is {alpha}, but it is the share of the tokens that moves and must be in [0, 1]: "
        "give 0 to 1, such as 0.5, auto or off",
    )
    require(
        alpha == "auto" or memory.recompute_granularity == "none",
        f"--recompute-granularity {memory.recompute_granularity} fights with --offload-alpha {alpha}, which decides "
        "by itself what is recomputed: use --offload-alpha off, or --recompute-granularity none",
    )
    if alpha != "auto" or memory.sweeps:
        _check_tiles(config)
    _check_sections(config)
    _check_device(config)


def _check_planner(config: RunConfig) -> None:
    memory = config.memory
    require(
        memory.memory_planner_min_bytes >= 1,
        f"--memory-planner-min-bytes is {memory.memory_planner_min_bytes}, but requests have at least 1 byte: "
        "give 1 to plan them all",
    )
    device = config.hardware.device
    if memory.memory_planner is None and device == "auto":  # the default waits until the device is known
        return
    require(
        resolved_memory_planner(config, device) != "off"
        or memory.memory_planner_min_bytes == MemoryConfig.memory_planner_min_bytes,
        f"--memory-planner-min-bytes {memory.memory_planner_min_bytes} fights with --memory-planner off, which ignores "
        "it and is the default on a CPU and for packed documents: use --memory-planner auto, or leave it out",
    )


def _check_disk(config: RunConfig) -> None:
    path, limit_gib = config.memory.offload_nvme_path, config.memory.offload_nvme_gib
    require(path != "", "--offload-nvme-path is empty, but it is a directory: leave it out")
    require(
        limit_gib is None or path is not None,
        f"--offload-nvme-gib {limit_gib} fights with no --offload-nvme-path, without which nothing goes to a disk: "
        "give the directory, or leave it out",
    )


def _check_states(config: RunConfig) -> None:
    memory = config.memory
    optimizer = memory.optimizer_offload_fraction
    for name in ("optimizer_offload_fraction", "gradient_offload_fraction", "weight_offload_fraction"):
        share = getattr(memory, name)
        if share is None:
            continue
        flag = dashed(name)
        require(
            0 <= share <= 1, f"{flag} is {share}, but it is a share of the layers and must be in [0, 1]: give 0.5, say"
        )
        require(
            memory.offload_states in ("optimizer", "all"),
            f"{flag} {share} fights with --offload-states {memory.offload_states}, which ignores it: use "
            "--offload-states optimizer or all, or leave it out",
        )
        require(
            optimizer is None or share <= optimizer,
            f"{flag} {share} is above --optimizer-offload-fraction {optimizer}, but only layers whose masters are in "
            f"host memory can have more there: give {optimizer} or less",
        )
    require(
        memory.offload_weight_copy or memory.offload_states in ("all", "auto"),
        f"--no-offload-weight-copy fights with --offload-states {memory.offload_states}, which streams no weights: use "
        "--offload-states all, or leave it out",
    )


def _check_unread(config: RunConfig) -> None:
    """Refuse settings of swapping that nothing reads: --offload-alpha was probably forgotten."""
    memory = config.memory
    why = f"--recompute-granularity {memory.recompute_granularity}"
    why = "--offload-alpha off" if memory.offload_alpha == "off" else why
    moves_states = memory.offloads_states or config.parallel.shards_gradients
    unread = _OF_SWAPPING if moves_states else (*_OF_SWAPPING, *_OF_ALL_COPIES)
    for name, value in changed(memory).items():
        require(
            name not in unread,
            f"{dashed(name)} {value} fights with {why}, which ignores it: "
            "use --offload-alpha auto without --recompute-granularity, or leave it out",
        )


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
    _check_swept(
        config,
        f"--offload-slot-tiles {in_slot}",
        memory.offload_slot_tiles is None,
        "a slot holds all tiles of a layer",
    )
    _check_swept(config, f"--recompute-attention-layers {again}", again == 0, "attention is never recomputed")
    _check_swept(config, "--offload-hidden-states", not memory.offload_hidden_states, "layers need hidden states whole")
    if not memory.sweeps:
        return
    require(
        again <= most,
        f"--recompute-attention-layers is {again}, but a pipeline chunk has {most} layers: give 0 to {most}",
    )
    require(
        in_slot >= 1 and tiles % in_slot == 0,
        f"--offload-slot-tiles is {in_slot}, but --offload-tiles {tiles} are divided into slots of as many: use "
        f"--offload-slot-tiles 1, or --offload-tiles {neighbours(tiles, max(1, in_slot))}",
    )
    require(
        cp == 1 or kind in SWEPT_CP_COMM_TYPES,
        f"--cp {cp} with --cp-comm-type {kind} does not run with --offload-granularity tile: its rings would pass all "
        f"keys and values round for every tile: use --cp-comm-type {' or '.join(SWEPT_CP_COMM_TYPES)}, or "
        "--offload-granularity layer",
    )


def _check_swept(config: RunConfig, given: str, is_default: bool, of_layers: str) -> None:
    """A setting of layers that are swept is refused where layers are whole, and where it is not known yet."""
    granularity = config.memory.offload_granularity
    what = "which chooses it by itself" if granularity == "auto" else f"under which {of_layers}"
    require(
        config.memory.sweeps or is_default,
        f"{given} fights with --offload-granularity {granularity}, {what}: use --offload-granularity tile, or leave it "
        "out",
    )


def _check_device(config: RunConfig) -> None:
    """With --device auto these rules are asked again once the device is known."""
    backend, device = config.memory.offload_backend, config.hardware.device
    require(
        not (backend == "cuda" and device == "cpu"),
        "--offload-backend cuda cannot run on --device cpu: use --offload-backend auto, virtual or threads, "
        "or --device cuda",
    )
    require(
        not (backend in ("virtual", "threads") and device == "cuda"),
        f"--offload-backend {backend} cannot run on --device cuda: use --offload-backend auto or cuda, or --device cpu",
    )
    require(
        not (config.memory.offload_check_races and device == "cuda"),
        "--offload-check-races cannot run on --device cuda, where copies are not ordered by memo: leave it out, "
        "or use --device cpu",
    )
