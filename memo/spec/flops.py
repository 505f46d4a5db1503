"""Model FLOPs: those of the mathematics, without recomputation, padding or the optimizer.

Source: MEMO, section 5.1: 6 s P + 6 n h s^2 a sample, forward and backward, with the causal half of attention. Then MFU
= tokens per second per device x FLOPs per token / peak. Known error: packed documents need less attention than the one
long document that is counted here, as is the convention of the field.
"""

from functools import lru_cache

from memo.config import ModelConfig, RunConfig
from memo.config.derived import global_batch_size
from memo.spec.shapes import shape_of
from memo.spec.stack import stack_of
from memo.spec.window import attended_pairs


@lru_cache(maxsize=256)
def matmul_parameters(model: ModelConfig) -> int:
    """P: weights that multiply a token: the matrices of the layers, and the head once. With experts only those count
    that a token runs through.

    For the paper's GPT models this is its 12 n h^2 + v h. An untied embedding is looked up, not multiplied.
    """
    shape = shape_of(model, "", 0)
    return sum(layer.multiplied for layer in shape.of_layers) + model.hidden_size * model.vocabulary


def model_flops_per_token(model: ModelConfig, seq_length: int) -> int:
    """6 P + 6 n (heads x head size) s: 2 forward and 4 backward FLOPs a weight, and causal attention. A frozen weight
    has no gradient, and so 2 FLOPs less.

    Attention: scores and weighted sum take 4 s h FLOPs a token forward, half of it under the causal mask, and twice as
    much backward. Under a sliding window a token has fewer scores than s / 2.
    """
    attention = sum(_attention_elements(kind, seq_length) for kind in stack_of(model))
    return 6 * matmul_parameters(model) - 2 * _frozen_parameters(model) + 6 * attention


@lru_cache(maxsize=256)
def _frozen_parameters(model: ModelConfig) -> int:
    """The weights of P that are not trained."""
    shape = shape_of(model, "", 0)
    head = model.hidden_size * model.vocabulary if shape.head_weights[0].frozen else 0
    return sum(layer.multiplied_frozen for layer in shape.of_layers) + head


def _attention_elements(kind: ModelConfig, seq_length: int) -> int:
    """Width of all heads, of queries and values on average, times the scores of a token. A gated delta net reads a
    head's matrix for the key, writes it, and reads it for the query."""
    width = kind.num_attention_heads * (kind.head_dim + kind.value_dim) // 2
    window = kind.window(seq_length)
    if kind.is_linear:
        return width * 3 * kind.head_dim
    return width * (seq_length if window is None else 2 * attended_pairs(seq_length, window) // seq_length)


def microbatch_flops(config: RunConfig) -> float:
    """FLOPs of forward and backward of one microbatch on one rank, as if all ranks had equal work."""
    seq_length = config.data.seq_length
    tokens = seq_length * config.training.micro_batch_size
    return tokens * model_flops_per_token(config.model, seq_length) / config.parallel.model_ranks


def step_flops(config: RunConfig, world_size: int) -> int:
    """FLOPs of one optimizer step over all ranks."""
    seq_length = config.data.seq_length
    tokens = seq_length * global_batch_size(config, world_size)
    return tokens * model_flops_per_token(config.model, seq_length)
