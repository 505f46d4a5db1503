"""Memory of the layers under a swap plan, in closed form: rounding buffers, host records, working set.

    device     num_slots x slot  +  one workspace for qkv if qkv does not move  +  working set of one layer
               where layers are swept  +  keys and values of one layer, and the sums of their gradients; two sections of
               an input if layers recompute attention; three of hidden states if these are in host memory
    records    the moved prefix of a slot, once for each layer (in a sweep, each section) and microbatch that lies in
               host memory; keys and values of layers that have them; for layers that recompute attention the input
               alone; hidden states of each microbatch that is between two layers or waits on this stage
    host       all records; with a disk, the records that are not on the disk, and staging buffers

Sources: memo.spec.slots (layout, to the byte), memo.spec.sweep (keys and values, to the byte), memo.executor.layer
(working set), memo.planner.swap (records).
Known error: none for slots and their host records. If chunks of a stage differ in the number of layers with keys and
values, each chunk counts as the chunk with most. One input too many may be counted if a layer has fewer than three
sections, and on the last stage of interleaved 1F1B with as many microbatches as stages; one hidden state too many if a
layer has one section and the pipeline is interleaved. The working set is an upper bound, and was not measured on GPUs.
"""

from collections.abc import Iterable, Iterator
from math import inf
from typing import NamedTuple

from memo.config import RunConfig
from memo.config.derived import (
    rank_tokens,
    resolved_dtype,
    resolved_offload_tiles,
    resolved_sections,
)
from memo.spec.disk import RecordKind, least_host_bytes, split_records
from memo.spec.hidden_ops import most_hidden_states
from memo.spec.layer_ops import layers_in_flight
from memo.spec.schedule import Pipeline, pipeline_of
from memo.spec.slots import Moved, SlotLayout, slot_layout
from memo.spec.stack import attending_layers, layers_with_attention_again
from memo.spec.sweep import key_value_layout, key_value_records
from memo.units import element_bytes


class SwapBytes(NamedTuple):
    """Bytes of one rank of one stage.

    Attributes:
        host: the least bytes of host memory; with --offload-nvme-path, the disk then holds as much as it can.
        records: bytes of all records, in host memory or on the disk.
    """

    rounding_buffers: int
    host: int
    records: int


NO_SWAP = SwapBytes(0, 0, 0)


def swap_bytes(config: RunConfig, world_size: int, stage: int, moved: Moved) -> SwapBytes:
    """Return the device and host bytes of a rank of `stage`."""
    return laid_out_bytes(config, world_size, stage, slot_layout(config, moved))


def laid_out_bytes(config: RunConfig, world_size: int, stage: int, layout: SlotLayout) -> SwapBytes:
    """Return the device and host bytes of a rank of `stage` for a known layout, which all stages share."""
    passes = layers_in_flight(pipeline_of(config, world_size), config.model.num_layers, stage)
    buffers = layout.buffer_bytes(min(2, passes * resolved_sections(config)))
    if config.memory.sweeps:
        beside = beside_slots(config, world_size, stage)
        buffers += key_value_layout(config).device_bytes
        buffers += (beside.input_sections + beside.hidden_sections) * layout.places["input"].num_bytes
    ((kinds, stays),) = host_records(config, world_size, (stage,), layout)
    records = sum(kind.total_bytes for kind in kinds) + stays
    on_disk = config.memory.offload_nvme_path is not None
    return SwapBytes(buffers, least_host_bytes(kinds) + stays if on_disk else records, records)


def host_records(
    config: RunConfig, world_size: int, stages: Iterable[int], layout: SlotLayout
) -> Iterator[tuple[list[RecordKind], int]]:
    """Yield, for a rank of each stage, the kinds of records that may go to a disk, and the bytes of all other records.

    If layers are swept, the kinds are keys and values, inputs, and slots; otherwise slots alone. Hidden states in host
    memory (--offload-hidden-states) never go to a disk.
    """
    keys, input_bytes = key_value_layout(config) if config.memory.sweeps else None, layout.places["input"].num_bytes
    for count, beside in _in_use(config, world_size, stages):
        kinds = [RecordKind(count, layout.moved_bytes)]
        if keys is not None:
            of_keys = key_value_records(beside.key_records, keys)
            kinds = [of_keys, RecordKind(beside.input_records, input_bytes), *kinds]
        yield kinds, beside.hidden_records * input_bytes


