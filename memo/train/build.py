"""From a configuration to a model spread over the ranks: the one place where all axes meet."""

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from memo.attention.delta_kernels import select_delta, tune
from memo.attention.delta_rule import DeltaNet
from memo.attention.select import select_backend
from memo.checkpoint.hugging_face.load import frozen_from, load_pretrained, pretrained_directory
from memo.config import RunConfig
from memo.config.derived import (
    global_batch_size,
    num_microbatches,
    rank_length,
    resident_tiles,
    resolved_a2a_size,
    resolved_offload_tiles,
)
from memo.config.grid import rank_grid
from memo.executor.coded_weights import CodedWeights
from memo.executor.host_budget import HostBudget, settle
from memo.executor.host_pool import HostPool
from memo.executor.layer_states import Update
from memo.executor.phases import mark_phases, unmarked
from memo.executor.runtime import SwapRuntime, SweepRuntime
from memo.executor.select import make_backend
from memo.executor.states import StateStreamer
from memo.executor.streamed import StreamedLayer
from memo.executor.streams import StreamBackend
from memo.mesh import Mesh, Watch
from memo.model.layer import Experts
from memo.model.parts import ModelParts
from memo.model.transformer import Head, Microbatch, TransformerChunk
from memo.parallel.context import ContextAttention
from memo.parallel.data import ShardedDataParallel
from memo.parallel.dtypes import torch_dtype
from memo.parallel.hidden import HiddenInPlan
from memo.parallel.pipeline import Enter, PipelineStage
from memo.parallel.router_losses import RouterLosses
from memo.parallel.stage_messages import Wire
from memo.parallel.units import moment_dtypes
from memo.parallel.weight_gradients import own_sum
from memo.planner.state_plan import placed_state_plan
from memo.spec.layer_ops import LayerOp, stage_ops
from memo.spec.placement import StatePlacement, placement_of
from memo.spec.schedule import Action, Pipeline, forward_only, one_f_one_b, pipeline_of
from memo.spec.stack import runs_of_kinds, stack_of
from memo.train import swap
from memo.train.agreement import Agreement
from memo.train.breadth_first import run_breadth_first, tied_weight
from memo.train.optimizer import Optimizer
from memo.train.planned_memory import Transients
from memo.train.swap import ChosenSwap
from memo.train.tiled_layers import keep_on_device
from memo_kernels import select_ops, wide_dtype


