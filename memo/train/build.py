"""From a configuration to a model spread over the ranks: the one place where all axes meet."""

import functools
import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from memo.attention.select import select_backend
from memo.config import RunConfig
from memo.config.derived import data_parallel_size, num_microbatches, resolved_a2a_size
from memo.executor.runtime import SwapRuntime
from memo.mesh import Mesh, RankGrid
from memo.model.layer import ModelParts
from memo.model.transformer import Microbatch, TransformerChunk
from memo.parallel.context import ContextAttention
from memo.parallel.data import ShardedDataParallel
from memo.parallel.pipeline import PipelineStage, Wire
from memo.parallel.schedule import Action, Pipeline, forward_only, one_f_one_b
from memo.planner.swap import layer_ops
from memo.train import swap
from memo.train.optimizer import Optimizer
from memo.train.recompute import recompute_attention, recompute_layers
from memo.train.swap import ChosenSwap


@dataclass
class ParallelModel:
    """Everything a rank needs to train its part."""

    mesh: Mesh
    pipeline: Pipeline
    stage: PipelineStage
    chunks: list[TransformerChunk]
    data_parallel: ShardedDataParallel
    optimizer: Optimizer
    swap: SwapRuntime | None
    chosen_swap: ChosenSwap | None
    actions: list[Action]
    dtype: torch.dtype
    device: torch.device

    def forward_backward(self, batches: list[Microbatch]) -> Tensor:
        """Gradients of one global batch, reduced; returns this rank's share of the loss (see Microbatch)."""
        self.data_parallel.begin_step(len(batches))
        if self.swap is not None:
            self.swap.next_step()
        loss_sum = self._run(self.actions, batches)
        self.data_parallel.finish_reduction()
        return loss_sum

    @torch.no_grad()
    def forward(self, batches: list[Microbatch]) -> Tensor:
        """This rank's share of the loss of one global batch; changes nothing."""
        return self._run(forward_only(self.pipeline, self.mesh.at.pp), batches)

    def _run(self, actions: list[Action], batches: list[Microbatch]) -> Tensor:
        def forward(chunk: TransformerChunk, hidden: Tensor | None, microbatch: int) -> Tensor:
            output: Tensor = chunk(hidden, batches[microbatch])
            return output

        return self.stage.run(actions, [functools.partial(forward, chunk) for chunk in self.chunks])


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
    granularity = config.memory.recompute_granularity
    parts = ModelParts(config.model, dtype, mesh.tp, recompute_attention(granularity, attention))
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
    recompute_layers(granularity, chunks)
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
    # 6. Swapping wraps the layers last: it adds to gradients whose place must be known.
    actions = one_f_one_b(pipeline, mesh.at.pp)
    chosen = runtime = None
    if config.memory.swaps:
        ops = layer_ops(pipeline, mesh.at.pp, config.model.num_layers, actions)
        chosen = swap.choose(config, mesh, ops, chunks, data_parallel)
        if not chosen.solution.moves_nothing_is_best:
            runtime = swap.start(config, mesh, chosen, chunks, data_parallel)
    tokens = config.data.seq_length // (mesh.grid.cp * mesh.grid.tp)
    wire = Wire((tokens, training.micro_batch_size, config.model.hidden_size), dtype, device)
    stage = PipelineStage(pipeline, mesh, wire)
    return ParallelModel(
        mesh, pipeline, stage, chunks, data_parallel, optimizer, runtime, chosen, actions, dtype, device
    )
