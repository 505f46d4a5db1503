"""Swapping changes nothing: any alpha gives the same bits, and the plain model's numbers to rounding.

torch.equal on losses, on every gradient of the first step and on every weight after three steps, with buffers
poisoned and every access checked against the order of events (--offload-check-races). Against the plain model,
which works on whole sequences instead of tiles: 1e-12 of the largest value in fp64.
"""

import functools

import pytest
import torch
from layouts import Outcome, relative_error, tiny, train, train_all

from memo.config import RunConfig

ALPHAS = (0.0, 0.125, 0.25, 0.5, 1.0)
MODELS = ("gpt-tiny", "llama-tiny", "qwen3-tiny", "gpt2-tiny")
LAYOUTS = [
    (2, {"tp": 2}),
    (2, {"cp": 2, "cp_comm_type": "p2p"}),
    (2, {"cp": 2, "cp_comm_type": "all_gather"}),
    (2, {"cp": 2, "cp_comm_type": "a2a"}),
    (2, {"pp": 2}),
    (2, {"pp": 2, "vpp": 2}),
    (2, {}),
    (8, {"tp": 2, "cp": 2, "pp": 2}),
    (8, {"tp": 2, "pp": 2}),
]


def config_of(model: str, dtype: str = "fp64", **overrides: object) -> RunConfig:
    swaps = {"offload_tiles": 8, "offload_check_races": True} if "offload_alpha" in overrides else {}
    return tiny(model, dtype, num_layers=4, **swaps, **overrides)


@functools.cache
def plain(model: str) -> Outcome:
    return train(config_of(model))


def assert_same_bits(actual: Outcome, expected: Outcome) -> None:
    assert actual.losses == expected.losses
    assert actual.norms == expected.norms
    for ours, theirs in ((actual.gradients, expected.gradients), (actual.weights, expected.weights)):
        different = [name for name in theirs if not torch.equal(ours[name], theirs[name])]
        assert not different


@pytest.mark.parametrize("policy", ["auto", "paper"])
@pytest.mark.parametrize("model", MODELS)
def test_every_alpha_gives_the_same_bits(model: str, policy: str) -> None:
    dtypes = ("fp64", "fp32", "bf16")
    configs = [
        config_of(model, dtype, offload_alpha=alpha, offload_policy=policy) for dtype in dtypes for alpha in ALPHAS
    ]
    outcomes = train_all(configs)
    for first in range(0, len(outcomes), len(ALPHAS)):
        for outcome in outcomes[first + 1 : first + len(ALPHAS)]:
            assert_same_bits(outcome, outcomes[first])
    assert relative_error(outcomes[0].gradients, plain(model).gradients) <= 1e-12


@pytest.mark.parametrize(("world_size", "layout"), LAYOUTS, ids=str)
def test_every_layout_gives_the_same_bits(world_size: int, layout: dict[str, object]) -> None:
    model = "llama-tiny" if "cp" in layout else "gpt-tiny"
    alphas = ALPHAS if world_size == 2 else (0.0, 0.5, 1.0)
    outcomes = train_all([config_of(model, offload_alpha=alpha, **layout) for alpha in alphas], world_size)
    for outcome in outcomes[1:]:
        assert_same_bits(outcome, outcomes[0])
    assert relative_error(outcomes[0].gradients, plain(model).gradients) <= 1e-12
    assert relative_error(outcomes[0].weights, plain(model).weights) <= 1e-9


@pytest.mark.parametrize("granularity", ["full", "selective"])
def test_recomputation_gives_the_plain_bits(granularity: str) -> None:
    assert_same_bits(train(config_of("llama-tiny", recompute_granularity=granularity)), plain("llama-tiny"))