@dataclass
class ParallelModel:
    """Everything that a rank needs to train its part of the model."""

    mesh: Mesh
    pipeline: Pipeline
    stage: PipelineStage
    chunks: list[TransformerChunk]
    data_parallel: ShardedDataParallel
    optimizer: Optimizer
    swap: SwapRuntime | None
    states: StateStreamer | None
    coded: CodedWeights | None
    chosen_swap: ChosenSwap | None
    transients: Transients | None
    router_losses: RouterLosses | None
    actions: list[Action]
    is_breadth_first: bool
    device: torch.device
    tiles: int
    """Tiles of tokens that the layers work on."""

    def train_step(
        self, batches: list[Microbatch], lr: float, agreement: Agreement | None = None
    ) -> tuple[Tensor, float, bool]:
        """One training step: the gradients of one global batch, then the optimizer. A memory plan covers all of it.

        `agreement` shares the loss and other facts among the ranks, in the same wait as the gradient norm. Returns
        (this rank's share of the loss, gradient norm before clipping, whether the weights were updated).
        """
        iteration = nullcontext() if self.transients is None else self.transients.iteration()
        with iteration, self.optimizer.updating(lr) as update:
            loss_sum = self.forward_backward(batches, update)
            self._begin_phase("optimizer")
            with self.mesh.watch.work("optimizer"):
                if agreement is not None:
                    agreement.send(loss_sum)
                    if self.router_losses is not None:
                        agreement.read_too(self.router_losses.figures())
                norm, updated = self.optimizer.step(lr, Tensor.item if agreement is None else agreement.read)
                if updated and self.router_losses is not None:  # no checkpoint still reads what the optimizer changes
                    self.router_losses.update_biases()
                return loss_sum, norm, updated

    def forward_backward(self, batches: list[Microbatch], update: Update | None = None) -> Tensor:
        """Compute and reduce the gradients of one global batch; returns this rank's share of the loss.

        `update`: updates layers whose states are in host memory meanwhile.
        """
        if self.states is not None:
            self.states.next_step(update)
        tied = tied_weight(self.chunks[0])
        adds_twice = tied is not None and (self.is_breadth_first or own_sum(tied) is not None)
        self.data_parallel.begin_step(len(batches), tied if adds_twice else None)
        if self.swap is not None:
            self.swap.next_step()
        if self.router_losses is not None:
            self.router_losses.begin_step()
        if self.is_breadth_first:
            loss_sum = self._run_breadth_first(batches)
        else:
            enter = None if self.transients is None else self.transients.phases.enter
            loss_sum = self._run(self.actions, batches, enter)
        self._begin_phase("reduction")
        with self.mesh.watch.work("reduction"):
            if self.router_losses is not None:
                self.router_losses.finish_step(self.mesh.world, self.mesh.at.tp)
            self.data_parallel.finish_reduction(self.states)
        return loss_sum

    def _run_breadth_first(self, batches: list[Microbatch]) -> Tensor:
        def entering(microbatch: int) -> None:
            self.mesh.watch.microbatch = microbatch
            if self.transients is not None:
                self.transients.phases.microbatch = microbatch

        (chunk,) = self.chunks
        return run_breadth_first(chunk, batches, entering)

    @contextmanager
    def rehearsing(self) -> Iterator[None]:
        """Inside, a step makes all the memory requests of a real step, and changes nothing that training goes on with
        (memo.train.optimizer.Optimizer.rehearsing)."""
        losses = self.router_losses
        with self.optimizer.rehearsing(), nullcontext() if losses is None else losses.rehearsing():
            yield

    @torch.no_grad()
    def forward(self, batches: list[Microbatch]) -> Tensor:
        """This rank's share of the loss of one global batch; changes nothing."""
        return self._run(forward_only(self.pipeline), batches)

    @torch.no_grad()
    def at_head(self, batches: list[Microbatch], read: Callable[[Head, Tensor, int], None]) -> None:
        """Run forwards only, and call `read(head, hidden, microbatch)` with the input of the head, [n, b, h].

        Collective over all ranks; `read` is called on the last stage, there on all tp ranks alike.
        """

        def forward(chunk: TransformerChunk, hidden: Tensor | None, microbatch: int) -> Tensor:
            hidden = chunk.hidden_states(hidden, batches[microbatch])
            if chunk.head is None:
                return hidden
            read(unmarked(chunk.head), hidden, microbatch)
            return hidden.new_zeros(())

        actions = forward_only(self.pipeline)
        self.stage.run(actions, [functools.partial(forward, chunk) for chunk in self.chunks])

    def _begin_phase(self, kind: str) -> None:
        if self.transients is not None:
            self.transients.phases.begin(kind)

    def _run(self, actions: list[Action], batches: list[Microbatch], enter: Enter | None = None) -> Tensor:
        def forward(chunk: TransformerChunk, hidden: Tensor | None, microbatch: int) -> Tensor:
            output: Tensor = chunk(hidden, batches[microbatch])
            return output

        return self.stage.run(actions, [functools.partial(forward, chunk) for chunk in self.chunks], enter)