def host_bytes(config: RunConfig, world_size: int, moved: Moved | None, disk_bytes: float = inf) -> list[int]:
    """Return the host bytes of a rank of each stage; `moved` is None if there is no swap plan.

    Args:
        disk_bytes: bytes of one rank's records on the disk of --offload-nvme-path; default: all of them.
    """
    stages = range(config.parallel.pp)
    if moved is None:
        return [0 for _ in stages]
    limit_bytes = 0 if config.memory.offload_nvme_path is None else disk_bytes
    records = host_records(config, world_size, stages, slot_layout(config, moved))
    return [least_host_bytes(kinds, limit_bytes) + stays for kinds, stays in records]


def disk_bytes(config: RunConfig, world_size: int, moved: Moved, rank_host_bytes: list[float]) -> list[int]:
    """Return a rank's disk bytes by stage; `rank_host_bytes`: host memory that its records may take, by stage."""
    records = host_records(config, world_size, range(config.parallel.pp), slot_layout(config, moved))
    found = []
    for (kinds, stays), host in zip(records, rank_host_bytes, strict=True):
        split = split_records(kinds, int(host) - stays)
        found.append(0 if split is None else split.disk_bytes)
    return found


def num_records(config: RunConfig, world_size: int, stage: int) -> int:
    """Return the number of host records in use at once, each of one layer (or section of a layer) and microbatch.

    Each layer and microbatch in flight has a record, except the last one or two, which are still in their slots: two if
    a backward directly follows its forward, else one. Nothing moves if at most two layers are in flight. Layers that
    recompute attention are in flight one at a time; each takes records that later layers have freed.
    """
    return next(_in_use(config, world_size, (stage,)))[0]


class BesideSlots(NamedTuple):
    """Records and sections of swept layers beside their slots; ignored unless layers are swept.

    Attributes:
        key_records: host records of the keys and values of a layer, or of a section where their store slides.
        input_records: host records of sections of inputs of layers that recompute attention.
        hidden_records: host records of sections of hidden states in host memory.
        input_sections, hidden_sections: sections of these inputs and hidden states on the device.
    """

    key_records: int = 0
    input_records: int = 0
    hidden_records: int = 0
    input_sections: int = 0
    hidden_sections: int = 0


NOTHING_BESIDE = BesideSlots()


def beside_slots(config: RunConfig, world_size: int, stage: int) -> BesideSlots:
    """Return the most records and sections that a rank of `stage` has in use at once.

    Keys and values have one slot, and a record holds all sections of a layer; if their store slides, they move in
    sections. All sections of inputs but one have a record, as the input written last is freed first. All sections of
    hidden states have a record, except the section that was just written. On the device, hidden states have two slots
    and one section in which modules work and messages arrive.
    """
    return next(_in_use(config, world_size, (stage,)))[1]


