"""Heads of queries, keys and values: from the output of the matrices to that of attention. Shapes as in
memo.model.layer."""

import torch
from torch import Tensor, nn

from memo.model.norm import Norm
from memo.model.parts import LayerContext, ModelParts
from memo.model.rope import RopeTable
from memo.parallel.collectives import group_size
from memo.parallel.split_norm import split_norms


class Heads(nn.Module):
    """From q, k and v side by side to the output of attention: norms of heads, RoPE, causal attention."""

    q_norm: Norm | None
    k_norm: Norm | None
    sinks: nn.Parameter | None

    def __init__(self, parts: ModelParts, layer: int) -> None:
        super().__init__()
        config, tp = parts.kind(layer), group_size(parts.tp_group)
        self.head_dim, self.keys_as_values = config.head_dim, config.full_keys_as_values
        self.heads = [config.num_attention_heads // tp, config.kv_heads // tp, config.kv_heads // tp]
        self.norms_values, self.epsilon = config.v_layernorm, config.norm_epsilon
        self.across_heads, self.group = config.qk_layernorm_across_heads, parts.tp_group
        self.core, self.ops = parts.attention(layer), parts.ops
        self.q_norm = self.k_norm = self.sinks = None

    def attend(self, qkv: Tensor, context: LayerContext) -> Tensor:
        """[s, b, (a + 2k) d] -> [s, b, a d]."""
        q, k, v = self.prepare(qkv, None if context.rope is None else context.rope.rows(slice(None)))
        return self.core(q, k, v, context.documents, self.sinks).flatten(2)

    def prepare(self, qkv: Tensor, rope: RopeTable | None) -> tuple[Tensor, Tensor, Tensor]:
        """Matrix output [s, b, (a + 2k) d] -> q, k and v for attention: heads, with q and k normed and rotated."""
        q, k, v = self.normed_heads(qkv)
        return (q, k, v) if rope is None else (self._rotated(q, rope.of_queries), self._rotated(k, rope), v)

    def _rotated(self, x: Tensor, rope: RopeTable) -> Tensor:
        turned, rest = x.tensor_split([2 * rope.cos.shape[-1]], dim=-1)
        turned = self.ops.rotate(turned, rope.cos, rope.sin)
        rest = rest if rope.rest is None else rest * rope.rest
        return torch.cat((turned, rest), dim=-1) if rest.shape[-1] else turned

    # Token-wise: on any range of tokens, with their rows of the RoPE table.

    def normed_heads(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Heads of q, k and v, [..., d]: views of qkv, except that normed ones are new tensors."""
        heads = qkv.unflatten(-1, (-1, self.head_dim))
        if self.keys_as_values:
            q, k = heads.split(self.heads[:2], dim=2)
            v = k
        else:
            q, k, v = heads.split(self.heads, dim=2)
        if self.q_norm is not None and self.k_norm is not None:
            norm = self._across_heads if self.across_heads else _each_head
            q, k = norm((self.q_norm, self.k_norm), (q, k))
        if self.norms_values:
            v = self.ops.norm(v, v.new_ones(self.head_dim), None, self.epsilon)
        return q, k, v

    def _across_heads(self, norms: tuple[Norm, Norm], heads: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
        """Norm all heads of q together, and all heads of k together, over all tp ranks."""
        flat = tuple(x.flatten(2) for x in heads)
        if group_size(self.group) == 1:
            made = _each_head(norms, flat)
        else:
            made = split_norms(flat, [norm.factor for norm in norms], norms[0].epsilon, self.group)
        return tuple(y.view_as(x) for y, x in zip(made, heads, strict=True))

    def rotate_(self, q: Tensor, k: Tensor, rope: RopeTable | None, *, back: bool = False) -> None:
        """Apply RoPE to q and k in place, outside of autograd; with `back` to their gradients."""
        if rope is not None:
            for heads, table in ((q, rope.of_queries), (k, rope)):
                width = 2 * table.cos.shape[-1]
                turned = heads if width == heads.shape[-1] else heads[..., :width]
                self.ops.rotate_(turned, table.cos, table.sin, back=back)
                if table.rest is not None:
                    heads[..., width:].mul_(table.rest)


def _each_head(norms: tuple[Norm, Norm], heads: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(norm(x) for norm, x in zip(norms, heads, strict=True))
