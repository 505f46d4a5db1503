"""Wraps the layers of a model: for the executor, with or without a swap plan, and then for streamed weights."""

from collections.abc import Container, Sequence

import torch
from torch.distributed import ProcessGroup

from memo.config import RunConfig
from memo.config.derived import (
    rank_length,
    resident_tiles,
    resolved_offload_tiles,
    resolved_sections,
    stays_under_autograd,
)
from memo.executor.coded_weights import CodedWeights
from memo.executor.custom_layer import SweptCustomLayer, TokenwiseCustomLayer
from memo.executor.layer import TokenwiseLayer
from memo.executor.pieces import GradientSink
from memo.executor.resident import DeviceMemory, ResidentCustomLayer, ResidentLayer
from memo.executor.runtime import ScratchMemory, SwapRuntime, SweepRuntime, scratch_memory
from memo.executor.states import StateStreamer
from memo.executor.streamed import LayerStates, StreamedLayer
from memo.executor.streams import StreamBackend
from memo.executor.sweep import SweptLayer
from memo.executor.tile_machine import Tile, make_tiles
from memo.mesh import Mesh
from memo.model.custom import CustomLayer
from memo.model.layer import TransformerLayer
from memo.model.transformer import TransformerChunk
from memo.parallel.data import ShardedDataParallel
from memo.parallel.hidden import Hidden, HiddenOnDevice, Section
from memo.planner.state_plan import placed_state_plan
from memo.program.kinds import kind_of
from memo.spec.layer_ops import LayerOp
from memo.spec.placement import StatePlacement
from memo.spec.slots import Moved, own_layout, resident, slot_dims, slot_layout
from memo.spec.stack import layers_with_attention_again, stack_of
from memo.spec.sweep import key_value_layout


def put_on_tiles(
    config: RunConfig,
    mesh: Mesh,
    chunks: Sequence[TransformerChunk],
    memory: SwapRuntime | ScratchMemory,
    sink: GradientSink,
) -> None:
    """Replace every plain layer by a layer that works on tiles of tokens in `memory`."""
    hidden, again = None, layers_with_attention_again(config)
    if config.memory.sweeps:
        of_host = memory.hidden if isinstance(memory, SweepRuntime) else None
        hidden = HiddenOnDevice(hidden_sections(config)) if of_host is None else of_host
    for chunk in chunks:
        chunk.has_rope_by_rows = config.memory.sweeps
        for end in (chunk.embedding, chunk.head):
            if end is not None:
                end.hidden = hidden
        for position, layer in enumerate(chunk.layers):
            index = chunk.layer_indices[position]
            assert isinstance(layer, TransformerLayer | CustomLayer)
            chunk.layers[position] = on_tiles(config, layer, index, memory, sink, mesh.tp, index in again, hidden)


def keep_on_device(
    config: RunConfig, mesh: Mesh, chunks: Sequence[TransformerChunk], sink: GradientSink, device: torch.device
) -> None:
    """Replace every layer by one that runs without a swap plan, plain or under --recompute-granularity, except layers
    that stay under autograd."""
    if stays_under_autograd(config):
        return
    for chunk in chunks:
        for position, layer in enumerate(chunk.layers):
            assert isinstance(layer, TransformerLayer | CustomLayer)
            chunk.layers[position] = on_device(config, layer, chunk.layer_indices[position], sink, mesh.tp, device)


def on_device(
    config: RunConfig,
    layer: TransformerLayer | CustomLayer,
    index: int,
    sink: GradientSink,
    tp_group: ProcessGroup | None,
    device: torch.device,
) -> ResidentLayer:
    """Wrap one layer to run without a swap plan."""
    model = stack_of(config.model)[index]
    tiles = make_tiles(rank_length(config), config.parallel.tp, resident_tiles(config))
    of = resident(config, model)
    wrap = ResidentCustomLayer if isinstance(layer, CustomLayer) else ResidentLayer
    return wrap(layer, kind_of(model), index, tiles, of.layout, DeviceMemory(of, device), sink, tp_group)


