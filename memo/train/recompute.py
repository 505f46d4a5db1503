"""Activation recomputation as in Megatron (--recompute-granularity), the usual alternative to swapping.

full: a layer keeps its input alone and runs forward again before its backward. selective: attention's output
and log-sum-exp are computed again from q, k and v. With kernels that never form the score matrix that frees
little (the output is also the projection's input); it is here for comparison.
"""

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from memo.config.memory import RecomputeGranularity
from memo.model.layer import CoreAttention
from memo.model.transformer import TransformerChunk


class RecomputedLayer(nn.Module):
    """A layer whose activations, except its input, are computed again in backward."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor, context: Any) -> Tensor:
        # Layers draw no random numbers, so there is no state to restore.
        y: Tensor = checkpoint(self.layer, x, context, use_reentrant=False, preserve_rng_state=False)
        return y


def recompute_layers(granularity: RecomputeGranularity, chunks: Sequence[TransformerChunk]) -> None:
    """Wrap every layer for full recomputation; otherwise do nothing."""
    if granularity == "full":
        for chunk in chunks:
            chunk.layers = nn.ModuleList(RecomputedLayer(layer) for layer in chunk.layers)


def recompute_attention(granularity: RecomputeGranularity, attention: CoreAttention) -> CoreAttention:
    """Attention that keeps only its inputs, for selective recomputation; otherwise as it is."""
    if granularity != "selective":
        return attention

    def recomputed(q: Tensor, k: Tensor, v: Tensor, documents: Any) -> Tensor:
        out: Tensor = checkpoint(attention, q, k, v, documents, use_reentrant=False, preserve_rng_state=False)
        return out

    return recomputed
