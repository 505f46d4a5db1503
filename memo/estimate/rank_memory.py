"""Memory of one rank of Megatron-LM on a GPU, by component, in closed form. All sizes are bytes.

    component         plain                               recompute full          swapping at alpha
    weights           2 P                                 =                       =
    gradients         4 P (fp32)                          =                       =
    optimizer         12 P / (dp cp): masters, moments    =                       =
    state_slots       0; slots of states that stream, of which the three above then hold less (state_memory)
    skeletal          layers in flight x a layer's        x a layer's input       hidden states between stages
    rounding_buffers  0                                   0                       slots (memo.estimate.swap_memory)
    transient         the larger of a layer's backward and the loss, and hidden states before and after the layers
    communication     cp's, and the optimizer step's      =                       =
    context           CUDA, holes: 0.1 GiB + 0.12 P       =                       =
    host              states in host memory               =                       = and host records

P is the number of parameters of the rank, with the padding of the vocabulary, counted from the model's shape. Each
moment in bf16 takes 2 P less. The number of layers in flight is that of 1F1B, interleaved or not. `communication` and
`context` are fitted to published runs (memo.estimate.calibration); all other components are counted.

Known error: within 2 % of the device's memory on the 232 runs of the calibration. The bytes of a layer are those that
memo saves. Megatron-LM saves less by a factor of 1.2, as its SwiGLU is one kernel unless told otherwise; the difference
makes up for the holes of Megatron-LM's allocator. Layers under a swap plan and states in slots were not measured; where
states stream, reduced gradients are counted instead of the fitted STEP_BYTES.
"""

import math
from typing import NamedTuple

from memo.config import RunConfig
from memo.config.derived import (
    rank_tokens,
    resolved_dtype,
    vocab_rows_per_rank,
)
from memo.errors import ConfigError
from memo.estimate.calibration import CONTEXT_GIB, CONTEXT_SHARE, CP_GIB, STEP_BYTES
from memo.estimate.state_memory import StateSizes, placed_bytes, state_sizes
from memo.estimate.swap_memory import swap_bytes, working_set_bytes
from memo.spec.buckets import RankUnits, Unit, layer_unit
from memo.spec.layer_ops import layers_in_flight
from memo.spec.parameters import end_weights
from memo.spec.placement import StatePlacement, placement_of
from memo.spec.schedule import pipeline_of
from memo.spec.shapes import ModelShape
from memo.spec.skeleton import skeletal_tensors
from memo.spec.slots import Moved
from memo.spec.stack import of_stage
from memo.spec.weights import Weight
from memo.units import GIB, element_bytes

WHOLE_LOGIT_BYTES = 10
"""Bytes of each logit if the loss is not chunked, as in Megatron-LM. The calibration's runs show this number. The code
asks for 6 at the release of these runs (core_r0.8.0): the logit in bf16, and a copy in fp32 on which the loss works in
place. With 6 no fit would place all runs rightly (memo.estimate.calibration)."""


class RankMemory(NamedTuple):
    """Bytes of one rank at the peak of a step. The total is the sum of all fields but `host`, which is host memory."""

    weights: int
    gradients: int
    optimizer: int
    state_slots: int
    skeletal: int
    rounding_buffers: int
    transient: int
    communication: int
    context: int
    host: int

    @property
    def states(self) -> int:
        return self.weights + self.gradients + self.optimizer + self.state_slots

    @property
    def activations(self) -> int:
        return self.skeletal + self.rounding_buffers + self.transient

    @property
    def allocated(self) -> int:
        """Bytes that are requested from torch's allocator."""
        return self.states + self.activations

    @property
    def total(self) -> int:
        return self.allocated + self.communication + self.context


