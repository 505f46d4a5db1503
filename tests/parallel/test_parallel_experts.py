"""Experts on sorted rows, against every token through every expert, in fp64 to 1e-12; and routing that happens once.

Routers and shared experts are held to transformers' in tests/parity.
"""

from typing import Any
from unittest.mock import patch

import pytest
import torch
from layouts import make, tiny
from torch import Tensor

from memo.config import ModelConfig
from memo.model.layer import Experts
from memo.parallel.experts import ExpertRows, Router, route, shares
from memo.parallel.router_losses import LayerLosses

TOKENS, TOP_K, NUM_EXPERTS, HIDDEN, WIDTH = 40, 3, 5, 16, 8


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def routings() -> dict[str, Tensor]:
    """Of all experts, and of tokens that all have the same ones, so that two experts have no rows."""
    router = Router(random(NUM_EXPERTS, HIDDEN, seed=1), None, ModelConfig(moe_router_topk=TOP_K))
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
