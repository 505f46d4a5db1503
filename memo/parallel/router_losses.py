"""Losses and biases that balance routers, and the load of each expert: the number of tokens that chose it in a step.

Each layer has two losses, which are added to the language model's loss with a coefficient each, as in Megatron-LM:

    z-loss                 mean of z^2, z the log-sum-exp of a token's scores
    load-balancing loss    E sum over e of f_e P_e; f_e: share of expert e in the load, P_e: mean of its probabilities

Means are over all tokens of the global batch, including tokens that the loss excludes. Probabilities are the softmax
over the scores of all experts, or the sigmoids divided by their sum. The load-balancing loss is 1 if the load is even.

The gradient of the load-balancing loss reaches the scores through P alone and is linear in f. f is known only after the
last forward of a step, but by then a pipeline has gone backward through many microbatches. So the gradient uses f of
the step before; the first step uses 1/E, which gives no gradient. Loads are whole numbers, summed over all ranks, so
the layout does not change a bit of them. The losses reported for a step use the step's own f and P.

The bias with which a router by sigmoid chooses experts (Wang et al., 2024) has no gradient either. Every rank has the
biases of all layers, in fp32. A step adds one fixed amount to the bias of each expert with less than the mean load, and
subtracts it from the bias of each expert with more.

Shapes: E experts, K of them a token; t tokens of a tile, T of a global batch; L layers that have experts.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from memo.config import RunConfig
from memo.parallel.collectives import all_reduce
from memo.parallel.constants import as_segment
from memo.parallel.units import MasterSegment
from memo.spec.shapes import EXPERT_BIAS


class LayerLosses:
    """The router losses of one layer.

    Attributes:
        ends, probabilities, z_squares: sums over the tokens of a step, [E], [E] and []. `ends` sums where each expert's
            rows end; the differences of these sums are the load.
        pull: [E], the derivative of the load-balancing loss by the probabilities of one token.
        z_slope: the derivative of the z-loss by z of one token, divided by z.
        is_on: whether there is any loss; the load is counted in any case.
        is_sigmoid: whether probabilities are sigmoids divided by their sum.
    """

    def __init__(self, sums: Tensor, pull: Tensor, z_slope: float, is_on: bool, is_sigmoid: bool = False) -> None:
        num_experts = len(pull)
        self.ends, self.probabilities, self.z_squares = sums.split([num_experts, num_experts, 1])
        self.pull, self.z_slope, self.is_on, self.is_sigmoid = pull, z_slope, is_on, is_sigmoid

    def count(self, ends: Tensor) -> None:
        """Count a tile's rows, which end at `ends`; called in backward, which goes through each tile once."""
        self.ends.add_(ends)

    def add_gradient_(self, grad: Tensor, scores: Tensor) -> None:
        """Add the gradients of both losses to `grad`, the gradient of the scores; both [t, E]."""
        if not self.is_on:
            return
        z = scores.logsumexp(-1, keepdim=True)
        probabilities = (scores - z).exp_()
        self.z_squares.add_(z.square().sum())
        grad.addcmul_(probabilities, z.mul_(self.z_slope))
        slopes = probabilities
        if self.is_sigmoid:
            slopes = scores.sigmoid()
            torch.div(slopes, slopes.sum(-1, keepdim=True), out=probabilities)
            slopes.neg_().add_(1).mul_(probabilities)
        self.probabilities.add_(probabilities.sum(0))
        grad.addcmul_(slopes, self.pull).addcmul_(slopes, probabilities @ self.pull.unsqueeze(1), value=-1)


