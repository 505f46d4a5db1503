"""The modules of one transformer layer: parameters, and what is computed between matrices.

The list of a layer's operations (memo.program.kinds) says in which order they run, and memo.executor runs them.

Shapes: n = s / tp tokens between matrices, s = tokens of this context-parallel rank inside them;
b = micro-batch; a, k = query and key/value heads of this tp rank; d = size of a head.
"""

from functools import partial
from typing import Any

from torch import Tensor, nn

from memo.attention.delta_rule import DeltaNet
from memo.model.heads import Heads
from memo.model.latent import LatentAttention
from memo.model.norm import Norm
from memo.model.parts import ModelParts
from memo.parallel.collectives import group_rank, group_size, reduce_scatter
from memo.parallel.context_delta import ContextDelta
from memo.parallel.experts import ExpertMatrix, ExpertRows, Router, route, route_backward, shares
from memo.parallel.router_losses import LayerLosses
from memo_kernels import wide_dtype


class SigmoidGate(nn.Module):
    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        return x * gate.sigmoid()


class SelfAttention(Heads):
    """qkv (column-parallel), norm of heads, RoPE, causal attention, its gate (column-parallel), projection
    (row-parallel)."""

    def __init__(self, parts: ModelParts, layer: int) -> None:
        super().__init__(parts, layer)
        self.sinks = parts.in_layer(layer, "attention.sinks")
        self.qkv = parts.column(layer, "attention.qkv")
        if parts.config.qk_layernorm:
            self.q_norm = parts.norm(*parts.of_layer(layer, "attention.q_norm"))
            self.k_norm = parts.norm(*parts.of_layer(layer, "attention.k_norm"))
        if parts.config.attention_output_gate:
            self.gate = parts.column(layer, "attention.gate")
            self.gating = SigmoidGate()
        self.projection = parts.row(layer, "attention.projection")


class NormedGate(Norm):
    """The output gate of a gated delta net: the norm of each head, times the SiLU of the gate."""

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:  # type: ignore[override]  # it takes the gate as well
        normed = super().forward(x.unflatten(-1, (-1, self.weight.shape[0]))).flatten(2)
        return (normed * nn.functional.silu(gate.to(wide_dtype(x.dtype)))).to(x.dtype)


class DeltaAttention(nn.Module):
    """A gated delta net instead of attention: q, k, v and the logits of two gates (column-parallel), convolution and
    rule (memo.attention.delta_rule), gate (column-parallel), projection (row-parallel)."""

    def __init__(self, parts: ModelParts, layer: int) -> None:
        super().__init__()
        of_net = ("kernels", "rates", "biases")
        self.kernels, self.rates, self.biases = (parts.parameter_of(layer, f"attention.{name}") for name in of_net)
        self.qkv = parts.column(layer, "attention.qkv")
        self.gate = parts.column(layer, "attention.gate")
        self.gating = NormedGate(*parts.of_layer(layer, "attention.gating"), parts.config.norm_epsilon, parts.ops)
        self.projection = parts.row(layer, "attention.projection")
        exchange: Any = parts.attention(layer)
        self._net = partial(parts.delta_net, head_dim=parts.kind(layer).head_dim)
        self.core = ContextDelta(exchange, self.net)

    def net(self) -> DeltaNet:
        """The convolution and the rule, with the parameters that this module has now."""
        return self._net(self.kernels, self.rates, self.biases)


class MLP(nn.Module):
    """fc1 (column-parallel; gate and up when gated), activation, fc2 (row-parallel)."""

    def __init__(self, parts: ModelParts, layer: int, name: str = "mlp") -> None:
        super().__init__()
        self.activation, self.ops = parts.config.activation, parts.ops
        self.fc1 = parts.column(layer, f"{name}.fc1")
        self.fc2 = parts.row(layer, f"{name}.fc2")

    def activate(self, inner: Tensor) -> Tensor:
        """[s, b, f / tp] from fc1's output, which is twice as wide when gated."""
        return self.ops.activate(inner, self.activation)


class SharedExperts(MLP):
    """Experts that process all tokens; `score` computes the gate on their output, if they have one."""

    score: ExpertMatrix | None

    def __init__(self, parts: ModelParts, layer: int) -> None:
        super().__init__(parts, layer, "mlp.shared")
        has_gate = parts.config.moe_shared_expert_gate
        self.score = ExpertMatrix(*parts.of_layer(layer, "mlp.shared.score")) if has_gate else None

    def activate_scored(self, score: Tensor, inner: Tensor) -> Tensor:
        """`activate`, times the sigmoid of scores [s, b, 1]; multiplying fc2's output by it would give the same."""
        return self.activate(inner) * score.sigmoid()


