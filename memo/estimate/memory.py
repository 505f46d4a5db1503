"""Memory of one rank of the plain path: no swapping, no recomputation. Closed forms, in bytes.

Terms and where they come from:
  weights, gradients, optimizer   memo.parallel.data: flat weights, fp32 gradients, shards of masters, moments
  activations                     what autograd keeps for the layers' backward, x microbatches in flight
  ends                            hidden states and gradients between layers, RoPE's table, embedding's mask
  workspace                       the larger of one layer's backward and one chunk of the loss
  runtime                         Python, torch and its communication before the model exists

Known errors: see KNOWN_ERROR below.
"""

import math
from dataclasses import dataclass, fields

from memo.config import RunConfig
from memo.config.derived import (
    data_parallel_size,
    num_microbatches,
    resolved_dtype,
    vocab_rows_per_rank,
)
from memo.estimate.parameters import stage_parameters
from memo.units import DTYPE_BYTES, MIB

RUNTIME_BYTES = {"cpu": 256 * MIB, "cuda": 1024 * MIB}
"""cpu: 240 MiB of private memory after `import torch`, gloo and one product (torch 2.13); cuda: assumed."""


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes of one rank at the peak of a step; the fields add up to the total."""

    weights: int
    gradients: int
    optimizer: int
    activations: int
    ends: int
    workspace: int
    runtime: int

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
    parameters = stage_parameters(config, stage)
    shard = parameters / (data_parallel_size(config, world_size) * parallel.cp)
    # The result of the reduce-scatter is a second copy of the shard for a moment.
    reduced = 0 if shard == parameters else shard
    in_flight = layers_in_flight(config, num_microbatches(config, world_size), stage)
    layer_bytes = layer_activation_bytes(config)
    tokens = config.data.seq_length * config.training.micro_batch_size // parallel.cp
    hidden_bytes = tokens * config.model.hidden_size * narrow
    return MemoryEstimate(
        weights=parameters * narrow,
        gradients=math.ceil((parameters + reduced) * wide),
        # A master copy only where weights are narrower than their gradients; two moments always.
        optimizer=math.ceil(shard * wide * (2 if narrow == wide else 3)),
        activations=in_flight * layer_bytes,
        # Input, output and gradient of the chunk, the final norm's output, and RoPE's cos and sin.
        ends=4 * hidden_bytes // parallel.tp + tokens * config.model.head_dim * narrow,
        # A layer's gradients are as large as what it saved; x and its gradient exist gathered over tp.
        workspace=max(layer_bytes + 2 * hidden_bytes, _loss_bytes(config, tokens, narrow, wide, stage)),
        runtime=RUNTIME_BYTES[device],
    )


def layer_activation_bytes(config: RunConfig) -> int:
    """What one layer keeps of one microbatch on one rank, in bytes."""
    device = "cuda" if config.hardware.device == "cuda" else "cpu"
    narrow = DTYPE_BYTES[resolved_dtype(config, device)]
    wide = max(4, narrow)
    model, parallel = config.model, config.parallel
    tokens = config.data.seq_length * config.training.micro_batch_size // parallel.cp
    per_token = narrow * (sum(skeletal_elements(config).values()) + _rotated_elements(config))
    per_token += wide * model.num_attention_heads  # log-sum-exp
    if model.gated:
        per_token += narrow * model.ffn_size  # silu(gate), beside fc1's output and the product
    if model.normalization == "RMSNorm" and device == "cpu":
        # torch's CPU RMSNorm is composed: it keeps the normalized input too, and a wide copy of narrow input.
        per_token += wide * (1 if narrow == wide else 2) * _normalized_elements(config)
    return tokens * per_token // parallel.tp


def skeletal_elements(config: RunConfig) -> dict[str, int]:
    """Elements a token of MEMO's skeletal activations of one layer, before division by tp x cp.

    For a GPT of the paper these are its 16 units of h: 1 + 1 + 3 + 1 + 1 + 1 + 4 + 4 (section 3).
    """
    model = config.model
    q_size, kv_size = model.num_attention_heads * model.head_dim, model.kv_heads * model.head_dim
    return {
        "input": model.hidden_size,
        "attention_norm": model.hidden_size,
        "qkv": q_size + 2 * kv_size,
        "attention": q_size,
        "residual": model.hidden_size,
        "mlp_norm": model.hidden_size,
        "fc1": model.ffn_size * (2 if model.gated else 1),
        "activation": model.ffn_size,
    }


def layers_in_flight(config: RunConfig, microbatches: int, stage: int) -> int:
    """Layers x microbatches whose activations a stage holds at the peak of (interleaved) 1F1B."""
    pp, vpp = config.parallel.pp, config.parallel.vpp
    warmup = pp - 1 - stage if vpp == 1 else 2 * (pp - 1 - stage) + (vpp - 1) * pp
    return min(warmup + 1, microbatches * vpp) * (config.model.num_layers // (pp * vpp))


def _rotated_elements(config: RunConfig) -> int:
    """q and k after RoPE are kept beside the fused qkv, which v keeps alive."""
    model = config.model
    if model.position_embedding_type != "rope":
        return 0
    return (model.num_attention_heads + model.kv_heads) * model.head_dim


def _normalized_elements(config: RunConfig) -> int:
    """Elements a token that pass through the norms of one layer."""
    model = config.model
    heads = (model.num_attention_heads + model.kv_heads) * model.head_dim if model.qk_layernorm else 0
    return 2 * model.hidden_size + heads


def _loss_bytes(config: RunConfig, tokens: int, narrow: int, wide: int, stage: int) -> int:
    """Logits of one chunk, and the head's gradient in both widths (memo.parallel.loss)."""
    if stage != config.parallel.pp - 1:
        return 0
    rows = vocab_rows_per_rank(config.model.vocabulary, config.parallel.tp)
    chunk = min(config.training.loss_chunk_size, tokens)
    logits = chunk * rows * (wide if narrow == wide else wide + narrow)
    return logits + rows * config.model.hidden_size * (wide + 2 * narrow)
