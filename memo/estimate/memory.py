"""Memory of one rank of the plain path: no swapping, no recomputation. Closed forms, in bytes.

Terms and where they come from:
  weights, gradients, optimizer   memo.parallel.data: flat weights, fp32 gradients, shards of masters, moments
  state_slots, host               of states that come and go, and of those in host memory (memo.estimate.state_memory)
  activations                     what autograd keeps for the layers' backward, x microbatches in flight
  ends                            hidden states and gradients at both ends of the layers, RoPE's table
  workspace                       the larger of one layer's backward and one chunk of the loss
  runtime                         Python, torch and its communication before the model exists
  slack                           what allocators round up, keep and cut in pieces, and buffers of communication

Known error: 1.0 to 1.3 times the peak resident set of a rank, in 16 runs on CPU with torch 2.13: GPT, GPT-2,
Llama and Qwen3, 0.8M to 160M parameters, fp32, fp64 and bf16, 256 to 64K tokens, alone and with tp, cp, pp or
dp of 2. Not measured on CUDA, nor at larger sizes.
"""

import math
from dataclasses import dataclass, fields

from memo.config import RunConfig
from memo.config.derived import num_microbatches, resolved_dtype, vocab_rows_per_rank
from memo.estimate.state_memory import placed_bytes, state_sizes
from memo.spec.buckets import RankUnits, Unit, layer_unit
from memo.spec.layer_ops import layers_in_flight
from memo.spec.parameters import layer_parameters, stage_parameters
from memo.spec.placement import placement_of
from memo.spec.skeleton import skeletal_tensors
from memo.units import DTYPE_BYTES, MIB

RUNTIME_BYTES = {"cpu": 352 * MIB, "cuda": 1024 * MIB}
"""cpu: resident set of a trainer with next to no model (torch 2.13); cuda: assumed, not measured."""

SLACK = 0.20
"""Share of all other terms; without it they come to 0.84 (several ranks) to 1.08 (hardly a model) of the
measured peaks."""


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes of one rank at the peak of a step; the fields add up to the total. `host`: states in the host arena."""

    weights: int
    gradients: int
    optimizer: int
    state_slots: int
    host: int
    activations: int
    ends: int
    workspace: int
    runtime: int
    slack: int

    @property
    def total(self) -> int:
        return sum(getattr(self, component.name) for component in fields(self))


def estimate_memory(config: RunConfig, world_size: int, stage: int) -> MemoryEstimate:
    """Peak of a rank of pipeline stage `stage` (0 .. pp - 1).

    --device auto counts as cpu; pass a configuration whose device is resolved.
    """
    parallel = config.parallel
    device = "cuda" if config.hardware.device == "cuda" else "cpu"
    narrow = DTYPE_BYTES[resolved_dtype(config, device)]
    wide = max(4, narrow)
    sizes = state_sizes(config, world_size)
    states = placed_bytes(_units(config, stage, sizes.shards), placement_of(config, world_size), sizes)
    # The result of the reduce-scatter is a second copy of the shard for a moment.
    reduced = 0 if sizes.shards == 1 else states.gradients / sizes.shards
    in_flight = layers_in_flight(config, num_microbatches(config, world_size), stage)
    layer_bytes = layer_activation_bytes(config)
    tokens = config.data.seq_length * config.training.micro_batch_size // parallel.cp
    hidden_bytes = tokens * config.model.hidden_size * narrow
    terms = {
        "weights": states.weights,
        "gradients": math.ceil(states.gradients + reduced),
        "optimizer": states.optimizer,
        "state_slots": states.slots + states.staging,
        "activations": in_flight * layer_bytes,
        # Input, output and gradient of the chunk, the final norm's output, and RoPE's cos and sin.
        "ends": 4 * hidden_bytes // parallel.tp + tokens * config.model.head_dim * narrow,
        # A layer's gradients are as large as what it saved; x and its gradient exist gathered over tp.
        "workspace": max(layer_bytes + 2 * hidden_bytes, loss_bytes(config, tokens, narrow, wide, stage)),
        "runtime": RUNTIME_BYTES[device],
    }
    return MemoryEstimate(**terms, host=states.host, slack=math.ceil(SLACK * sum(terms.values())))


def _units(config: RunConfig, stage: int, num_shards: int) -> RankUnits:
    """Without padding."""
    parallel, per_layer = config.parallel, layer_parameters(config.model)
    layers, layer = config.model.num_layers // parallel.pp, per_layer.split // parallel.tp + per_layer.replicated
    ends = stage_parameters(config, stage) - layers * layer
    largest = layer_unit(config.model, parallel.tp, parallel.ddp_bucket_size, num_shards).largest
    return RankUnits(Unit(layer, layer, min(layer, largest)), layers, (Unit(ends, ends, ends),) if ends else ())


def layer_activation_bytes(config: RunConfig) -> int:
    """What one layer keeps of one microbatch on one rank, in bytes."""
    device = "cuda" if config.hardware.device == "cuda" else "cpu"
    narrow = DTYPE_BYTES[resolved_dtype(config, device)]
    wide = max(4, narrow)
    model, parallel = config.model, config.parallel
    tokens = config.data.seq_length * config.training.micro_batch_size // parallel.cp
    per_token = sum(tensor.width * (wide if tensor.dtype == "wide" else narrow) for tensor in skeletal_tensors(model))
    per_token += narrow * _rotated_elements(config)
    if model.gated:
        per_token += narrow * model.ffn_size  # silu(gate), beside fc1's output and the product
    if model.normalization == "RMSNorm" and device == "cpu":
        per_token += _composed_norm_bytes(config, narrow, wide)
    return tokens * per_token // parallel.tp


def _rotated_elements(config: RunConfig) -> int:
    """q and k after RoPE are kept beside the fused qkv, which v keeps alive."""
    model = config.model
    if model.position_embedding_type != "rope":
        return 0
    return (model.num_attention_heads + model.kv_heads) * model.head_dim


def _composed_norm_bytes(config: RunConfig, narrow: int, wide: int) -> int:
    """Bytes a token that RMSNorm keeps on CPU beyond its input and output, as torch composes it there.

    It keeps the normalized input; of a narrow input also a wide copy, instead of the input itself, which
    stays only where others need it (q and k, as parts of the fused qkv).
    """
    model = config.model
    hidden = 2 * model.hidden_size
    heads = (model.num_attention_heads + model.kv_heads) * model.head_dim if model.qk_layernorm else 0
    if narrow == wide:
        return wide * (hidden + heads)
    return 2 * wide * (hidden + heads) - narrow * hidden


def loss_bytes(config: RunConfig, tokens: int, narrow: int, wide: int, stage: int) -> int:
    """Logits of one chunk, and the head's gradient in both widths (memo.parallel.loss)."""
    if stage != config.parallel.pp - 1:
        return 0
    rows = vocab_rows_per_rank(config.model.vocabulary, config.parallel.tp)
    chunk = min(config.training.loss_chunk_size, tokens)
    logits = chunk * rows * (wide if narrow == wide else wide + narrow)
    return logits + rows * config.model.hidden_size * (wide + 2 * narrow)
