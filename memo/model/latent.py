"""Multi-latent attention (DeepSeek-V2, 2024): queries, keys and values are made from narrow latents of each token.

    latent    x W, of all tokens on every tp rank: of queries [c_q] (or none), of keys and values [c], and the rotated
              channels of the token's key [r], which all heads share
    normed    each latent with a norm of its own; the r channels as they are
    q         normed latent of queries (or x) W_q: for each head n channels that are not rotated, then r that are
    kv        normed latent of keys and values W_kv: for each head n channels of its key, then v of its value

RoPE turns pairs of neighbours among the r channels, as in DeepSeek's code. Side by side, q, k and v have the form that
other attention has, heads of d = r + n channels: the first of each pair, the second of each pair, then the rest. The
order of channels changes no score. Values have zeros behind their v channels, so that one size of head is enough for
kernels and exchanges; `trim` takes the zeros off attention's output.

Shapes as in memo.model.layer, with k = a.
"""

import torch
from torch import Tensor, nn

from memo.model.heads import Heads
from memo.model.norm import Norm
from memo.model.parts import ModelParts

_EPSILON = 1e-6
"""Epsilon of the norms of latents, whatever that of other norms is (modeling_deepseek_v3.py of transformers)."""


class LatentNorms(nn.Module):
    q: Norm | None

    def __init__(self, parts: ModelParts, layer: int) -> None:
        super().__init__()

        def norm(name: str) -> Norm:
            weight, bias = parts.of_layer(layer, f"attention.latent_norm.{name}")
            return Norm(weight, bias, _EPSILON, parts.ops, from_zero=parts.config.apply_layernorm_1p)

        self.widths = parts.config.latents
        self.q = norm("q") if self.widths[0] else None
        self.kv = norm("kv")

    def forward(self, latent: Tensor) -> Tensor:
        """[..., c_q + c + r] -> the same shape."""
        of_q, of_kv, positions = latent.split(self.widths, dim=-1)
        return torch.cat((of_q if self.q is None else self.q(of_q), self.kv(of_kv), positions), dim=-1)


class LatentAttention(Heads):
    def __init__(self, parts: ModelParts, layer: int) -> None:
        super().__init__(parts, layer)
        config = parts.config
        self.sizes = config.qk_head_dim, config.qk_pos_emb_head_dim, config.v_head_dim
        self.latent = parts.column(layer, "attention.latent")
        self.latent_norm = LatentNorms(parts, layer)
        self.q, self.kv = parts.column(layer, "attention.q"), parts.column(layer, "attention.kv")
        self.projection = parts.row(layer, "attention.projection")

    def latents(self, normed: Tensor) -> tuple[Tensor | None, Tensor, Tensor]:
        """The parts of normed latents, as views; the first is None if queries have no latent."""
        of_q, of_kv, positions = normed.split(self.latent_norm.widths, dim=-1)
        return of_q if of_q.shape[-1] else None, of_kv, positions

    def joined(self, q: Tensor, kv: Tensor, positions: Tensor, out: Tensor | None = None) -> Tensor:
        """q [s, b, a (n + r)], kv [s, b, a (n + v)], positions [s, b, r] -> q, k and v side by side [s, b, 3 a d], in
        `out` if given."""
        (n, r, v), heads = self.sizes, self.heads[0]
        out = q.new_empty((*q.shape[:-1], 3 * heads * self.head_dim)) if out is None else out
        to_q, to_k, to_v = out.unflatten(-1, (3, heads, -1)).unbind(-3)
        q, kv = q.unflatten(-1, (heads, -1)), kv.unflatten(-1, (heads, -1))
        _halves(to_q[..., :r]).copy_(_pairs(q[..., n:]))
        to_q[..., r:].copy_(q[..., :n])
        _halves(to_k[..., :r]).copy_(_pairs(positions.unsqueeze(-2)))
        to_k[..., r:].copy_(kv[..., :n])
        to_v[..., :v].copy_(kv[..., n:])
        if v < self.head_dim:
            to_v[..., v:].zero_()
        return out

    def joined_backward(self, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The gradient of q, k and v side by side -> the gradients of the inputs of `joined`."""
        (n, r, v), heads = self.sizes, self.heads[0]
        of_q, of_k, of_v = grad.unflatten(-1, (3, heads, -1)).unbind(-3)
        q, kv = of_q.new_empty(of_q.shape), of_k.new_empty((*of_k.shape[:-1], n + v))
        _pairs(q[..., n:]).copy_(_halves(of_q[..., :r]))
        q[..., :n].copy_(of_q[..., r:])
        kv[..., :n].copy_(of_k[..., r:])
        kv[..., n:].copy_(of_v[..., :v])
        positions = of_k[..., :r].sum(-2)
        return q.flatten(-2), kv.flatten(-2), _halves(positions).mT.flatten(-2)

    def trim(self, x: Tensor) -> Tensor:
        """Attention's output [s, b, a d] -> [s, b, a v]."""
        v = self.sizes[2]
        return x if v == self.head_dim else x.unflatten(-1, (-1, self.head_dim))[..., :v].flatten(-2)


def _halves(x: Tensor) -> Tensor:
    """[..., r] with the first of each pair before the second of each -> a view [..., 2, r / 2]."""
    return x.unflatten(-1, (2, -1))


def _pairs(x: Tensor) -> Tensor:
    """[..., r] with pairs of neighbours -> a view [..., 2, r / 2]."""
    return x.unflatten(-1, (-1, 2)).mT
