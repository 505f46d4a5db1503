"""Memory of the layers under a swap plan, in closed form: rounding buffers, host records, working set.

    device     num_slots x slot  +  one workspace for qkv if none of it moves  +  working set of one layer
               where layers are swept  +  keys and values of one layer, and the sums of their gradients; two sections of
               an input if layers recompute attention; three of hidden states if these are in host memory
    records    the moved prefix of a slot, once for each layer and microbatch that lies in host memory (of a sweep, for
               each section of it), and keys and values of the layers and microbatches that do; of layers that recompute
               attention, their input alone; hidden states once, for as many microbatches as are between two layers, or
               wait on this stage for their turn
    host       all records, or with a disk that holds the others no more than their staging buffers

Sources: memo.spec.slots (layout, to the byte), memo.spec.sweep (keys and values, to the byte), memo.executor.layer
(working set), memo.planner.swap (records).
Known error: none for slots, nor for host records in most schedules. One record too many (of keys and values, those of
one layer) is counted on the last stage of interleaved 1F1B with as many microbatches as stages; and where slots hold
layers, breadth first with 2 microbatches, and interleaved with 2 stages, 2 microbatches and one layer of a chunk that
does not recompute attention. Of inputs one too many may be counted where a layer has fewer than three sections, and of
hidden states where it has one and the pipeline is interleaved. The
working set is an upper bound of what exists at once and was not measured on GPUs.
"""

from dataclasses import dataclass
from math import inf

from memo.config import RunConfig
from memo.config.derived import (
    layers_per_chunk,
    num_microbatches,
    resolved_dtype,
    resolved_offload_tiles,
    resolved_sections,
)
from memo.spec.disk import RecordKind, least_host_bytes, split_records
from memo.spec.hidden_ops import most_hidden_states
from memo.spec.layer_ops import layers_in_flight
from memo.spec.schedule import pipeline_of
from memo.spec.slots import Moved, SlotLayout, slot_layout
from memo.spec.sweep import key_value_layout, key_value_records
from memo.units import DTYPE_BYTES


@dataclass(frozen=True)
class SwapBytes:
    """Bytes of one rank of one stage.

    Attributes:
        host: of host memory at least: with --offload-nvme-path, if the disk holds all that it can.
        records: of all records, wherever they are.
    """

    rounding_buffers: int
    host: int
    records: int


def swap_bytes(config: RunConfig, world_size: int, stage: int, moved: Moved) -> SwapBytes:
    """Device and host bytes of a rank of `stage`."""
    return laid_out_bytes(config, world_size, stage, slot_layout(config, moved))


def laid_out_bytes(config: RunConfig, world_size: int, stage: int, layout: SlotLayout) -> SwapBytes:
    """The same for a layout that is known, which all stages share."""
    passes = layers_in_flight(config, num_microbatches(config, world_size), stage)
    buffers = layout.buffer_bytes(min(2, passes * resolved_sections(config)))
    if config.memory.sweeps:
        input_bytes = layout.places["input"].num_bytes
        buffers += key_value_layout(config).device_bytes
        buffers += num_input_sections(config, world_size, stage) * input_bytes
        buffers += num_hidden_sections(config, world_size, stage) * input_bytes
    kinds = record_kinds(config, world_size, stage, layout)
    stays = staying_bytes(config, world_size, stage, layout)
    records = sum(kind.total_bytes for kind in kinds) + stays
    on_disk = config.memory.offload_nvme_path is not None
    return SwapBytes(buffers, least_host_bytes(kinds) + stays if on_disk else records, records)


def staying_bytes(config: RunConfig, world_size: int, stage: int, layout: SlotLayout) -> int:
    """Host records of a rank of `stage` that never go to a disk: of hidden states, with --offload-hidden-states."""
    return num_hidden_records(config, world_size, stage) * layout.places["input"].num_bytes


def record_kinds(config: RunConfig, world_size: int, stage: int, layout: SlotLayout) -> list[RecordKind]:
    """Host records of a rank of `stage` that may go to a disk: where layers are swept of keys and values and of inputs,
    then all others."""
    others = RecordKind(num_records(config, world_size, stage), layout.moved_bytes)
    if not config.memory.sweeps:
        return [others]
    keys = key_value_records(num_key_records(config, world_size, stage), key_value_layout(config))
    inputs = RecordKind(num_input_records(config, world_size, stage), layout.places["input"].num_bytes)
    return [keys, inputs, others]


def host_bytes(config: RunConfig, world_size: int, moved: Moved | None, disk_bytes: float | None = None) -> list[int]:
    """Host bytes of a rank of each stage; `moved`: None if there is no swap plan.

    Args:
        disk_bytes: what the disk of --offload-nvme-path holds of one rank's records; None: all of them.
    """
    if moved is None:
        return [0] * config.parallel.pp
    layout, limit_bytes = slot_layout(config, moved), inf if disk_bytes is None else disk_bytes
    if config.memory.offload_nvme_path is None:
        limit_bytes = 0
    return [
        least_host_bytes(record_kinds(config, world_size, stage, layout), limit_bytes)
        + staying_bytes(config, world_size, stage, layout)
        for stage in range(config.parallel.pp)
    ]