class RouterLosses:
    """The router losses of all layers.

    Attributes:
        load: [L, E] fp64, the number of tokens that chose each expert in the last step; the same on every rank.
        biases: [L, E] fp32, added to scores to choose experts; None if experts are chosen by scores alone.
    """

    def __init__(self, config: RunConfig, num_tokens: int, dtype: torch.dtype, device: torch.device) -> None:
        """`num_tokens`: T; `dtype`: of scores."""
        self.num_tokens, self.tp = num_tokens, config.parallel.tp
        self.z_coeff, self.aux_coeff = config.training.moe_z_loss_coeff, config.training.moe_aux_loss_coeff
        layers = [layer for layer, has_experts in enumerate(config.model.layers_with_experts) if has_experts]
        self._places = {layer: place for place, layer in enumerate(layers)}
        shape = (len(layers), config.model.num_experts)
        self.load = torch.ones(shape, dtype=torch.float64, device=device)
        self._sums = torch.zeros(shape[0], 2 * shape[1] + 1, dtype=torch.float64, device=device)
        self._pulls = torch.zeros(shape, dtype=dtype, device=device)
        self.is_sigmoid = config.model.moe_router_score_function == "sigmoid"
        self.bias_rate = config.training.moe_router_bias_update_rate
        is_biased = config.model.moe_router_enable_expert_bias
        self.biases = torch.zeros(shape, dtype=torch.float32, device=device) if is_biased else None

    def of_layer(self, layer: int) -> LayerLosses:
        """Return one layer's losses. Each tp rank has all tokens and adds 1 / tp of their gradient, because gradients
        are summed over tp."""
        place = self._places[layer]
        z_slope = 2 * self.z_coeff / (self.num_tokens * self.tp)
        is_on = self.z_coeff > 0 or self.aux_coeff > 0
        return LayerLosses(self._sums[place], self._pulls[place], z_slope, is_on, self.is_sigmoid)

    def bias_of(self, layer: int) -> Tensor | None:
        """The biases of a layer, a view [E]; None if there are none."""
        return None if self.biases is None else self.biases[self._places[layer]]

    def bias_segments(self) -> list[MasterSegment]:
        """The biases as segments, for checkpoints and weight files."""
        if self.biases is None:
            return []
        return [
            as_segment(f"layers.{layer}.{EXPERT_BIAS}", self.biases[place]) for layer, place in self._places.items()
        ]

    def update_biases(self) -> None:
        """Update the biases by the load of the step that has ended."""
        if self.biases is not None and self.bias_rate > 0:
            self.biases.add_((self.load.mean(1, keepdim=True) - self.load).sign(), alpha=self.bias_rate)

    def begin_step(self) -> None:
        self._sums.zero_()
        scale = self.aux_coeff * self.load.shape[1] / (self.num_tokens * self.tp)
        self._pulls.copy_(self._shares() * scale)

    def finish_step(self, group: ProcessGroup | None, tp_rank: int) -> None:
        """Sum over all ranks in `group`; only tp rank 0 contributes, because all tp ranks have equal sums."""
        if tp_rank > 0:
            self._sums.zero_()
        ends = all_reduce(self._sums, group)[:, : self.load.shape[1]]
        self.load.copy_(ends.diff(dim=1, prepend=ends.new_zeros(len(ends), 1)))

    @contextlib.contextmanager
    def rehearsing(self) -> Iterator[None]:
        """A context in which steps run for rehearsal: at its end, load and biases are as before."""
        kept = [(each, each.clone()) for each in (self.load, self.biases) if each is not None]
        yield
        for each, then in kept:
            each.copy_(then)

    def state(self) -> list[list[int]]:
        """The state that the next step needs: the load, if the load-balancing loss is on."""
        return self.load.long().tolist() if self.aux_coeff > 0 else []

    def load_state(self, state: list[list[int]]) -> None:
        """Continue from a `state`; an empty one stands for an even load."""
        if state:
            self.load.copy_(torch.tensor(state))

    def figures(self) -> Tensor:
        """Figures of the last step, [3] fp64: the largest load of an expert divided by the mean of its layer, and the
        means over layers of both losses."""
        num_experts = self.load.shape[1]
        _, probabilities, z_squares = self._sums.split([num_experts, num_experts, 1], dim=1)
        balance = num_experts * (self._shares() * probabilities).sum(1) / self.num_tokens
        return torch.stack([num_experts * self._shares().max(), balance.mean(), z_squares.mean() / self.num_tokens])

    def as_fields(self, figures: list[float]) -> dict[str, Any]:
        """The fields of a StepRecord for `figures`."""
        imbalance, balance, z = figures
        named = [("load_balancing_loss", balance, self.aux_coeff), ("z_loss", z, self.z_coeff)]
        return {"load_imbalance": imbalance, **{name: value for name, value, coeff in named if coeff > 0}}

    def _shares(self) -> Tensor:
        """f of the last step, [L, E]; 0 for layers that no rank has, under --simulate-world."""
        return self.load / self.load.sum(1, keepdim=True).clamp_min(1)
