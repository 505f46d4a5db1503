"""A mixture of experts, all of which are there: the router, and products of tokens' rows with the matrices of experts.

Weights move, not tokens: a rank has its part of the width of every expert, gathered with the rest of the layer, so that
each of its tokens meets its experts at home. A tile of t tokens, each with K experts, always has t K rows; only how
many of these an expert has depends on the data.

    x [t, h]  -> rows [t K, h], sorted by expert -> products -> ... -> sums over the K rows of a token [t, h]

Shapes: E experts; h hidden size; routing [t, 2 K], in the wide dtype: the weights of a token's experts, then their
numbers. A token's experts are in the order of their scores.
"""

from functools import cached_property
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from memo.parallel.weight_gradients import add_weight_gradient
from memo_kernels import wide_dtype


class Router(NamedTuple):
    """How experts are chosen.

    Attributes:
        weight, bias: [E, h], and [E] or None.
        top_k: K.
        pre_softmax: whether weights are the experts' shares among all, not among those that are chosen; of sigmoid:
            whether they are scores, not shares among these.
        sigmoid: how scores are made by sigmoid; None: by softmax.
    """

    weight: Tensor
    bias: Tensor | None
    top_k: int
    pre_softmax: bool
    sigmoid: "Sigmoid | None" = None


class Sigmoid(NamedTuple):
    """A router by sigmoid: experts are chosen by score + bias, and weighed by score (DeepSeek-V3, GLM-4.5).

    Attributes:
        expert_bias: [E] fp32, or None for zeros.
        groups, of_groups: equal groups of experts, and in how many of them a token may choose: those in which its two
            best experts have the highest sums.
        scale: factor on the weights.
    """

    expert_bias: Tensor | None
    groups: int
    of_groups: int
    scale: float

    def choice(self, logits: Tensor) -> Tensor:
        """What ranks the experts, [t, E]; minus infinity where a token may not go."""
        scores = logits.sigmoid()
        if self.expert_bias is not None:
            scores.add_(self.expert_bias)
        if self.groups > 1:
            groups = scores.unflatten(-1, (self.groups, -1))
            best = groups.topk(2, dim=-1).values.sum(-1).topk(self.of_groups, dim=-1).indices
            left_out = torch.ones(groups.shape[:-1], dtype=torch.bool, device=scores.device).scatter_(-1, best, False)
            groups.masked_fill_(left_out.unsqueeze(-1), -torch.inf)
        return scores

    def weights(self, logits: Tensor, is_share: bool) -> Tensor:
        """[t, K], of the products of the experts that were chosen."""
        scores = logits.sigmoid()
        return (scores / (scores.sum(-1, keepdim=True) + _TINY) if is_share else scores) * self.scale


_TINY = 1e-20
"""Added to sums of scores, as Megatron-LM and transformers do."""


class ScoreLosses(Protocol):
    """Losses of scores (memo.parallel.router_losses)."""

    def add_gradient_(self, grad: Tensor, scores: Tensor) -> None: ...


def route(x: Tensor, router: Router) -> Tensor:
    """The routing of x [t, h]; scores are products and softmax or sigmoid in the wide dtype."""
    logits, sigmoid = _logits(x, router), router.sigmoid
    chosen = (logits if sigmoid is None else sigmoid.choice(logits)).topk(router.top_k, dim=-1).indices
    return torch.cat((_weights(logits, chosen, router), chosen.to(logits.dtype)), dim=-1)


