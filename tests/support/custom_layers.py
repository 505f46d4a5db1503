"""Layers outside memo, for tests of --custom-layer, and the layer of examples/custom_model.py in plain torch."""

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

import memo
from memo.config.model import ModelConfig

ROOT = Path(__file__).parents[2]
PARALLEL = f"{ROOT / 'examples' / 'custom_model.py'}:ParallelLayer"
SANDWICH = f"{Path(__file__)}:SandwichLayer"


class SandwichLayer(memo.CustomLayer):
    """Norms before and after each branch, a gain, normed heads, biases, two matrices for q and for k and v."""

    def __init__(self, parts: memo.LayerParts) -> None:
        super().__init__(parts)
        model = parts.model
        self.size = model.head_dim
        q, kv = model.num_attention_heads * model.head_dim, model.kv_heads * model.head_dim
        self.norm_in, self.query_norm = parts.norm("norm_in"), parts.norm("query_norm", model.head_dim)
        self.query = parts.column("query", q, bias=True)
        self.keys = parts.column("keys", {"k": kv, "v": kv})
        self.out = parts.row("out", q, bias=True)
        self.norm_out, self.norm_mlp = parts.norm("norm_out"), parts.norm("norm_mlp")
        self.up, self.down = parts.column("up", model.ffn_size), parts.row("down", model.ffn_size)
        self.gain = parts.vector("gain")

    def before_attention(self, x: Tensor) -> Tensor:
        normed = self.norm_in(x)
        query = self.query_norm(self.query(normed).unflatten(-1, (-1, self.size))).flatten(2)
        return torch.cat([query, self.keys(normed)], dim=-1)

    def after_attention(self, x: Tensor, attended: Tensor) -> Tensor:
        x = x + self.norm_out(self.out(attended))
        return x + self.gain * self.down(F.relu(self.up(self.norm_mlp(x))).square())


def parallel_layer(weights: dict[str, Tensor], model: ModelConfig, x: Tensor) -> Tensor:
    """examples/custom_model.py's layer of one document, written out: x [s, b, h], weights by global name."""
    s, b, _ = x.shape
    d, heads, kv_heads = model.head_dim, model.num_attention_heads, model.kv_heads
    normed = x / (x.square().mean(-1, keepdim=True) + model.norm_epsilon).sqrt() * weights["norm.weight"]

    def split(name: str, count: int) -> Tensor:
        return (normed @ weights[f"qkv.{name}.weight"].t()).view(s, b, count, d).permute(1, 2, 0, 3)

    positions = torch.arange(s, dtype=x.dtype)
    angles = positions[:, None] * model.rotary_base ** (-torch.arange(0, d, 2, dtype=x.dtype) / d)

    def rotated(t: Tensor) -> Tensor:
        low, high = t.chunk(2, -1)
        return torch.cat([low * angles.cos() - high * angles.sin(), high * angles.cos() + low * angles.sin()], -1)

    q, k, v = rotated(split("q", heads)), rotated(split("k", kv_heads)), split("v", kv_heads)
    k, v = (t.repeat_interleave(heads // kv_heads, dim=1) for t in (k, v))
    scores = q @ k.transpose(-1, -2) / d**0.5
    scores = scores.masked_fill(torch.ones(s, s, dtype=torch.bool).triu(1), float("-inf"))
    attended = (scores.softmax(-1) @ v).permute(2, 0, 1, 3).reshape(s, b, heads * d)
    inner = F.silu(normed @ weights["fc1.gate.weight"].t()) * (normed @ weights["fc1.up.weight"].t())
    return x + attended @ weights["projection.weight"].t() + inner @ weights["fc2.weight"].t()


class PlainLayer(memo.CustomLayer):
    """memo's own layer without biases, written as a custom one."""

    def __init__(self, parts: memo.LayerParts) -> None:
        super().__init__(parts)
        model = parts.model
        q, kv = model.num_attention_heads * model.head_dim, model.kv_heads * model.head_dim
        self.attention_norm = parts.norm("attention_norm")
        self.qkv = parts.column("qkv", {"q": q, "k": kv, "v": kv})
        self.projection = parts.row("projection", q)
        self.mlp_norm = parts.norm("mlp_norm")
        gated = {"gate": model.ffn_size, "up": model.ffn_size}
        self.fc1 = parts.column("fc1", gated if model.gated else model.ffn_size)
        self.fc2 = parts.row("fc2", model.ffn_size)
        self.activate = parts.activate

    def before_attention(self, x: Tensor) -> Tensor:
        return self.qkv(self.attention_norm(x))

    def after_attention(self, x: Tensor, attended: Tensor) -> Tensor:
        x = x + self.projection(attended)
        return x + self.fc2(self.activate(self.fc1(self.mlp_norm(x))))


PLAIN = f"{Path(__file__)}:PlainLayer"
ADAPTED = f"{Path(__file__)}:AdaptedLayer"


class AdaptedLayer(PlainLayer):
    """A PlainLayer with a further branch of width six, which 4 ranks cannot divide."""

    def __init__(self, parts: memo.LayerParts) -> None:
        super().__init__(parts)
        self.narrow, self.widen = parts.column("narrow", 6), parts.row("widen", 6)

    def after_attention(self, x: Tensor, attended: Tensor) -> Tensor:
        return super().after_attention(x, attended) + self.widen(self.narrow(self.mlp_norm(x)))
