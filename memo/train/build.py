"""From a configuration to a model spread over the ranks: the one place where all axes meet."""

from collections.abc import Callable, Sequence

import torch
from torch import nn

from memo.attention.delta_kernels import select_delta, tune
from memo.attention.delta_rule import DeltaNet
from memo.attention.select import select_backend
from memo.checkpoint.hugging_face.load import frozen_from, load_pretrained, pretrained_directory
from memo.config import RunConfig
from memo.config.attention_kernels import kernels_for
from memo.config.derived import (
    global_batch_size,
    num_microbatches,
    rank_length,
    resident_tiles,
    resolved_a2a_size,
    resolved_offload_tiles,
)
from memo.config.grid import rank_grid
from memo.config.model import ModelConfig
from memo.config.rope_factors import attention_factor_of
from memo.executor.host_budget import HostBudget, settle
from memo.executor.host_pool import HostPool
from memo.executor.phases import Phases, mark_phases
from memo.executor.runtime import SweepRuntime
from memo.executor.select import make_backend
from memo.mesh import Mesh, Watch
from memo.model.layer import Experts
from memo.model.parts import ModelParts
from memo.model.transformer import TransformerChunk
from memo.parallel.constants import as_segment
from memo.parallel.context import ContextAttention
from memo.parallel.data import ShardedDataParallel
from memo.parallel.dtypes import torch_dtype
from memo.parallel.hidden import HiddenInPlan
from memo.parallel.pipeline import PipelineStage
from memo.parallel.router_losses import RouterLosses
from memo.parallel.stage_messages import Wire
from memo.parallel.units import MasterSegment, moment_dtypes
from memo.spec.layer_ops import stage_ops
from memo.spec.placement import StatePlacement, placement_of
from memo.spec.schedule import Pipeline, pipeline_of
from memo.spec.shapes import LAYER_SCALAR
from memo.spec.stack import runs_of_kinds, stack_of
from memo.train import swap
from memo.train.optimizer import Optimizer
from memo.train.parallel_model import ParallelModel
from memo.train.planned_memory import Transients, describe_run
from memo.train.tiled_layers import decode_weights, keep_on_device, stream_states
from memo_kernels import select_ops, wide_dtype


def build_mesh(config: RunConfig, rank: int, world_size: int, watch: Watch | None = None) -> Mesh:
    p = config.parallel
    return Mesh(
        rank_grid(p, world_size),
        rank,
        a2a_size=resolved_a2a_size(config.model, p),
        is_interleaved=p.vpp > 1,
        ties_embedding=not config.model.untie_embeddings_and_output_weights,
        background=config.checkpoint.async_save,
        is_simulated=p.simulate_world is not None,
        timeout=p.distributed_timeout,
        watch=watch,
    )


def attention_of_layers(
    config: RunConfig, mesh: Mesh, device: torch.device, transients: Transients | None = None
) -> Callable[[int], ContextAttention]:
    """Return the attention of each layer on this rank, shared by all layers of a kind; `transients`: see
    `build_attention`."""
    made = {run.model: build_attention(run, mesh, device, transients) for run in runs_of_kinds(config)}
    stack = stack_of(config.model)
    return lambda layer: made[stack[layer]]


def build_attention(
    config: RunConfig, mesh: Mesh, device: torch.device, transients: Transients | None = None
) -> ContextAttention:
    """Attention of this rank for one kind of layers; `transients` mark its phases, unless its requests are the same
    wherever documents end, as those of torch's rule for gated delta nets are."""
    by_documents = config.data.may_pack and (not config.model.is_linear or config.hardware.delta_backend == "fla")
    name = kernels_for(config.hardware.attention_backend, config.model.head_dim)
    backend = select_backend(name, device.type, softcap=config.model.attn_logit_softcapping)
    backend.merge_ = select_ops(config.hardware.kernels, torch.float32).merge_  # sums are fp32 or wider
    return ContextAttention(
        backend,
        config.data.seq_length,
        config.parallel.cp_comm_type,
        mesh.cp_ring,
        mesh.cp_a2a,
        scale=_scale_of_scores(config.model),
        keeps_outputs=config.memory.recompute_granularity != "selective",
        around=transients.phases.attention if transients is not None and by_documents else None,
        window=config.model.window(config.data.seq_length),
    )


