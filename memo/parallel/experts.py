"""A mixture of experts in which every rank has all experts: the router, and products of rows with experts' matrices.

Weights move, not tokens: a rank gathers its part of the width of every expert with the rest of the layer, and computes
all experts of its tokens itself. A tile of t tokens, each with K experts, always has t K rows; the data decide only how
many rows each expert has.

    x [t, h]  -> rows [t K, h], sorted by expert -> products -> ... -> sums over the K rows of a token [t, h]

Shapes: E experts; h hidden size; routing [t, 2 K], in the wide dtype: the weights of a token's experts, then the
indices of these experts. A token's experts are in the order of their scores.
"""

from functools import cached_property
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from memo.config import ModelConfig
from memo.parallel.adapter import Adapter
from memo.parallel.router_losses import LayerLosses
from memo.parallel.weight_gradients import add_weight_gradient
from memo_kernels import wide_dtype


class Router(NamedTuple):
    """How experts are chosen. A router by sigmoid (DeepSeek-V3, GLM-4.5) chooses by score + bias, and weighs by score.

    Attributes:
        weight, bias: [E, h], and [E] or None.
        model: its fields moe_router_* have the settings.
        expert_bias: [E] fp32, or None for zeros.
        scale: [E], the factors of the experts' weights (--moe-separate-norms), or None for ones.
    """

    weight: Tensor
    bias: Tensor | None
    model: ModelConfig
    expert_bias: Tensor | None = None
    scale: Tensor | None = None

    @property
    def is_sigmoid(self) -> bool:
        return self.model.moe_router_score_function == "sigmoid"

    def scaled(self, matrix: Tensor) -> Tensor:
        """The matrix that makes logits, from `weight`; and the gradient of `weight` from its gradient."""
        return matrix * self.model.hidden_size**-0.5 if self.model.moe_separate_norms else matrix


_TINY = 1e-20
"""Added to sums of scores, as Megatron-LM and transformers do."""


def route(x: Tensor, router: Router) -> Tensor:
    """Return the routing of x [t, h]; logits, and softmax or sigmoid, are computed in the wide dtype."""
    logits = _logits(x, router)
    ranked = _by_sigmoid(logits, router) if router.is_sigmoid else logits
    chosen = ranked.topk(router.model.moe_router_topk, dim=-1).indices
    return torch.cat((_weights(logits, chosen, router), chosen.to(logits.dtype)), dim=-1)


