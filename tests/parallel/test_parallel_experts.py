"""Experts on sorted rows, against every token through every expert, in fp64 to 1e-12; and routing that happens once."""

from typing import Any
from unittest.mock import patch

import pytest
import torch
from layouts import make, tiny
from torch import Tensor

from memo.config import ModelConfig
from memo.model.layer import Experts
from memo.parallel.experts import ExpertRows, Router, of_shares, route, route_backward, shares
from memo.parallel.router_losses import LayerLosses

TOKENS, TOP_K, NUM_EXPERTS, HIDDEN, WIDTH = 40, 3, 5, 16, 8


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def settings(**values: Any) -> ModelConfig:
    """Of a router; `values` are fields without moe_router_."""
    return ModelConfig(**{f"moe_router_{name}": value for name, value in {"topk": TOP_K, **values}.items()})


def routings() -> dict[str, Tensor]:
    """Of all experts, and of tokens that all have the same ones, so that two experts have no rows."""
    router = Router(random(NUM_EXPERTS, HIDDEN, seed=1), None, settings())
    pushed = router._replace(bias=torch.tensor([9.0, 0.0, 9.0, 9.0, 0.0], dtype=torch.float64) * 10)
    return {"all": route(random(TOKENS, HIDDEN), router), "three alone": route(random(TOKENS, HIDDEN), pushed)}


@pytest.mark.parametrize("name", ["all", "three alone"])
@pytest.mark.parametrize("biased", [False, True], ids=["plain", "biased"])
def test_rows_of_experts_are_tokens_through_all_of_them(name: str, biased: bool) -> None:
    """Products, sums, and the gradients of matrices, biases and tokens."""
    routing = routings()[name]
    rows, weights = ExpertRows(routing, NUM_EXPERTS), shares(routing, NUM_EXPERTS, torch.float64)
    assert (weights > 0).sum() == TOKENS * TOP_K and len(weights.sum(0).nonzero()) == (5 if name == "all" else 3)
    x, matrices = random(TOKENS, HIDDEN).requires_grad_(), random(NUM_EXPERTS, WIDTH, HIDDEN, seed=2).requires_grad_()
    biases = random(NUM_EXPERTS, WIDTH, seed=3).requires_grad_()
    each = torch.einsum("th,eoh->teo", x, matrices) + (biases if biased else 0.0)
    expected = ((weights > 0).unsqueeze(-1) * each).sum(1)
    flat = matrices.detach().flatten(0, 1)
    with torch.no_grad():
        made = rows.products(rows.of_tokens(x), flat, biases.flatten() if biased else None)
        found = rows.sums(made)
    torch.testing.assert_close(found, expected, atol=1e-12, rtol=0)

    grad = random(TOKENS, WIDTH, seed=4)
    of_x, of_matrices, *of_biases = torch.autograd.grad(expected, [x, matrices, *([biases] if biased else [])], grad)
    main, of_rows = torch.zeros_like(flat), rows.of_tokens(grad)
    rows.add_weight_gradients(main, of_rows, rows.of_tokens(x.detach()))
    torch.testing.assert_close(main.view_as(of_matrices), of_matrices, atol=1e-12, rtol=0)
    back = rows.sums(rows.products(of_rows, flat, back=True))
    torch.testing.assert_close(back, of_x, atol=1e-12, rtol=0)
    if biased:
        total = torch.zeros(NUM_EXPERTS * WIDTH, dtype=torch.float64)
        rows.add_bias_gradients(total, of_rows)
        torch.testing.assert_close(total.view_as(biases), of_biases[0], atol=1e-12, rtol=0)


@pytest.mark.parametrize("pre_softmax", [False, True], ids=["of the chosen", "of all"])
def test_gradients_of_the_router_are_autograds(pre_softmax: bool) -> None:
    """1e-12; and weights are shares of the chosen experts, which sum to 1, or of all."""
    x, weight, bias = (random(*shape, seed=n).requires_grad_() for n, shape in enumerate([(40, 16), (5, 16), (5,)]))
    router = Router(weight.detach(), bias.detach(), settings(pre_softmax=pre_softmax))
    routing = route(x.detach(), router)
    scores = (x @ weight.t() + bias).softmax(-1)
    values, chosen = scores.topk(TOP_K)
    expected = values if pre_softmax else values / values.sum(-1, keepdim=True)
    torch.testing.assert_close(routing[:, :TOP_K], expected, atol=1e-12, rtol=0)
    assert torch.equal(routing[:, TOP_K:], chosen.double())

    grad = random(TOKENS, TOP_K, seed=7)
    wanted = torch.autograd.grad(expected, [x, weight, bias], grad)
    for found, true in zip(route_backward(grad, x.detach(), router, routing), wanted, strict=True):
        torch.testing.assert_close(found, true, atol=1e-12, rtol=0)
    assert torch.equal(of_shares(shares(routing, NUM_EXPERTS, torch.float64), routing), routing[:, :TOP_K])