def on_tiles(
    config: RunConfig,
    layer: TransformerLayer | CustomLayer,
    index: int,
    memory: SwapRuntime | ScratchMemory,
    sink: GradientSink,
    tp_group: ProcessGroup | None,
    recomputes_attention: bool = False,
    hidden: Hidden | None = None,
) -> TokenwiseLayer | SweptLayer:
    """Wrap one layer; under --offload-granularity tile it is swept along the sequence, and may recompute attention.

    `hidden`: holds the hidden states of a swept layer; None: they are on the device.
    """
    (sections, tiles), model = _cuts(config), stack_of(config.model)[index]
    kind, layout = kind_of(model), own_layout(model, slot_dims(config), memory.layout)
    is_custom, how = isinstance(layer, CustomLayer), (layer, kind, index, tiles, layout, memory, sink, tp_group)
    if not config.memory.sweeps:
        return (TokenwiseCustomLayer if is_custom else TokenwiseLayer)(*how)
    assert isinstance(memory, SweepRuntime | ScratchMemory)
    hidden = HiddenOnDevice(hidden_sections(config)) if hidden is None else hidden
    swept = SweptCustomLayer if is_custom else SweptLayer
    return swept(*how, sections=sections, hidden=hidden, recomputes_attention=recomputes_attention)


def hidden_sections(config: RunConfig) -> list[Section]:
    """The sections of a rank's hidden states [n, b, h]."""
    sections, tiles = _cuts(config)
    return [Section(section.index, section.shard, [tile.shard for tile in tiles]) for section in sections]


def _cuts(config: RunConfig) -> tuple[list[Tile], list[Tile]]:
    """The sections of the sequence, and the tiles of one section."""
    tp, sections = config.parallel.tp, resolved_sections(config)
    tokens = rank_length(config)
    tiles = make_tiles(tokens // sections, tp, resolved_offload_tiles(config) // sections)
    return make_tiles(tokens, tp, sections), tiles


def scratch_for(config: RunConfig, moved: Moved, device: torch.device) -> ScratchMemory:
    """Memory of one layer without a plan; `moved`: see memo.spec.slots."""
    keys = key_value_layout(config) if config.memory.sweeps else None
    return scratch_memory(slot_layout(config, moved), device, keys)


def decode_weights(chunks: Sequence[TransformerChunk], data_parallel: ShardedDataParallel) -> CodedWeights | None:
    """Wrap every layer with quantized weights; None if there is none."""
    units, positions = data_parallel.layer_units, _positions(chunks)
    with_codes = {layer: position for layer, position in positions.items() if units[position].coded}
    if not with_codes:
        return None
    coded = CodedWeights(data_parallel, with_codes)
    _bring_weights(chunks, with_codes, coded)
    return coded


def stream_states(
    placement: StatePlacement,
    ops: Sequence[LayerOp],
    chunks: Sequence[TransformerChunk],
    data_parallel: ShardedDataParallel,
    backend: StreamBackend,
) -> StateStreamer:
    """Make the state plan of a rank, allocate its slots, and wrap every layer."""
    positions = _positions(chunks)
    states = StateStreamer(placed_state_plan(ops, placement), data_parallel, positions, backend)
    _bring_weights(chunks, positions, states)
    return states


def _positions(chunks: Sequence[TransformerChunk]) -> dict[int, int]:
    """{global index of a layer: its position among this rank's layers}."""
    layers = [index for chunk in chunks for index in chunk.layer_indices]
    return {layer: position for position, layer in enumerate(layers)}


def _bring_weights(chunks: Sequence[TransformerChunk], layers: Container[int], states: LayerStates) -> None:
    """Wrap `layers`, given by their global indices, so that `states` provides their weights."""
    for chunk in chunks:
        for place, (index, layer) in enumerate(zip(chunk.layer_indices, chunk.layers, strict=True)):
            if index in layers:
                chunk.layers[place] = StreamedLayer(layer, index, states)