def _in_use(config: RunConfig, world_size: int, stages: Iterable[int]) -> Iterator[tuple[int, BesideSlots]]:
    """Yield (`num_records`, `beside_slots`) for each stage."""
    sections, parallel, num_layers = resolved_sections(config), config.parallel, config.model.num_layers
    pipeline, in_chunk = pipeline_of(config, world_size), parallel.layers_per_chunk(num_layers)
    chunks, again = Pipeline(parallel.pp, parallel.vpp, 1), config.memory.recompute_attention_layers
    have_keys = attending_layers(config.model) - layers_with_attention_again(config)
    hides = config.memory.sweeps and config.memory.offload_hidden_states
    keys_slide = config.memory.sweeps and key_value_layout(config).slides
    for stage in stages:
        in_flight = layers_in_flight(pipeline, num_layers, stage)
        kept = in_flight // in_chunk * (in_chunk - again)  # layers in flight that do not recompute attention
        turns_at_once = _turns_at_once(pipeline, stage)
        moves = sections * (1 if pipeline.breadth_first else in_chunk - again)
        keeps_both = _keeps_both(pipeline, stage, moves)
        of_chunks = (chunks.layers(stage, chunk, num_layers) for chunk in range(parallel.vpp))
        with_keys = in_flight // in_chunk * max(len(have_keys.intersection(layers)) for layers in of_chunks)
        inputs = sections * (in_flight - kept)
        hidden = sections * most_hidden_states(pipeline, stage) if hides else 0
        beside = BesideSlots(
            key_records=_records(sections, with_keys, keeps_both) if keys_slide else max(0, with_keys - turns_at_once),
            input_records=max(0, inputs - 1),
            hidden_records=hidden - 1 if hidden > 2 else 0,
            input_sections=min(2, inputs),
            hidden_sections=min(2, hidden) + 1 if hidden else 0,
        )
        yield _records(sections, kept, keeps_both), beside


def _records(sections: int, layers: int, keeps_both: bool) -> int:
    """Return the records in use while `layers` layers that do not recompute attention are in flight."""
    if not layers:  # layers recompute attention one at a time, so the sections of a single layer count
        return max(0, sections - 2)
    return max(0, sections * layers - (2 if keeps_both or (sections == 1 and layers <= 2) else 1))


def _turns_at_once(pipeline: Pipeline, stage: int) -> bool:
    """Return whether the last forward is followed by its own backward when most layers are in flight."""
    if pipeline.microbatches == 1:
        return True
    is_last = not pipeline.breadth_first and stage == pipeline.stages - 1
    return is_last and (pipeline.chunks == 1 or pipeline.microbatches == pipeline.stages)


def _keeps_both(pipeline: Pipeline, stage: int, moves: int) -> bool:
    """Return whether the content of both slots stays there for the next backwards when most layers are in flight, if
    `moves` layers or sections of each chunk move."""
    if moves > 1 or (pipeline.chunks == 1 and not pipeline.breadth_first):
        return _turns_at_once(pipeline, stage)
    return pipeline.microbatches <= 2 and (pipeline.breadth_first or stage < pipeline.stages - 1)


def working_set_bytes(config: RunConfig) -> int:
    """Return the bytes of a layer's backward in addition to the slots.

    They are the gradients of input, residual and attention's output, and the larger of two sums: dq, dk and dv with
    attention's fp32 sums, or one tile of the MLP with its activations, their gradients and one weight's gradient.
    """
    model, parallel = config.model, config.parallel
    narrow, wide = element_bytes(resolved_dtype(config.training, config.hardware.device))
    tokens = rank_tokens(config)
    q_size, kv_size = model.num_attention_heads * model.head_dim, 2 * model.kv_heads * model.head_dim
    ffn = model.token_ffn_size + model.shared_ffn_size
    fc1 = ffn * (2 if model.gated else 1)
    attention = narrow * (q_size + kv_size) + wide * q_size  # gradients, and the kernel's sums for q
    if parallel.cp > 1:
        attention += 2 * narrow * kv_size + 3 * wide * kv_size  # K/V held and being received, and their gradients
    if model.qk_layernorm:
        attention += narrow * (q_size + kv_size)  # heads after their norm
    tile_tokens = tokens // resolved_offload_tiles(config)
    gathered = 3 * narrow * model.hidden_size  # normed input, its gradient, the output's gradient
    tile = tile_tokens * (gathered + narrow * (2 * fc1 + 3 * ffn) // parallel.tp)
    if model.num_experts:  # hidden states of rows
        tile += tile_tokens * narrow * model.hidden_size * model.moe_router_topk
    tile += narrow * model.hidden_size * model.mlp_size * (2 if model.gated else 1) // parallel.tp
    shared = tokens * narrow * (3 * model.hidden_size + q_size) // parallel.tp
    return shared + max(tokens * attention // parallel.tp, tile)