def route_backward(
    grad_weights: Tensor, x: Tensor, router: Router, routing: Tensor, losses: ScoreLosses | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of x, and of the router's weight and bias, in the wide dtype, from those of the weights [t, K], for the
    choice that was made, and of `losses`."""
    logits = _logits(x, router).requires_grad_()
    with torch.enable_grad():
        weights = _weights(logits, _chosen(routing), router)
    (grad,) = torch.autograd.grad(weights, logits, grad_weights)
    del weights
    if losses is not None:
        losses.add_gradient_(grad, logits.detach())
    return grad @ router.weight.to(grad.dtype), grad.t() @ x.to(grad.dtype), grad.sum(0)


def _logits(x: Tensor, router: Router) -> Tensor:
    wide = wide_dtype(x.dtype)
    logits = x.to(wide) @ router.weight.to(wide).t()
    return logits if router.bias is None else logits.add_(router.bias)


def shares(routing: Tensor, num_experts: int, dtype: torch.dtype) -> Tensor:
    """[t, E]: the weight of each expert for each token, of routing [..., 2 K]."""
    weights, chosen = routing.flatten(0, -2).chunk(2, dim=-1)
    return weights.new_zeros(len(weights), num_experts).scatter_(1, chosen.long(), weights).to(dtype)


def of_shares(grad: Tensor, routing: Tensor) -> Tensor:
    """[t, K]: of a gradient of `shares`, that of the weights of the experts that were chosen."""
    return grad.gather(1, _chosen(routing))


def _weights(logits: Tensor, chosen: Tensor, router: Router) -> Tensor:
    """By sigmoid, or the softmax over all experts, or over those that were chosen."""
    if router.sigmoid is not None:
        return router.sigmoid.weights(logits.gather(-1, chosen), not router.pre_softmax)
    return logits.softmax(-1).gather(-1, chosen) if router.pre_softmax else logits.gather(-1, chosen).softmax(-1)


def _chosen(routing: Tensor) -> Tensor:
    return routing.flatten(0, -2).chunk(2, dim=-1)[1].long()


class ExpertRows:
    """The rows on which experts work: each token once for each of its experts, sorted by expert.

    Attributes:
        ends: [E] int32, where the rows of each expert end.
    """

    def __init__(self, routing: Tensor, num_experts: int) -> None:
        """Of `routing` [..., 2 K], of all tokens of a tile."""
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
        """[..., n] of each token -> [t K, n] of each row."""
        return x.flatten(0, -2)[self._order // self.top_k]

    def of_choices(self, x: Tensor) -> Tensor:
        """[..., K], a number for each expert of a token -> [t K, 1] of each row."""
        return x.flatten()[self._order, None]

    def sums(self, rows: Tensor) -> Tensor:
        """[t K, n] of each row -> [t, n]: sums over the rows of a token, in the order of its experts."""
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
        """Each row with the matrix of its expert: [t K, in] W^T + bias, or for gradients [t K, out] W if `back`.

        `matrices` [E out, in] or [E, out, in], `biases` [E out].
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
        """Add them to y [t K, n]."""
        y.add_(self.products(rows, matrices, back=back))

    def _by_expert(self, matrices: Tensor) -> Tensor:
        return matrices if matrices.ndim == 3 else matrices.unflatten(0, (self.num_experts, -1))

    def add_weight_gradients(self, main: Tensor | None, grad_out: Tensor, rows: Tensor) -> None:
        """Add the gradients of `matrices` of products rows W^T to `main`, which is as these; None: they are frozen."""
        if main is None:
            return
        for expert, own in self._ranges:
            add_weight_gradient(self._by_expert(main)[expert], grad_out[own], rows[own])

    def add_bias_gradients(self, main: Tensor | None, grad_out: Tensor) -> None:
        """Add those of `biases` to `main` [E out]; None: they are frozen."""
        if main is None:
            return
        for expert, own in self._ranges:
            main.unflatten(0, (self.num_experts, -1))[expert].add_(grad_out[own].sum(0))


def _has_grouped_product(rows: Tensor, matrices: Tensor) -> bool:
    """Whether torch has a kernel for all experts at once, which wants rows of whole 16 bytes (torch 2.13,
    aten/src/ATen/native/GroupedMMUtils.h)."""
    if not rows.is_cuda or rows.dtype != torch.bfloat16:
        return False
    return all(size * rows.itemsize % 16 == 0 for size in matrices.shape[1:])