def disk_bytes(config: RunConfig, world_size: int, moved: Moved, rank_host_bytes: list[float]) -> list[int]:
    """Bytes on the disk of a rank of each stage, whose records may take so much of host memory."""
    layout, found = slot_layout(config, moved), []
    for stage, host in enumerate(rank_host_bytes):
        stays = staying_bytes(config, world_size, stage, layout)
        split = split_records(record_kinds(config, world_size, stage, layout), int(host) - stays)
        found.append(0 if split is None else split.disk_bytes)
    return found


def num_records(config: RunConfig, world_size: int, stage: int) -> int:
    """Number of host records in use at once, each of one layer (or section of it) and microbatch.

    Everything in flight has one, except the last one or two, which are still in their slots: two if a backward directly
    follows its forward, else one. What is never more than two layers does not move. Of layers that recompute attention
    one at a time is in flight, which takes what the layers after it have freed.
    """
    sections = resolved_sections(config)
    in_flight = sections * _kept_in_flight(config, world_size, stage)
    if not in_flight:
        return max(0, sections - 2)
    stays = 2 if _turns_at_once(config, world_size, stage) or (sections == 1 and in_flight <= 2) else 1
    return max(0, in_flight - stays)


def num_key_records(config: RunConfig, world_size: int, stage: int) -> int:
    """The same of keys and values, which have one slot: a record is that of all sections of a layer."""
    return max(0, _kept_in_flight(config, world_size, stage) - _turns_at_once(config, world_size, stage))


def num_input_records(config: RunConfig, world_size: int, stage: int) -> int:
    """The same of the inputs of layers that recompute attention, each of one section."""
    return max(0, _inputs_in_flight(config, world_size, stage) - 1)  # the last one that is written makes room first


def num_input_sections(config: RunConfig, world_size: int, stage: int) -> int:
    """Slots of these on the device."""
    return min(2, _inputs_in_flight(config, world_size, stage))


def num_hidden_records(config: RunConfig, world_size: int, stage: int) -> int:
    """The same of hidden states, each of one section: all sections of them, but the one that has just been written."""
    in_flight = _hidden_in_flight(config, world_size, stage)
    return in_flight - 1 if in_flight > 2 else 0


def num_hidden_sections(config: RunConfig, world_size: int, stage: int) -> int:
    """Sections of hidden states on the device: slots, and the one in which modules work and messages arrive."""
    in_flight = _hidden_in_flight(config, world_size, stage)
    return min(2, in_flight) + 1 if in_flight else 0


def _hidden_in_flight(config: RunConfig, world_size: int, stage: int) -> int:
    """Sections x microbatches of hidden states that are on a stage at once."""
    if not (config.memory.sweeps and config.memory.offload_hidden_states):
        return 0
    return resolved_sections(config) * most_hidden_states(pipeline_of(config, world_size), stage)


def _inputs_in_flight(config: RunConfig, world_size: int, stage: int) -> int:
    """Sections x layers x microbatches in flight whose attention is recomputed."""
    layers = layers_in_flight(config, num_microbatches(config, world_size), stage)
    return resolved_sections(config) * (layers - _kept_in_flight(config, world_size, stage))


def _kept_in_flight(config: RunConfig, world_size: int, stage: int) -> int:
    """Layers x microbatches in flight whose attention is not recomputed."""
    in_flight, in_chunk = (
        layers_in_flight(config, num_microbatches(config, world_size), stage),
        layers_per_chunk(config),
    )
    return in_flight // in_chunk * (in_chunk - config.memory.recompute_attention_layers)


def _turns_at_once(config: RunConfig, world_size: int, stage: int) -> bool:
    """Whether the next backward is that of the last forward, when most is in flight."""
    parallel = config.parallel
    if num_microbatches(config, world_size) == 1:
        return True
    if parallel.gradient_accumulation_order == "breadth_first":
        return False
    return stage == parallel.pp - 1 and parallel.vpp == 1


def working_set_bytes(config: RunConfig) -> int:
    """Bytes of a layer's backward in addition to the slots.

    These are the gradients of input, residual and attention's output, and the larger of two: dq, dk and dv with
    attention's fp32 sums, or one tile of the MLP with its activations, their gradients and one weight's gradient.
    """
    model, parallel = config.model, config.parallel
    narrow = DTYPE_BYTES[resolved_dtype(config, config.hardware.device)]
    wide = max(4, narrow)
    tokens = config.data.seq_length // parallel.cp * config.training.micro_batch_size
    q_size, kv_size = model.num_attention_heads * model.head_dim, 2 * model.kv_heads * model.head_dim
    fc1 = model.ffn_size * (2 if model.gated else 1)
    attention = narrow * (q_size + kv_size) + wide * q_size  # gradients, and the kernel's sums for q
    if parallel.cp > 1:
        attention += 2 * narrow * kv_size + 3 * wide * kv_size  # K/V held and being received, and their gradients
    if model.qk_layernorm:
        attention += narrow * (q_size + kv_size)  # heads after their norm
    tile_tokens = tokens // resolved_offload_tiles(config)
    gathered = 3 * narrow * model.hidden_size  # normed input, its gradient, the output's gradient
    tile = tile_tokens * (gathered + narrow * (2 * fc1 + 3 * model.ffn_size) // parallel.tp)
    tile += narrow * model.hidden_size * fc1 // parallel.tp
    shared = tokens * narrow * (3 * model.hidden_size + q_size) // parallel.tp
    return shared + max(tokens * attention // parallel.tp, tile)
