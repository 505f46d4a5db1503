"""Token-wise swapping for a model that is already built: from alpha to slots, plan and wrapped layers."""

import math
from collections.abc import Sequence

import torch

from memo.config import RunConfig
from memo.executor.layer import TokenwiseLayer, make_tiles
from memo.executor.runtime import SwapRuntime
from memo.executor.slots import LayerSizes, SlotLayout, plan_slot
from memo.executor.streams import make_backend
from memo.mesh import Mesh
from memo.model.transformer import TransformerChunk, torch_dtype
from memo.parallel.data import ShardedDataParallel
from memo.planner.swap import LayerOp, swap_plan
from memo.skeleton import moves_in_part, skeletal_tensors


def tiles_moved(config: RunConfig) -> dict[str, int]:
    """How many of the T tiles of each group move: alpha rounded down to the tile grid."""
    memory = config.memory
    count = math.floor(float(memory.offload_alpha) * memory.offload_tiles + 1e-9)
    groups = {t.group for t in skeletal_tensors(config.model) if moves_in_part(t, memory.offload_policy)}
    return dict.fromkeys(sorted(groups), count)


def slot_layout(config: RunConfig, tiles: dict[str, int]) -> SlotLayout:
    """What one layer keeps in a rounding buffer of one rank."""
    parallel, training = config.parallel, config.training
    sizes = LayerSizes(
        tokens=config.data.seq_length // parallel.cp,
        batch=training.micro_batch_size,
        tp=parallel.tp,
        tiles=config.memory.offload_tiles,
        dtype=torch_dtype(str(training.params_dtype)),
    )
    return plan_slot(skeletal_tensors(config.model), sizes, tiles)


def build_swap(config: RunConfig, mesh: Mesh, ops: Sequence[LayerOp], device: torch.device) -> SwapRuntime:
    """Slots, host pool and streams for this rank's layer operations."""
    memory = config.memory
    backend = make_backend(memory.offload_backend, device, check=memory.offload_check_races)
    return SwapRuntime(swap_plan(ops), slot_layout(config, tiles_moved(config)), backend, device)


def wrap_layers(
    config: RunConfig,
    mesh: Mesh,
    chunks: Sequence[TransformerChunk],
    swap: SwapRuntime,
    data_parallel: ShardedDataParallel,
) -> None:
    """Replace every plain layer by one that runs under the plan."""
    tiles = make_tiles(config.data.seq_length // mesh.grid.cp, mesh.grid.tp, config.memory.offload_tiles)
    for chunk in chunks:
        for position, layer in enumerate(chunk.layers):
            chunk.layers[position] = TokenwiseLayer(
                layer, chunk.layer_indices[position], tiles, swap, data_parallel, mesh.tp
            )
