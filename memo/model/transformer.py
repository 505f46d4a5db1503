"""A run of consecutive layers of the transformer, with the embedding and the loss where they belong.

This plain model knows nothing of swapping or pipelines: it is a chunk of layers with an input
and an output. Shapes as in `memo.model.layer`.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from memo.model.custom import make_layer
from memo.model.parts import Documents, LayerContext, ModelParts
from memo.model.rope import Rope, RopeRows, RopeTable
from memo.parallel.collectives import group_rank, group_size
from memo.parallel.embedding import VocabParallelEmbedding
from memo.parallel.hidden import Hidden
from memo.parallel.loss import LossSettings, linear_cross_entropy, logits_of, losses_and_greedy_tokens, token_losses
from memo.spec.shapes import shape_of
from memo.spec.stack import kinds_of


@dataclass(frozen=True)
class Microbatch:
    """Tokens of this context-parallel rank, all [s, b]; the same on every tp rank and stage.

    Tokens, labels and positions are int32, or int64 where memory does not matter; loss_weight is fp64.

    There are two orders: tokens, labels, positions and loss_weight are in shard order, with the tokens of tp rank 0
    first; attention_positions and documents are in the order that attention sees. The orders differ only when layers
    work on tiles of tokens, each of which is split over the tp ranks (memo.executor).

    loss_weight is the weight of each token's loss: its mask divided by the number of unmasked tokens in the global
    batch. So losses and gradients of all ranks and microbatches are simply summed. In an evaluation it is the mask.
    """

    tokens: Tensor
    labels: Tensor
    positions: Tensor
    loss_weight: Tensor
    attention_positions: Tensor
    documents: Documents


class Embedding(nn.Module):
    """Token (and learned position) embedding. Input [s, b], output [n, b, h]."""

    def __init__(self, parts: ModelParts, max_positions: int) -> None:
        super().__init__()
        self.group = parts.tp_group
        weights = shape_of(parts.config, "", max_positions).embedding_weights
        own = {weight.name: parts.parameter(weight) for weight in weights}
        self.tokens = VocabParallelEmbedding(own["embedding.weight"], parts.tp_group, _embedding_scale(parts))
        self.positions = own.get("position_embedding.weight")
        self.hidden: Hidden | None = None
        """If layers are swept, takes the output section by section."""

    def forward(self, batch: Microbatch) -> Tensor:
        own = batch.positions.chunk(group_size(self.group))[group_rank(self.group)]
        if self.hidden is not None:
            return self.tokens.in_sections(batch.tokens, own, self.positions, _in_this_pass(self.hidden))
        x: Tensor = self.tokens(batch.tokens)
        return x if self.positions is None else x + nn.functional.embedding(own, self.positions)


def _embedding_scale(parts: ModelParts) -> float:
    """The factor on embeddings, rounded as transformers does: to fp32, then to the model's dtype."""
    root = parts.config.hidden_size**0.5 if parts.config.scale_embeddings else 1.0
    return torch.tensor(root, dtype=torch.float32).to(parts.dtype).item()


