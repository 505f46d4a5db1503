"""Exact parameter counts: of the whole model, and of one rank of each pipeline stage.

Known error: none for the model; a rank's flat buffers also round every parameter up to 64 elements.
"""

from dataclasses import dataclass

from memo.config import ModelConfig, RunConfig
from memo.config.derived import num_position_embeddings, vocab_rows_per_rank


@dataclass(frozen=True)
class LayerParameters:
    """One transformer layer: what tp splits, and what every tp rank holds in full (norms, late biases)."""

    split: int
    replicated: int

    @property
    def total(self) -> int:
        return self.split + self.replicated


@dataclass(frozen=True)
class ParameterCount:
    """The whole model; padding rows of the vocabulary belong to no model and are not counted."""

    embedding: int
    positions: int
    """The learned position table; 0 for RoPE."""
    layers: int
    final_norm: int
    head: int
    """0 when the head is the embedding's matrix."""

    @property
    def total(self) -> int:
        return self.embedding + self.positions + self.layers + self.final_norm + self.head


def layer_parameters(model: ModelConfig) -> LayerParameters:
    """Weights and biases of one layer."""
    hidden, ffn = model.hidden_size, model.ffn_size
    q_size, kv_size = model.num_attention_heads * model.head_dim, model.kv_heads * model.head_dim
    qkv_size = q_size + 2 * kv_size
    fc1_size = ffn * (2 if model.gated else 1)
    split = hidden * (qkv_size + q_size + fc1_size + ffn)
    replicated = 2 * _norm_parameters(model, hidden)
    if model.qkv_bias:
        split += qkv_size
    if model.add_bias_linear:
        split += fc1_size
        replicated += 2 * hidden  # projection and fc2: added after the sum over tp ranks
    if model.qk_layernorm:
        replicated += 2 * _norm_parameters(model, model.head_dim)
    return LayerParameters(split, replicated)


def count_parameters(config: RunConfig) -> ParameterCount:
    """Parameters of the model as its checkpoint holds them."""
    model = config.model
    table = model.vocabulary * model.hidden_size
    return ParameterCount(
        embedding=table,
        positions=num_position_embeddings(config) * model.hidden_size,
        layers=model.num_layers * layer_parameters(model).total,
        final_norm=_norm_parameters(model, model.hidden_size),
        head=table if model.untie_embeddings_and_output_weights else 0,
    )


def stage_parameters(config: RunConfig, stage: int) -> int:
    """Parameters that one rank of a pipeline stage holds, vocabulary padding included.

    A tied matrix exists on the first and on the last stage, once where they are the same.
    """
    model, parallel = config.model, config.parallel
    layer = layer_parameters(model)
    count = model.num_layers // parallel.pp * (layer.split // parallel.tp + layer.replicated)
    table = vocab_rows_per_rank(model.vocabulary, parallel.tp) * model.hidden_size
    is_first, is_last = stage == 0, stage == parallel.pp - 1
    if is_first:
        count += table + num_position_embeddings(config) * model.hidden_size
    if is_last:
        count += _norm_parameters(model, model.hidden_size)
        if model.untie_embeddings_and_output_weights or not is_first:
            count += table
    return count


def paper_parameters(model: ModelConfig) -> int:
    """MEMO's count for its GPT models, 12 n h^2 + v h: fc of 4 h, tied embedding, no norms, no biases."""
    return 12 * model.num_layers * model.hidden_size**2 + model.vocabulary * model.hidden_size


def _norm_parameters(model: ModelConfig, size: int) -> int:
    return size * (2 if model.normalization == "LayerNorm" else 1)