def _scale_of_scores(model: ModelConfig) -> float:
    grown = attention_factor_of(model.rope_scaling_factor, model.mscale_all_dim)
    return float((model.query_pre_attn_scalar or model.head_dim) ** -0.5) * grown**2


def build_chunks(
    config: RunConfig,
    mesh: Mesh,
    dtype: torch.dtype,
    device: torch.device,
    transients: Transients | None = None,
) -> tuple[Pipeline, list[TransformerChunk]]:
    """Return the sizes of the pipeline and this stage's part of the model, whose parameters have no memory yet."""
    parallel, training = config.parallel, config.training
    pipeline = Pipeline(mesh.grid.pp, parallel.vpp, num_microbatches(config, mesh.grid.world_size))
    # 1. Context parallelism is a kind of attention; the layers that call it do not depend on it.
    attention = attention_of_layers(config, mesh, device, transients)
    # 2. Tensor parallelism decides the shapes of layers, and 3. the pipeline which layers this stage has.
    ops, delta_net = select_ops(config.hardware.kernels, dtype), delta_net_of(config, dtype, device)
    parts = ModelParts(config.model, dtype, mesh.tp, attention, ops, delta_net)
    chunks = [
        TransformerChunk(
            parts,
            pipeline.layers(mesh.at.pp, chunk, config.model.num_layers),
            first=pipeline.virtual_stage(mesh.at.pp, chunk) == 0,
            last=pipeline.virtual_stage(mesh.at.pp, chunk) == pipeline.last_virtual_stage,
            seq_length=config.data.seq_length,
            loss_chunk_size=training.loss_chunk_size,
        )
        for chunk in range(parallel.vpp)
    ]
    return pipeline, chunks


def delta_net_of(config: RunConfig, dtype: torch.dtype, device: torch.device) -> type[DeltaNet]:
    """The kernels of this rank's gated delta nets. The kernels of fla are tuned first, before the model has memory."""
    model, parallel, chosen = config.model, config.parallel, config.hardware.delta_backend
    if chosen == "fla" and device.type == "cuda":
        shards = parallel.tp * parallel.cp
        heads, key_heads = model.linear_num_value_heads // shards, model.linear_num_key_heads // shards
        tune(heads, key_heads, model.linear_key_head_dim, dtype, device, config.data.may_pack)
        torch.cuda.empty_cache()
    return select_delta(chosen)


def build_stage(
    config: RunConfig, mesh: Mesh, pipeline: Pipeline, device: torch.device, hidden: HiddenInPlan | None = None
) -> PipelineStage:
    """Return the object that executes the pipeline schedule; it knows the shape of the messages between stages.

    `hidden`: the plan of hidden states that are in host memory, if any.
    """
    tokens = rank_length(config) // mesh.grid.tp
    shape = (tokens, config.training.micro_batch_size, config.model.hidden_size)
    return PipelineStage(pipeline, mesh, Wire(shape, torch_dtype(str(config.training.params_dtype)), device), hidden)


def add_router_losses(
    config: RunConfig, mesh: Mesh, chunks: Sequence[TransformerChunk], device: torch.device
) -> RouterLosses | None:
    """Give the routers of these unwrapped layers their losses and biases; None for a model without experts."""
    if not config.model.num_experts:
        return None
    num_tokens = global_batch_size(config, mesh.grid.world_size) * config.data.seq_length
    losses = RouterLosses(config, num_tokens, wide_dtype(chunks[0].dtype), device)
    for chunk in chunks:
        for layer, index in zip(chunk.layers, chunk.layer_indices, strict=True):
            if isinstance(layer.mlp, Experts):
                layer.mlp.losses, layer.mlp.expert_bias = losses.of_layer(index), losses.bias_of(index)
    return losses


def add_layer_scalars(
    config: RunConfig, chunks: Sequence[TransformerChunk], device: torch.device
) -> list[MasterSegment]:
    """Give the layers the factors on their outputs (--layer-scalar), ones; return those of all layers."""
    if not config.model.layer_scalar:
        return []
    scalars = torch.ones(config.model.num_layers, device=device)
    for chunk in chunks:
        for layer, index in zip(chunk.layers, chunk.layer_indices, strict=True):
            layer.scalar = scalars[index]
    return [as_segment(f"layers.{layer}.{LAYER_SCALAR}", each) for layer, each in enumerate(scalars.split(1))]