def build_mesh(config: RunConfig, rank: int, world_size: int, watch: Watch | None = None) -> Mesh:
    p = config.parallel
    return Mesh(
        rank_grid(config, world_size),
        rank,
        a2a_size=resolved_a2a_size(config),
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
    """Attention of each layer on this rank, one for all layers of a kind; `transients` as of `build_attention`."""
    made = {run.model: build_attention(run, mesh, device, transients) for run in runs_of_kinds(config)}
    stack = stack_of(config.model)
    return lambda layer: made[stack[layer]]


def build_attention(
    config: RunConfig, mesh: Mesh, device: torch.device, transients: Transients | None = None
) -> ContextAttention:
    """Attention of this rank, where all layers are alike; `transients` are told of it where documents may be packed."""
    backend = select_backend(config.hardware.attention_backend, device.type)
    backend.merge_ = select_ops(config.hardware.kernels, torch.float32).merge_  # sums are fp32 or wider
    return ContextAttention(
        backend,
        config.data.seq_length,
        config.parallel.cp_comm_type,
        mesh.cp_ring,
        mesh.cp_a2a,
        scale=config.model.attention_scale,
        keeps_outputs=config.memory.recompute_granularity != "selective",
        around=transients.phases.attention if transients is not None and config.data.may_pack else None,
        window=config.model.window(config.data.seq_length),
    )


def build_chunks(
    config: RunConfig,
    mesh: Mesh,
    dtype: torch.dtype,
    device: torch.device,
    transients: Transients | None = None,
) -> tuple[Pipeline, list[TransformerChunk]]:
    """The sizes of the pipeline, and this stage's part of the model; its parameters have no memory yet."""
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
            max_positions=config.model.max_position_embeddings or config.data.seq_length,
            loss_chunk_size=training.loss_chunk_size,
        )
        for chunk in range(parallel.vpp)
    ]
    return pipeline, chunks


def delta_net_of(config: RunConfig, dtype: torch.dtype, device: torch.device) -> type[DeltaNet]:
    """The kernels of this rank's gated delta nets, which are chosen among those of their package where it has several;
    nothing of the model has memory yet."""
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
    """The object that executes the schedule, with the shape of the messages between stages.

    `hidden`: where hidden states are not on the device.
    """
    tokens = rank_length(config) // mesh.grid.tp
    shape = (tokens, config.training.micro_batch_size, config.model.hidden_size)
    return PipelineStage(pipeline, mesh, Wire(shape, torch_dtype(str(config.training.params_dtype)), device), hidden)


def add_router_losses(
    config: RunConfig, mesh: Mesh, chunks: Sequence[TransformerChunk], device: torch.device
) -> RouterLosses | None:
    """Give the routers of these plain layers their losses and biases; None in models without experts."""
    if not config.model.num_experts:
        return None
    num_tokens = global_batch_size(config, mesh.grid.world_size) * config.data.seq_length
    losses = RouterLosses(config, num_tokens, wide_dtype(chunks[0].dtype), device)
    for chunk in chunks:
        for layer, index in zip(chunk.layers, chunk.layer_indices, strict=True):
            if isinstance(layer.mlp, Experts):
                layer.mlp.losses, layer.mlp.expert_bias = losses.of_layer(index), losses.bias_of(index)
    return losses


def _first_weights(config: RunConfig, data_parallel: ShardedDataParallel, mesh: Mesh) -> None:
    pretrained = pretrained_directory(config)
    if pretrained is None:
        data_parallel.initialize(config.training.seed)
    else:
        load_pretrained(pretrained, config, data_parallel, mesh)


