"""Names and shapes of the global tensors that make up a model."""

import torch
from torch import Tensor

from memo.config.model import ModelConfig
from memo.model.layer import Documents, ModelParts
from memo.model.transformer import TransformerChunk
from memo.parallel.shards import ShardedParameter


def global_shapes(model: ModelConfig, num_positions: int) -> dict[str, tuple[int, ...]]:
    """{global name: shape} in the model's order, read from a model that has no memory.

    `num_positions`: rows of a learned position table, if the model has one.
    """
    parts = ModelParts(model, torch.float32, None, _no_attention)
    chunk = TransformerChunk(
        parts, range(model.num_layers), first=True, last=True, max_positions=num_positions, loss_chunk_size=1
    )
    parameters = [parameter for parameter in chunk.parameters() if isinstance(parameter, ShardedParameter)]
    return {piece.name: piece.global_shape for parameter in parameters for piece in parameter.shard.pieces}


def _no_attention(q: Tensor, k: Tensor, v: Tensor, documents: Documents) -> Tensor:
    raise AssertionError("a model built for its shapes computes nothing")