def build(config: RunConfig, mesh: Mesh, dtype: torch.dtype, device: torch.device) -> ParallelModel:
    """Apply each axis of parallelism from outside the model; the comments give the reason for the order."""
    memory = config.memory
    run = describe_run(config, mesh.grid.world_size, mesh.at.pp)
    transients = Transients(memory, device.type, run) if memory.plans else None
    pipeline, chunks = build_chunks(config, mesh, dtype, device, transients)  # 1 to 3
    # 4. Memory comes after all shapes are known: parameters become views of flat buffers, and offloaded states get
    # host memory and slots. The ranks of a node divide its memory before any of them allocates.
    host = settle(config, mesh, device)
    free_bytes = swap.free_device_bytes(config, mesh, device, host) if memory.swaps else 0
    placement = placement_of(config, mesh.grid.world_size)
    data_parallel = _shard(config, mesh, dtype, device, chunks, placement, host)
    router_losses = add_router_losses(config, mesh, chunks, device)
    data_parallel.constants = [
        *([] if router_losses is None else router_losses.bias_segments()),
        *add_layer_scalars(config, chunks, device),
    ]
    pretrained = pretrained_directory(config)
    if pretrained is None:
        data_parallel.initialize(config.training.seed)
    else:
        load_pretrained(pretrained, config, data_parallel, mesh)
    # 5. The executor wraps layers once the gradients have memory, because it adds to them. The streaming of states
    # wraps the wrapped layers.
    ops = stage_ops(pipeline_of(config, mesh.grid.world_size), mesh.at.pp, config.model.num_layers)
    backend = make_backend(memory.offload_backend, device, check=memory.offload_check_races)
    chosen = runtime = None
    if memory.swaps:
        chosen = swap.choose(config, mesh, ops, chunks, data_parallel, free_bytes, host)
        if not chosen.solution.moves_nothing_is_best:
            runtime = swap.start(config, mesh, chosen, chunks, data_parallel, backend, host)
    if runtime is None:
        keep_on_device(config, mesh, chunks, data_parallel.main_gradients, device)
    coded = decode_weights(chunks, data_parallel)
    states = stream_states(placement, ops, chunks, data_parallel, backend) if placement.streams else None
    # 6. The optimizer updates this rank's shard of the masters, and waits for copies of the shards in host memory.
    optimizer = Optimizer(data_parallel, config.training, states)
    # 7. Marks of phases wrap everything that allocates memory.
    if transients is not None:
        mark_phases(chunks, transients.phases)
        mesh.watch.settle = None if transients.allocator is None else transients.allocator.settle
    hidden = runtime.hidden if isinstance(runtime, SweepRuntime) else None
    return ParallelModel(
        config=config,
        mesh=mesh,
        device=device,
        pipeline=pipeline,
        stage=build_stage(config, mesh, pipeline, device, hidden),
        chunks=chunks,
        data_parallel=data_parallel,
        optimizer=optimizer,
        swap=runtime,
        states=states,
        coded=coded,
        chosen_swap=chosen,
        transients=transients,
        phases=Phases() if transients is None else transients.phases,
        router_losses=router_losses,
        tiles=resident_tiles(config) if runtime is None else resolved_offload_tiles(config),
    )


def _shard(
    config: RunConfig,
    mesh: Mesh,
    dtype: torch.dtype,
    device: torch.device,
    chunks: Sequence[TransformerChunk],
    placement: StatePlacement,
    host: HostBudget,
) -> ShardedDataParallel:
    """Give the weights, gradients and optimizer states of this rank their memory."""
    parallel, training = config.parallel, config.training
    return ShardedDataParallel(
        nn.ModuleList(chunks),
        mesh,
        dtype=dtype,
        device=device,
        bucket_size=parallel.ddp_bucket_size,
        overlap=parallel.overlap_grad_reduce,
        placement=placement,
        host_memory=lambda num_bytes: HostPool(1, num_bytes, device, host, "states"),
        accumulates=num_microbatches(config, mesh.grid.world_size) > 1,
        consumes_gradients=training.clip_grad == 0,
        moments=moment_dtypes(training, dtype),
        quantize=config.model.quantize,
        saves_frozen=frozen_from(config) is None,
        squared_norm=select_ops(config.hardware.kernels, wide_dtype(dtype)).squared_norm,
    )