def build(config: RunConfig, mesh: Mesh, dtype: torch.dtype, device: torch.device) -> ParallelModel:
    """Apply each axis of parallelism from outside of the model; the comments give the reason for the order."""
    parallel, training, memory = config.parallel, config.training, config.memory
    transients = Transients(memory, device.type) if memory.plans else None
    pipeline, chunks = build_chunks(config, mesh, dtype, device, transients)  # 1 to 3
    # 4. Memory comes after all shapes are known: parameters become views of flat buffers, and states that are not
    # resident get host memory and slots. The ranks of a node divide its memory before any of them allocates some.
    host = settle(config, mesh, device)
    free_bytes = swap.free_device_bytes(config, mesh, device, host) if memory.swaps else 0
    placement = placement_of(config, mesh.grid.world_size)
    data_parallel = ShardedDataParallel(
        nn.ModuleList(chunks),
        mesh,
        dtype=dtype,
        device=device,
        bucket_size=parallel.ddp_bucket_size,
        overlap=parallel.overlap_grad_reduce,
        placement=placement,
        host_memory=functools.partial(_host_memory, host, device),
        accumulates=pipeline.microbatches > 1,
        consumes_gradients=training.clip_grad == 0,
        moments=moment_dtypes(training, dtype),
        quantize=config.model.quantize,
        saves_frozen=frozen_from(config) is None,
        squared_norm=select_ops(config.hardware.kernels, wide_dtype(dtype)).squared_norm,
    )
    router_losses = add_router_losses(config, mesh, chunks, device)
    data_parallel.constants = [] if router_losses is None else router_losses.bias_segments()
    _first_weights(config, data_parallel, mesh)
    # 5. The executor wraps layers after the gradients have memory, because it adds to them. Streaming of states wraps
    # the result.
    actions = one_f_one_b(pipeline, mesh.at.pp)
    is_breadth_first = parallel.gradient_accumulation_order == "breadth_first"
    ops = stage_ops(pipeline_of(config, mesh.grid.world_size), mesh.at.pp, config.model.num_layers)
    backend = make_backend(memory.offload_backend, device, check=memory.offload_check_races)
    chosen = runtime = None
    if memory.swaps:
        chosen = swap.choose(config, mesh, ops, chunks, data_parallel, free_bytes, host)
        if not chosen.solution.moves_nothing_is_best:
            runtime = swap.start(config, mesh, chosen, chunks, data_parallel, backend, host)
    if runtime is None:
        keep_on_device(config, mesh, chunks, data_parallel, device)
    coded = decode_weights(chunks, data_parallel)
    states = None
    if placement.streams:
        states = stream_states(placement, ops, chunks, data_parallel, backend)
    # 6. The optimizer sees this rank's shard of the masters, and waits for the copies of those in host memory.
    optimizer = Optimizer(data_parallel, training, states)
    # 7. Marks of phases wrap everything that allocates memory.
    if transients is not None:
        mark_phases(chunks, transients.phases)
        mesh.watch.settle = None if transients.allocator is None else transients.allocator.settle
    hidden = runtime.hidden if isinstance(runtime, SweepRuntime) else None
    stage = build_stage(config, mesh, pipeline, device, hidden)
    return ParallelModel(
        mesh,
        pipeline,
        stage,
        chunks,
        data_parallel,
        optimizer,
        runtime,
        states,
        coded,
        chosen,
        transients,
        router_losses,
        actions,
        is_breadth_first,
        device,
        resident_tiles(config) if runtime is None else resolved_offload_tiles(config),
    )


def decode_weights(chunks: Sequence[TransformerChunk], data_parallel: ShardedDataParallel) -> CodedWeights | None:
    """Wrap every layer that has weights in few bits; None where there is none."""
    units, positions = data_parallel.layer_units, _positions(chunks)
    with_codes = {layer: position for layer, position in positions.items() if units[position].coded}
    if not with_codes:
        return None
    coded = CodedWeights(data_parallel, with_codes)
    for chunk in chunks:
        for place, (index, layer) in enumerate(zip(chunk.layer_indices, chunk.layers, strict=True)):
            if index in with_codes:
                chunk.layers[place] = StreamedLayer(layer, index, coded)
    return coded


def _positions(chunks: Sequence[TransformerChunk]) -> dict[int, int]:
    """Of this rank's layers, by their global index."""
    layers = [index for chunk in chunks for index in chunk.layer_indices]
    return {layer: position for position, layer in enumerate(layers)}


def stream_states(
    placement: StatePlacement,
    ops: Sequence[LayerOp],
    chunks: Sequence[TransformerChunk],
    data_parallel: ShardedDataParallel,
    backend: StreamBackend,
) -> StateStreamer:
    """Make the state plan of a rank, allocate its slots, and wrap every layer."""
    states = StateStreamer(placed_state_plan(ops, placement), data_parallel, _positions(chunks), backend)
    for chunk in chunks:
        for place, layer in enumerate(chunk.layers):
            chunk.layers[place] = StreamedLayer(layer, chunk.layer_indices[place], states)
    return states


def _host_memory(host: HostBudget, device: torch.device, num_bytes: int) -> HostPool:
    return HostPool(1, num_bytes, device, host, "states")