class Experts(nn.Module):
    """A mixture of experts instead of an MLP: the router, fc1, activation and fc2 of each expert, and shared experts.

    The weight that the router gives an expert multiplies its activation, so that backward needs no output of fc2.
    """

    def __init__(self, parts: ModelParts, layer: int) -> None:
        super().__init__()
        self.config, self.ops, self.group = parts.config, parts.ops, parts.tp_group
        scale = parts.in_layer(layer, "mlp.router.scale")
        self.router = ExpertMatrix(*parts.of_layer(layer, "mlp.router"), scale=scale)
        self.fc1, self.fc2 = parts.matrix(layer, "mlp.fc1"), parts.matrix(layer, "mlp.fc2")
        self.shared = SharedExperts(parts, layer) if parts.config.shared_ffn_size else None
        self.losses: LayerLosses | None = None
        """The router's losses, in training."""
        self.expert_bias: Tensor | None = None
        """[E] fp32, the biases of a router by sigmoid (memo.parallel.router_losses); None: zeros."""

    def expand(self, x: Tensor, rows: ExpertRows, out: Tensor | None = None) -> Tensor:
        """x [s, b, h] -> fc1 of each token's K experts, [s, b, K f], in `out` if given; rows are sorted by expert."""
        out = None if out is None else out.view(rows.count, -1)
        return self.fc1.products(rows.of_tokens(x), rows, self.fc1.bias, out).view(*x.shape[:2], -1)

    def combine(self, x: Tensor, routing: Tensor, rows: ExpertRows) -> Tensor:
        """fc2 of x [s, b, K f], summed over each token's experts and over tp -> [n, b, h]."""
        y = rows.sums(self.fc2.products(x.view(rows.count, -1), rows))
        return self.add_biases_(reduce_scatter(y.view(*routing.shape[:2], -1), self.group), routing)

    def rows(self, routing: Tensor) -> ExpertRows:
        return ExpertRows(routing, self.config.num_experts)

    def route(self, x: Tensor) -> Tensor:
        """Return the routing [t, 2 K] of x [..., h] (memo.parallel.experts)."""
        return route(x.flatten(0, -2), self._router)

    @property
    def _router(self) -> Router:
        return Router(self.router.weight, self.router.bias, self.config, self.expert_bias, self.router.scale)

    def route_backward(
        self, grad: Tensor, x: Tensor, routing: Tensor, rows: ExpertRows
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Gradient of `routing` [..., 2 K] -> gradients of x [t, h] and of the router's weight, bias and scale."""
        if self.losses is not None:
            self.losses.count(rows.ends)
        of_weights = grad.flatten(0, -2)[:, : self.config.moe_router_topk]
        return route_backward(of_weights, x.flatten(0, -2), self._router, routing, self.losses)

    def add_biases_(self, y: Tensor, routing: Tensor) -> Tensor:
        """Add the weighted biases of fc2 to y [n, b, h], after the sum over tp; `routing` [s, b, 2 K]."""
        if self.fc2.bias is not None:
            own = routing.chunk(group_size(self.group))[group_rank(self.group)]
            of_tokens = shares(own, self.config.num_experts, y.dtype)
            y.view(len(of_tokens), -1).addmm_(of_tokens, self.fc2.bias.view(self.config.num_experts, -1))
        return y

    def activate(self, routing: Tensor, inner: Tensor, rows: ExpertRows) -> Tensor:
        """fc1's output -> activations [..., K f], times the weights in `routing` [..., 2 K].

        fc1's output has as many elements, or twice as many when gated.
        """
        made = self.ops.activate(inner.view(rows.count, 1, -1), self.config.activation).squeeze(1)
        weights = routing[..., : self.config.moe_router_topk]
        return (made * rows.of_choices(weights).to(made.dtype)).view(*routing.shape[:-1], -1)


class TransformerLayer(nn.Module):
    """Attention and MLP, each behind a norm and a residual. Some models norm the outputs of attention and MLP as well,
    or instead."""

    def __init__(self, parts: ModelParts, index: int) -> None:
        super().__init__()

        def norm(name: str) -> Norm | None:
            return parts.norm(*parts.of_layer(index, name)) if name in parts.kind(index).norms else None

        self.attention_norm = norm("attention_norm")
        self.attention = _attention(parts, index)
        self.mlp_norm = norm("mlp_norm")
        self.mlp = Experts(parts, index) if parts.kind(index).num_experts else MLP(parts, index)
        self.attention_out_norm, self.mlp_out_norm = norm("attention_out_norm"), norm("mlp_out_norm")
        self.experts_norm, self.router_norm = norm("experts_norm"), norm("router_norm")
        self.shared_out_norm, self.experts_out_norm = norm("shared_out_norm"), norm("experts_out_norm")
        self.scalar: Tensor | None = None
        """[] fp32, the factor on the output (memo.parallel.constants)."""


def _attention(parts: ModelParts, index: int) -> nn.Module:
    kind = parts.kind(index)
    if kind.multi_latent_attention:
        return LatentAttention(parts, index)
    return DeltaAttention(parts, index) if kind.is_linear else SelfAttention(parts, index)