@pytest.mark.parametrize("is_share", [True, False], ids=["shares", "scores"])
@pytest.mark.parametrize("groups", [1, 3], ids=["alone", "groups"])
def test_a_router_by_sigmoid_chooses_by_bias_and_weighs_without(groups: int, is_share: bool) -> None:
    """1e-12 in fp64, against a loop over tokens in plain numbers; gradients are autograd's for the same choice."""
    count, of_groups = 6, min(groups, 2)
    x, weight = random(TOKENS, HIDDEN).requires_grad_(), random(count, HIDDEN, seed=1).mul(0.3).requires_grad_()
    bias = random(count, seed=2).mul(0.5).float()
    choice = {"score_function": "sigmoid", "num_groups": groups, "group_topk": of_groups}
    model = settings(pre_softmax=not is_share, topk_scaling_factor=2.5, **choice)
    router = Router(weight.detach(), None, model, bias)
    routing = route(x.detach(), router)
    scores = (x @ weight.t()).sigmoid()
    choices = []
    for row in (scores.detach() + bias).tolist():
        members = [range(g * count // groups, (g + 1) * count // groups) for g in range(groups)]
        best = sorted(members, key=lambda each, row=row: -sum(sorted(row[e] for e in each)[-2:]))[:of_groups]
        choices.append(sorted((e for each in best for e in each), key=row.__getitem__, reverse=True)[:TOP_K])
    chosen = torch.tensor(choices)
    assert torch.equal(routing[:, TOP_K:], chosen.double())
    assert not torch.equal(chosen, scores.topk(TOP_K).indices)  # the bias, or the groups, has moved tokens
    values = scores.gather(1, chosen)
    expected = 2.5 * (values / values.sum(-1, keepdim=True) if is_share else values)
    torch.testing.assert_close(routing[:, :TOP_K], expected, atol=1e-12, rtol=0)

    grad = random(TOKENS, TOP_K, seed=7)
    found = route_backward(grad, x.detach(), router, routing)
    for actual, true in zip(found, torch.autograd.grad(expected, [x, weight], grad), strict=False):
        torch.testing.assert_close(actual, true, atol=1e-12, rtol=0)


def test_losses_of_a_router_by_sigmoid_have_autograds_gradients() -> None:
    """1e-12 in fp64: of the z-loss of scores, and of shares of sigmoids, as Megatron-LM has them."""
    scores, pull, slope = random(TOKENS, NUM_EXPERTS).requires_grad_(), random(NUM_EXPERTS, seed=1), 0.3
    sums, grad = torch.zeros(2 * NUM_EXPERTS + 1, dtype=torch.float64), torch.zeros(TOKENS, NUM_EXPERTS).double()
    LayerLosses(sums, pull, slope, True, True).add_gradient_(grad, scores.detach())
    chances, z_squares = scores.sigmoid(), scores.logsumexp(-1).square().sum()
    shares_of_all = chances / chances.sum(-1, keepdim=True)
    (expected,) = torch.autograd.grad((shares_of_all * pull).sum() + slope / 2 * z_squares, scores)
    torch.testing.assert_close(grad, expected, atol=1e-12, rtol=0)
    torch.testing.assert_close(sums[NUM_EXPERTS:-1], shares_of_all.sum(0), atol=1e-12, rtol=0)
    torch.testing.assert_close(sums[-1], z_squares, atol=1e-12, rtol=1e-12)


def test_shared_experts_are_the_mlp_of_a_dense_model() -> None:
    """Where the chosen experts give nothing: loss and gradients are those of the dense model, in fp64 to 1e-12."""
    dense, feed = make(tiny("qwen3-tiny"), 1)
    size = dense.chunks[0].config.ffn_size
    mixed, same_feed = make(tiny("qwen3-moe-tiny", moe_shared_expert_intermediate_size=size), 1)
    of_dense = dict(dense.chunks[0].named_parameters())
    for name, parameter in mixed.chunks[0].named_parameters():
        counterpart = of_dense.get(name.replace("mlp.shared.", "mlp.")) if "mlp.fc" not in name else None
        if counterpart is not None:
            parameter.data.copy_(counterpart.data)
        elif "mlp.fc2" in name:
            parameter.data.zero_()
    losses = [model.forward_backward(f.next_global_batch()) for model, f in ((dense, feed), (mixed, same_feed))]
    torch.testing.assert_close(losses[1], losses[0], atol=1e-12, rtol=0)
    found = {
        name.replace("mlp.shared.", "mlp."): p for name, p in mixed.chunks[0].named_parameters() if "mlp.fc" not in name
    }
    assert of_dense.keys() <= found.keys()
    for name, parameter in of_dense.items():
        expected, gradient = (
            dense.data_parallel.main_gradients.main_gradient(parameter),
            mixed.data_parallel.main_gradients.main_gradient(found[name]),
        )
        assert expected.abs().max() > 0
        torch.testing.assert_close(gradient, expected, atol=1e-12, rtol=0)


@pytest.mark.parametrize(
    ("name", "flags"),
    [
        ("qwen3-moe-tiny", {"recompute_granularity": "full"}),
        ("qwen3-moe-tiny", {"offload_alpha": 0.0, "offload_tiles": 4}),
        (
            "qwen3-moe-tiny",
            {"offload_alpha": 0.0, "offload_tiles": 8, "offload_granularity": "tile", "offload_slot_tiles": 2},
        ),
        ("glm-4.5-tiny", {"offload_alpha": 0.0, "offload_tiles": 4, "moe_layer_freq": ""}),
    ],
    ids=["recomputed", "alpha 0", "swept", "sigmoid"],
)
def test_a_token_is_routed_once(name: str, flags: dict[str, Any]) -> None:
    """Backward rebuilds all else, in bf16, and finds the experts of forward: the router runs once for each tile."""
    model, feed = make(tiny(name, dtype="bf16", global_batch_size=2, **flags), 1)
    routed: list[int] = []
    original = Experts.route

    def counted(self: Experts, x: Tensor) -> Tensor:
        routed.append(x.flatten(0, -2).shape[0])
        return original(self, x)

    with patch.object(Experts, "route", counted):
        model.forward_backward(feed.next_global_batch())
    layers, microbatches, length = 2, 2, 64
    assert sum(routed) == layers * microbatches * length
    assert len(routed) == layers * microbatches * flags.get("offload_tiles", 1)