class Head(nn.Module):
    """Final norm, vocabulary matrix and loss. Input [n, b, h], output the weighted loss sum of this rank.

    Backward computes the sum (memo.parallel.loss), and overwrites the input with its gradient. This is safe because
    nothing else reads the input: a layer made it for this head alone, and no layer's backward needs the layer's output.
    """

    def __init__(self, parts: ModelParts, chunk_size: int, tied_to: nn.Parameter | None) -> None:
        super().__init__()
        config = parts.config
        self.group, self.chunk_size, self.ops = parts.tp_group, chunk_size, parts.ops
        self.vocab_size, self.softcap = config.vocabulary, config.final_logit_softcapping
        table, *norm = shape_of(config, "", 0).head_weights
        own = {weight.name: parts.parameter(weight) for weight in norm}
        self.norm = parts.norm(own["final_norm.weight"], own.get("final_norm.bias"))
        self.weight = parts.parameter(table) if tied_to is None else tied_to
        self.hidden: Hidden | None = None
        """If layers are swept, gives the input section by section."""

    def forward(self, x: Tensor, batch: Microbatch) -> Tensor:
        return linear_cross_entropy(x, self.weight, batch.labels, self._settings(), batch.loss_weight)

    def token_losses(self, x: Tensor, labels: Tensor) -> Tensor:
        """Negative log-likelihood of each token, [s, b] fp32, without gradients.

        Only the logits of half a chunk exist at a time. The bytes of the other half are room for the batch, the losses
        and the normed rows of the chunk.
        """
        return token_losses(x, self.weight, labels, replace(self._settings(), chunk_size=self.chunk_size // 2))

    def losses_and_greedy_tokens(self, x: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Return the token losses, and the likeliest next token after each token, [s, b] int64; without gradients."""
        return losses_and_greedy_tokens(x, self.weight, labels, self._settings())

    def logits_of(self, x: Tensor, numbers: Tensor, count: int) -> Tensor:
        """Return next-token logits after selected tokens, [count, vocabulary] fp64; `numbers` [s, b] int64 is the row
        of each selected token, and -1 for all other tokens."""
        return logits_of(x, self.weight, numbers, count, self._settings())

    def _settings(self) -> LossSettings:
        parts = None if self.hidden is None else _in_this_pass(self.hidden)
        return LossSettings(self.norm, self.vocab_size, self.chunk_size, self.group, self.ops, parts, self.softcap)


def _in_this_pass(hidden: Hidden) -> Hidden:
    """Return the hidden states for this pass; without gradients, outside of training steps, it follows no plan."""
    return hidden if torch.is_grad_enabled() else hidden.unplanned


class TransformerChunk(nn.Module):
    """Layers `layers` of the model, after the embedding if `first`, before the loss if `last`.

    Forward takes the previous chunk's output (ignored by the first) and the microbatch; it returns
    hidden states [n, b, h], or from the last chunk the scalar loss sum of this rank, which backward computes.
    """

    def __init__(
        self,
        parts: ModelParts,
        layers: range,
        *,
        first: bool,
        last: bool,
        seq_length: int,
        loss_chunk_size: int,
    ) -> None:
        super().__init__()
        self.config, self.dtype, self.layer_indices = parts.config, parts.dtype, layers
        self.kinds = [parts.kind(index) for index in layers]
        rotating = [kind for kind in kinds_of(parts.config) if kind.rotation]
        self.ropes = {kind.rotation: Rope(kind, parts.dtype, seq_length) for kind in rotating}
        self.has_rope_by_rows = False
        """Whether layers request the rows of a few tokens at a time, so that no table of all tokens is made."""
        self.embedding = Embedding(parts, parts.config.position_rows(seq_length)) if first else None
        self.layers = nn.ModuleList(make_layer(parts, index) for index in layers)
        tie = self.embedding is not None and not parts.config.untie_embeddings_and_output_weights
        tied_to = self.embedding.tokens.weight if tie and self.embedding is not None else None
        self.head = Head(parts, loss_chunk_size, tied_to) if last else None

    def forward(self, hidden: Tensor | None, batch: Microbatch) -> Tensor:
        hidden = self.hidden_states(hidden, batch)
        if self.head is None:
            return hidden
        loss: Tensor = self.head(hidden, batch)
        return loss

    def hidden_states(self, hidden: Tensor | None, batch: Microbatch) -> Tensor:
        """Return the output of the chunk's last layer, [n, b, h]; arguments as for forward."""
        if self.embedding is not None:
            hidden = self.embedding(batch)
        assert hidden is not None, "a chunk without the embedding needs the previous chunk's output"
        for layer, context in zip(self.layers, self.contexts(batch), strict=True):
            hidden = layer(hidden, context)
        return hidden

    def contexts(self, batch: Microbatch) -> list[LayerContext]:
        """Return the context of a microbatch for each layer; layers with the same rotation share a table."""
        by_rows = {rotation: RopeRows(rope, batch.attention_positions) for rotation, rope in self.ropes.items()}
        tables: dict[tuple[float, str, int] | None, RopeRows | RopeTable] = {
            rotation: rows if self.has_rope_by_rows else rows.rows(slice(None)) for rotation, rows in by_rows.items()
        }
        return [LayerContext(tables.get(kind.rotation), batch.documents) for kind in self.kinds]