def rank_memory(
    config: RunConfig,
    shape: ModelShape,
    world_size: int,
    stage: int,
    *,
    logit_bytes: int | None = None,
    moved: Moved | None = None,
) -> RankMemory:
    """Memory of a rank of pipeline stage `stage` at the peak of a step.

    Args:
        config: a checked configuration with --device cuda.
        shape: the model whose parameters are counted; its sizes must equal those of the configuration.
        logit_bytes: bytes of each logit if the loss keeps the logits of all tokens at once, as Megatron-LM does
            (WHOLE_LOGIT_BYTES); default: it keeps those of --loss-chunk-size tokens.
        moved: what a swap plan moves; default: what --offload-alpha says if it is a number. With off and auto there is
            no swap plan.
    """
    placement, sizes = placement_of(config, world_size), state_sizes(config, world_size)
    units = shape_units(config, shape, stage, sizes.shards)
    states = placed_bytes(units, placement, sizes)
    alpha = config.memory.offload_alpha
    layers = _layers(config, world_size, stage, alpha if moved is None and isinstance(alpha, float) else moved)
    loss = _loss_bytes(config, stage, logit_bytes)
    cp_bytes = CP_GIB * GIB * math.log2(config.parallel.cp)
    return RankMemory(
        weights=states.weights,
        gradients=states.gradients,
        optimizer=states.optimizer,
        state_slots=states.slots + states.staging,
        skeletal=layers.kept,
        rounding_buffers=layers.buffers,
        transient=ends_bytes(config) + max(layers.working, loss),
        communication=math.ceil(cp_bytes) + _step_bytes(units, placement, sizes),
        context=int(CONTEXT_GIB * GIB) + int(CONTEXT_SHARE * (states.gradients + states.slots)),
        host=layers.host + states.host,
    )


def shape_units(config: RunConfig, shape: ModelShape, stage: int, num_shards: int) -> RankUnits:
    """The parameters of a rank of a stage, as memo.spec.buckets counts them, but for any shape and without padding."""
    parallel = config.parallel
    layers, ends = [], []
    for layer in of_stage(shape.of_layers, parallel.pp, parallel.vpp, stage):
        largest = layer_unit(layer.nearest, parallel.tp, parallel.ddp_bucket_size, num_shards).largest
        frozen = _frozen(layer.layer_weights, parallel.tp)
        coded = sum(weight.local_numel(parallel.tp) for weight in layer.layer_weights if weight.coded)
        count = layer.layer_split // parallel.tp + layer.layer_replicated - frozen
        layers.append(Unit(count, count, min(count, largest), frozen - coded, coded, coded))
    for weights in end_weights(shape, parallel.pp, stage):
        if weights:
            frozen = _frozen(weights, parallel.tp)
            count = sum(weight.local_numel(parallel.tp) for weight in weights) - frozen
            ends.append(Unit(count, count, count, frozen))
    return RankUnits(tuple(layers), tuple(ends))


def _frozen(weights: tuple[Weight, ...], tp: int) -> int:
    return sum(weight.local_numel(tp) for weight in weights if weight.frozen)


def _step_bytes(units: RankUnits, placement: StatePlacement, sizes: StateSizes) -> int:
    """Bytes that the optimizer's step takes in addition to the states.

    Fitted if all states stay on the device. Else the shards of reduced gradients are counted: all shards of modules
    that are updated on the device, and the largest shard of the other modules.
    """
    layer, ends = units.layer.size, [end.size for end in units.ends]
    if not placement.streams:
        return math.ceil(STEP_BYTES * (units.rest(0).size + sum(ends)) / sizes.shards)
    if sizes.shards == 1:
        return 0
    is_whole = not placement.shards_gradients
    reduced = units.rest(placement.optimizer).size * is_whole
    passing = [layer] if is_whole and placement.optimizer > placement.gradients else []
    if placement.ends_on_host:
        passing += ends
    else:
        reduced += sum(ends)
    return math.ceil((reduced + max(passing, default=0)) * sizes.wide / sizes.shards)


def worst_rank(
    config: RunConfig,
    shape: ModelShape,
    world_size: int,
    *,
    logit_bytes: int | None = None,
    moved: Moved | None = None,
) -> RankMemory:
    """Memory of the stage with the highest total.

    That is the first one, which has the most microbatches in flight, or the last one, which has the head.
    """
    ends = {0, config.parallel.pp - 1}
    ranks = (
        rank_memory(config, shape, world_size, stage, logit_bytes=logit_bytes, moved=moved) for stage in sorted(ends)
    )
    return max(ranks, key=lambda rank: rank.total)