def route_backward(
    grad_weights: Tensor, x: Tensor, router: Router, routing: Tensor, losses: LayerLosses | None = None
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Return the gradient of x, and those of the router's weight, bias and, if it has one, scale, in the wide dtype.

    They follow from the gradient of the weights [t, K], for the experts that `routing` has chosen, and from `losses`.
    """
    logits = _logits(x, router).requires_grad_()
    scale = None if router.scale is None else router.scale.detach().to(logits.dtype).requires_grad_()
    with torch.enable_grad():
        weights = _weights(logits, _chosen(routing), router._replace(scale=scale))
    grad, *of_scale = torch.autograd.grad(weights, [logits] if scale is None else [logits, scale], grad_weights)
    del weights
    if losses is not None:
        losses.add_gradient_(grad, logits.detach())
    of_weight = router.scaled(grad.t() @ x.to(grad.dtype))
    return grad @ router.scaled(router.weight.to(grad.dtype)), (of_weight, grad.sum(0), *of_scale)


def _logits(x: Tensor, router: Router) -> Tensor:
    wide = wide_dtype(x.dtype)
    logits = x.to(wide) @ router.scaled(router.weight.to(wide)).t()
    return logits if router.bias is None else logits.add_(router.bias)


def shares(routing: Tensor, num_experts: int, dtype: torch.dtype) -> Tensor:
    """Return the weight of each expert for each token, [t, E], from routing [..., 2 K]."""
    weights, chosen = routing.flatten(0, -2).chunk(2, dim=-1)
    return weights.new_zeros(len(weights), num_experts).scatter_(1, chosen.long(), weights).to(dtype)


def of_shares(grad: Tensor, routing: Tensor) -> Tensor:
    """Gradient of `shares` [t, E] -> gradient of the chosen experts' weights [t, K]."""
    return grad.gather(1, _chosen(routing))


def _by_sigmoid(logits: Tensor, router: Router) -> Tensor:
    """The values by which experts are ranked, [t, E]; minus infinity for experts that a token may not choose."""
    scores, model = logits.sigmoid(), router.model
    if router.expert_bias is not None:
        scores.add_(router.expert_bias)
    if model.moe_router_num_groups > 1:
        groups = scores.unflatten(-1, (model.moe_router_num_groups, -1))
        of_groups = groups.topk(2, dim=-1).values.sum(-1)
        best = of_groups.topk(model.moe_router_group_topk, dim=-1).indices
        left_out = torch.ones(groups.shape[:-1], dtype=torch.bool, device=scores.device).scatter_(-1, best, False)
        groups.masked_fill_(left_out.unsqueeze(-1), -torch.inf)
    return scores


def _weights(logits: Tensor, chosen: Tensor, router: Router) -> Tensor:
    """Weights [t, K]: the softmax over all experts or over the chosen ones; by sigmoid the scores, or these divided by
    their sum, times a factor. A scale multiplies them by a factor of each expert."""
    over_all = router.model.moe_router_pre_softmax
    if router.is_sigmoid:
        scores = logits.gather(-1, chosen).sigmoid()
        scores = scores if over_all else scores / (scores.sum(-1, keepdim=True) + _TINY)
        weights = scores * router.model.moe_router_topk_scaling_factor
    else:
        weights = logits.softmax(-1).gather(-1, chosen) if over_all else logits.gather(-1, chosen).softmax(-1)
    if router.scale is None:
        return weights
    return weights * router.scale.to(weights.dtype).expand_as(logits).gather(-1, chosen)


def _chosen(routing: Tensor) -> Tensor:
    return routing.flatten(0, -2).chunk(2, dim=-1)[1].long()


class ExpertRows:
    """The rows on which experts work: each token once for each of its experts, sorted by expert.

    Attributes:
        ends: [E] int32, where the rows of each expert end.
    """

    def __init__(self, routing: Tensor, num_experts: int) -> None:
        """`routing`: [..., 2 K], of all tokens of a tile."""
        chosen = _chosen(routing)
        self.top_k, self.num_experts = chosen.shape[1], num_experts
        experts, self._order = chosen.flatten().sort(stable=True)
        places = torch.empty_like(self._order)
        places[self._order] = torch.arange(len(places), device=places.device)
        self._places = places.view_as(chosen)
        numbers = torch.arange(num_experts, device=experts.device)
        self.ends = torch.searchsorted(experts, numbers, right=True, out_int32=True)

    @cached_property
    def _ranges(self) -> list[tuple[int, slice]]:
        """The experts that have rows. On a GPU the host waits for the router here."""
        ends = [0, *self.ends.tolist()]
        return [(e, slice(*ends[e : e + 2])) for e in range(self.num_experts) if ends[e] < ends[e + 1]]

    @property
    def count(self) -> int:
        return len(self._order)

    def of_tokens(self, x: Tensor) -> Tensor:
        """Values of tokens [..., n] -> values of rows [t K, n]."""
        return x.flatten(0, -2)[self._order // self.top_k]

    def of_choices(self, x: Tensor) -> Tensor:
        """Numbers [..., K], one for each expert of a token -> one for each row, [t K, 1]."""
        return x.flatten()[self._order, None]

    def sums(self, rows: Tensor) -> Tensor:
        """Values of rows [t K, n] -> their sums over each token's rows, in the order of its experts, [t, n]."""
        return F.embedding_bag(self._places, rows, mode="sum")

    def products(
        self,
        rows: Tensor,
        matrices: Tensor,
        biases: Tensor | None = None,
        *,
        back: bool = False,
        out: Tensor | None = None,
    ) -> Tensor:
        """Multiply each row with its expert's matrix: [t K, in] W^T + bias; with `back` a gradient, [t K, out] W.

        `matrices`: [E out, in] or [E, out, in]; `biases`: [E out].
        """
        each = self._by_expert(matrices)
        each = each if back else each.transpose(1, 2)
        if biases is None and _has_grouped_product(rows, each):
            found = F.grouped_mm(rows, each, offs=self.ends)
            return found if out is None else out.copy_(found)
        if out is None:
            out = rows.new_empty(len(rows), each.shape[2])
        for expert, own in self._ranges:
            if biases is None:
                torch.mm(rows[own], each[expert], out=out[own])
            else:
                torch.addmm(biases.unflatten(0, (self.num_experts, -1))[expert], rows[own], each[expert], out=out[own])
        return out

    def add_products_(self, y: Tensor, rows: Tensor, matrices: Tensor, *, back: bool = False) -> None:
        """Add the products to y [t K, n]."""
        y.add_(self.products(rows, matrices, back=back))

    def _by_expert(self, matrices: Tensor) -> Tensor:
        return matrices if matrices.ndim == 3 else matrices.unflatten(0, (self.num_experts, -1))

    def add_weight_gradients(self, main: Tensor | None, grad_out: Tensor, rows: Tensor) -> None:
        """Add the gradient of the matrices W of rows W^T to `main`, which has their shape; None: they are frozen."""
        if main is None:
            return
        for expert, own in self._ranges:
            add_weight_gradient(self._by_expert(main)[expert], grad_out[own], rows[own])

    def add_bias_gradients(self, main: Tensor | None, grad_out: Tensor) -> None:
        """Add the gradient of the biases to `main` [E out]; None: they are frozen."""
        if main is None:
            return
        for expert, own in self._ranges:
            main.unflatten(0, (self.num_experts, -1))[expert].add_(grad_out[own].sum(0))


class ExpertMatrix(nn.Module):
    """The matrices of all experts, one below the other, their biases and their adapters; or the matrix of a router.

    `scale`: [E], of a router: the factors of the experts' weights.
    """

    def __init__(
        self,
        weight: nn.Parameter,
        bias: nn.Parameter | None,
        adapter: Adapter | None = None,
        scale: nn.Parameter | None = None,
    ) -> None:
        super().__init__()
        self.weight, self.bias, self.adapter, self.scale = weight, bias, adapter, scale

    def products(self, x: Tensor, rows: ExpertRows, bias: Tensor | None = None, out: Tensor | None = None) -> Tensor:
        """Multiply rows [t K, in] with their experts' matrices, and add what adapters make of them."""
        y = rows.products(x, self.weight, bias, out=out)
        if self.adapter is not None:
            self.adapter.add_(y, x, rows)
        return y


def _has_grouped_product(rows: Tensor, matrices: Tensor) -> bool:
    """Whether torch has a kernel for all experts at once. It requires rows of a multiple of 16 bytes (torch 2.13,
    aten/src/ATen/native/GroupedMMUtils.h)."""
    if not rows.is_cuda or rows.dtype != torch.bfloat16:
        return False
    return all(size * rows.itemsize % 16 == 0 for size in matrices.shape[1:])
