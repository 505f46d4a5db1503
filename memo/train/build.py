"""From a configuration to a model spread over the ranks: the one place where all axes meet."""

import math
from dataclasses import dataclass

import torch
from torch import nn

from memo.attention.backends import select_backend
from memo.config import RunConfig
from memo.config.derived import data_parallel_size, num_microbatches, resolved_a2a_size
from memo.mesh import Mesh, RankGrid
from memo.model.layer import ModelParts
from memo.model.transformer import TransformerChunk
from memo.parallel.context import ContextAttention
from memo.parallel.data import ShardedDataParallel
from memo.parallel.pipeline import PipelineStage, Wire
from memo.parallel.schedule import Pipeline
from memo.train.optimizer import Optimizer


@dataclass
class ParallelModel:
    """Everything a rank needs to train its part."""

    mesh: Mesh
    pipeline: Pipeline
    stage: PipelineStage
    chunks: list[TransformerChunk]
    data_parallel: ShardedDataParallel
    optimizer: Optimizer
    dtype: torch.dtype
    device: torch.device


def build_mesh(config: RunConfig, rank: int, world_size: int) -> Mesh:
    p = config.parallel
    grid = RankGrid(tp=p.tp, cp=p.cp, dp=data_parallel_size(config, world_size), pp=p.pp)
    return Mesh(grid, rank, a2a_size=resolved_a2a_size(config))


def build(config: RunConfig, mesh: Mesh, dtype: torch.dtype, device: torch.device) -> ParallelModel:
    """Apply the axes, each from outside, in an order that has a reason."""
    parallel, training = config.parallel, config.training
    pipeline = Pipeline(mesh.grid.pp, parallel.vpp, num_microbatches(config, mesh.grid.world_size))
    # 1. Context parallelism is an attention: the layers that use it do not know.
    attention = ContextAttention(
        select_backend(config.hardware.attention_backend, device.type),
        config.data.seq_length,
        parallel.cp_comm_type,
        mesh.cp_ring,
        mesh.cp_a2a,
        scale=1.0 / math.sqrt(config.model.head_dim),
    )
    # 2. Tensor parallelism decides the shapes of layers, 3. the pipeline which of them exist here.
    parts = ModelParts(config.model, dtype, mesh.tp, attention)
    chunks = [
        TransformerChunk(
            parts,
            pipeline.layers(mesh.at.pp, chunk, config.model.num_layers),
            first=pipeline.virtual_stage(mesh.at.pp, chunk) == 0,
            last=pipeline.virtual_stage(mesh.at.pp, chunk) == pipeline.last_virtual_stage,
            max_positions=config.model.max_position_embeddings or config.data.seq_length,
            loss_chunk_size=training.loss_chunk_size,
        )
        for chunk in range(parallel.vpp)
    ]
    # 4. Only now memory: parameters become views of flat buffers, which need every shape.
    data_parallel = ShardedDataParallel(
        nn.ModuleList(chunks),
        mesh,
        dtype=dtype,
        device=device,
        bucket_size=parallel.ddp_bucket_size,
        overlap=parallel.overlap_grad_reduce,
    )
    data_parallel.initialize(training.seed)
    # 5. The optimizer sees this rank's shard of the masters.
    optimizer = Optimizer(data_parallel, training)
    tokens = config.data.seq_length // (mesh.grid.cp * mesh.grid.tp)
    wire = Wire((tokens, training.micro_batch_size, config.model.hidden_size), dtype, device)
    stage = PipelineStage(pipeline, mesh, wire)
    return ParallelModel(mesh, pipeline, stage, chunks, data_parallel, optimizer, dtype, device)