class _Layers(NamedTuple):
    """Bytes of all layers of one rank.

    Attributes:
        kept: bytes between forward and backward, outside of rounding buffers.
        buffers: bytes of rounding buffers.
        working: bytes that one layer takes while it runs.
        host: bytes of host memory.
    """

    kept: int
    buffers: int
    working: int
    host: int


def _layers(config: RunConfig, world_size: int, stage: int, moved: Moved | None) -> _Layers:
    passes = layers_in_flight(pipeline_of(config, world_size), config.model.num_layers, stage)
    layer, hidden = layer_activation_bytes(config), hidden_bytes(config)
    gathered = 2 * hidden  # a layer's input and its gradient, gathered over tp
    memory, tp = config.memory, config.parallel.tp
    if moved is not None:
        if memory.sweeps:
            raise ConfigError(
                "--offload-granularity tile: Megatron-LM's account only knows layers that are not swept: use memo's "
                "own account, or --offload-granularity layer"
            )
        swap = swap_bytes(config, world_size, stage, moved)
        per_stage = config.parallel.layers_per_chunk(config.model.num_layers)
        between = 0 if config.parallel.pp == 1 else 2 * (passes // per_stage) * hidden // tp
        return _Layers(between, swap.rounding_buffers, working_set_bytes(config), swap.host)
    if memory.recompute_granularity == "full":
        return _Layers(passes * hidden // tp, 0, 2 * layer + gathered, 0)
    if memory.recompute_granularity == "selective":
        _, wide = _element_bytes(config)
        lse = rank_tokens(config) * config.model.num_attention_heads * wide // tp
        return _Layers(passes * (layer - lse), 0, layer + gathered, 0)
    return _Layers(passes * layer, 0, layer + gathered, 0)


def layer_activation_bytes(config: RunConfig) -> int:
    """Bytes that one layer keeps of one microbatch on one rank, between its forward and its backward."""
    model, (narrow, wide) = config.model, _element_bytes(config)
    per_token = sum(tensor.width * (wide if tensor.dtype == "wide" else narrow) for tensor in skeletal_tensors(model))
    if model.position_embedding_type == "rope":  # q and k after RoPE, beside the fused qkv, which v keeps alive
        per_token += narrow * (model.num_attention_heads + model.kv_heads) * model.head_dim
    if model.gated:
        per_token += narrow * (
            model.token_ffn_size + model.shared_ffn_size
        )  # silu(gate), beside fc1's output and the product
    return rank_tokens(config) * per_token // config.parallel.tp


def _loss_bytes(config: RunConfig, stage: int, logit_bytes: int | None) -> int:
    """Bytes of the loss; `logit_bytes`: bytes of a logit if all logits exist at once, None if the loss is chunked."""
    tokens, (narrow, wide) = rank_tokens(config), _element_bytes(config)
    if stage != config.parallel.pp - 1:
        return 0
    rows = vocab_rows_per_rank(config.model.vocabulary, config.parallel.tp)
    if logit_bytes is not None:
        return tokens * rows * logit_bytes
    # One chunk's logits, and the head's gradient in both widths (memo.parallel.loss).
    chunk = min(config.training.loss_chunk_size, tokens) * rows * (wide if narrow == wide else wide + narrow)
    return chunk + rows * config.model.hidden_size * (wide + 2 * narrow)


def ends_bytes(config: RunConfig) -> int:
    """Hidden states before and after the layers, their gradient, and the output of the final norm."""
    return 4 * hidden_bytes(config) // config.parallel.tp


def hidden_bytes(config: RunConfig) -> int:
    """Hidden states of all tokens of a context-parallel rank."""
    return rank_tokens(config) * config.model.hidden_size * _element_bytes(config)[0]


def _element_bytes(config: RunConfig) -> tuple[int, int]:
    return element_bytes(resolved_dtype(config.training, "cuda"))


def components(memory: RankMemory) -> dict[str, int]:
    """The bytes by field name, for tables; `host` comes last."""
    return memory._asdict()
