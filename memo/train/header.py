"""The header that a run prints before its first step: at most 15 lines, with one line about offload.

`memo profile` prints the whole tables of the plans.
"""

from memo.config import RunConfig
from memo.config.derived import global_batch_size
from memo.data import BlendedDataset, PackedConversations, PackedDataset, PreferencePairs, TokenStream
from memo.spec.parameters import count_parameters
from memo.spec.sweep import sweep_of
from memo.train.determinism import describe_bits
from memo.train.parallel_model import ParallelModel
from memo.train.setup import Prepared
from memo.units import format_count


def describe_start(parts: ParallelModel, prepared: Prepared, resumed_at: int | None = None) -> str:
    """Sizes, weights, layout, data, plans, and on GPUs the peak that MFU refers to; takes seconds for planned memory.
    `resumed_at`: the iteration of the checkpoint in --load, if the run resumes from one."""
    config, grid, pipeline, attention = parts.config, parts.mesh.grid, parts.pipeline, prepared.attention
    model, samples, delta_nets = config.model, global_batch_size(config, grid.world_size), prepared.delta_nets
    lines = [
        f"model: {format_count(count_parameters(config))} parameters, {model.num_layers} layers, "
        f"h = {model.hidden_size}, "
        f"{model.num_attention_heads} heads ({model.kv_heads} k/v), vocabulary {model.vocabulary}, "
        f"{config.training.params_dtype}",
        f"weights: {_weights(config, resumed_at)}",
        f"layout: tp {grid.tp} x cp {grid.cp} ({config.parallel.cp_comm_type}) x pp {grid.pp} "
        f"(x {pipeline.chunks} chunks) x dp {grid.dp} on {parts.device.type}",
        _simulation(config, parts.mesh.rank),
        f"batch: {samples} x {config.data.seq_length} tokens a step, "
        f"{pipeline.microbatches} microbatches of {config.training.micro_batch_size} on each model copy",
        _data(prepared.train_data, config.training.train_iters * samples),
        f"host: {prepared.placement}",
        _granularity(config, prepared),
        f"attention: {attention.name} ({attention.reason})",
        "" if delta_nets is None else f"gated delta nets: {delta_nets.name} ({delta_nets.reason})",
        describe_bits(config.hardware, parts.device.type, attention.name),
        f"MFU refers to {prepared.peak}" if parts.device.type == "cuda" else "",
        "" if parts.chosen_swap is None else parts.chosen_swap.headline(),
        "" if parts.states is None else parts.states.describe(),
        "" if parts.transients is None else f"memory of a step: {parts.transients.headline()}",
    ]
    return "\n".join(filter(None, lines))


def _weights(config: RunConfig, resumed_at: int | None) -> str:
    checkpoint = config.checkpoint
    if resumed_at is not None:
        return f"from {checkpoint.load}, at iteration {resumed_at}"
    if checkpoint.pretrained_checkpoint is not None:
        return f"from {checkpoint.pretrained_checkpoint}"
    return f"new, seed {config.training.seed}"


def _simulation(config: RunConfig, rank: int) -> str:
    world = config.parallel.simulate_world
    if world is None:
        return ""
    return (
        f"simulated: rank {rank} of {world} alone. No message is sent: times lack communication, and "
        "losses mean nothing"
    )


def _granularity(config: RunConfig, prepared: Prepared) -> str:
    """A line about the choice of --offload-granularity auto, with the flags that ask for the same."""
    if not prepared.is_granularity_chosen:
        return ""
    sweep, flags = sweep_of(config), "--offload-granularity layer"
    if sweep.tiles:
        flags = f"--offload-granularity tile --offload-tiles {sweep.tiles} --offload-slot-tiles {sweep.slot_tiles}"
        again = sweep.recompute_attention_layers
        flags += f" --recompute-attention-layers {again}" if again else ""
        flags += " --offload-hidden-states" if sweep.hidden_on_host else ""
    return f"layers: {sweep} (--offload-granularity auto chose {flags})"


def _data(dataset: object, num_samples: int) -> str:
    """A line about a dataset of memo, with one more line for each corpus of a blend; "" for a user's dataset."""
    if isinstance(dataset, BlendedDataset):
        return f"data: {dataset.describe(num_samples)}"
    if isinstance(dataset, PackedDataset | PackedConversations | PreferencePairs | TokenStream):
        return f"data: {dataset.describe()}"
    return ""
