"""The largest model that fits: what the issue asks for, its shape, and what binds beyond it."""

import re
from dataclasses import replace
from typing import Any

import pytest

from memo.config.check_model import check_model
from memo.errors import ConfigError
from memo.search.largest import Family, _scaling
from memo.search.planning import plan
from memo.search.question import ask
from memo.search.ranking import search
from memo.units import GIB


@pytest.mark.parametrize("model", ["glm-4.5-air", "gemma-3-4b", "qwen3.5-4b", "deepseek-v2-lite", "smollm3-3b"])
def test_models_of_several_kinds_of_layers_are_scaled(model: str) -> None:
    """However small: even where one layer of eight heads has more parameters than asked for."""
    axis = _scaling(ask(model, 8, hardware="h100-80"), None)
    for steps, parameters in ((1, 0), (1400, 2e10)):
        for question in axis.questions(steps):
            check_model(question.base)
            assert question.model.shape.parameters > parameters


@pytest.mark.parametrize(
    ("family", "gpus", "least"),
    [
        ("gpt", 2, 37.5e9),
        pytest.param("llama", 2, 37.5e9, marks=pytest.mark.full),
        pytest.param("gpt", 8, 150e9, marks=pytest.mark.full),
        pytest.param("llama", 8, 150e9, marks=pytest.mark.full),
    ],
)
def test_eight_gpus_of_80_gb_train_150b_and_two_a_quarter_of_it(family: Family, gpus: int, least: float) -> None:
    host_memory_gib = 256.0 * gpus
    found = plan(
        None, gpus, objective="max-model-size", family=family, seq_len=4096, host_memory_gib=host_memory_gib, top=1
    )
    largest = found.largest
    assert largest is not None and least <= largest.parameters < 1.1 * least
    assert largest.unclipped_parameters > 1.05 * largest.parameters
    assert " binds: with the states of " in largest.limit
    assert 80 < largest.hidden_size / largest.num_layers < 150
    best = found.best
    assert best is not None and best.sized.verdict == "fits" and best.step.binding in best.step.resources
    assert best.strategy.placement is not None and 0 < best.strategy.placement.optimizer < largest.num_layers


def test_the_shape_of_a_model_is_scaled() -> None:
    found = plan("llama-3.1-8b", 1, objective="max-model-size", seq_len=4096, host_memory_gib=256, top=1)
    model = found.question.model.sizes
    assert found.largest is not None and model.num_query_groups == 8 and model.gated and model.head_dim == 128
    assert model.ffn_size * 4096 == 14336 * model.hidden_size
    smaller = replace(found.question, host_memory_gib=200.0)
    assert search(smaller, top=1).best is None


@pytest.mark.parametrize("min_tgs", [2200.0, pytest.param(8000.0, marks=pytest.mark.full)])
def test_the_largest_model_that_is_fast_enough(min_tgs: float) -> None:
    """The answer trains so fast, the next size does not, and it says at which speed."""
    asked: dict[str, Any] = {"seq_len": 4096, "hardware": "h200", "host_memory_gib": 128}
    found = plan(None, 1, objective="max-model-size", family="gpt", min_tgs=min_tgs, **asked)
    largest, best = found.largest, found.best
    assert largest is not None and best is not None and best.step.tgs >= min_tgs
    assert all(each.step.tgs >= min_tgs for each in found.choices)
    assert largest.unclipped_parameters == largest.parameters == found.question.model.shape.parameters < 15e9
    said = re.search(r"parameters train at no more than ([\d,]+) tokens per GPU and second, fewer", largest.limit)
    assert said is not None and 0.8 * min_tgs < int(said[1].replace(",", "")) < min_tgs


def test_a_speed_that_the_largest_model_has_binds_nothing() -> None:
    asked: dict[str, Any] = {"objective": "max-model-size", "seq_len": 4096, "host_memory_gib": 256, "top": 1}
    assert plan("llama-3.1-8b", 1, min_tgs=1.0, **asked).largest == plan("llama-3.1-8b", 1, **asked).largest
    never = plan("llama-3.1-8b", 1, min_tgs=1e9, **asked)
    assert never.largest is not None and never.largest.parameters == 0 and never.best is None
    assert "fewer than --min-tgs 1e+09" in never.largest.limit


@pytest.mark.parametrize("gpus", [1, 3])
def test_states_that_must_not_be_placed_are_not(gpus: int) -> None:
    """The model that is found has a layout, GPU memory is what the next size lacks, and clipping costs nothing."""
    asked: dict[str, Any] = {"objective": "max-model-size", "seq_len": 8192, "place_states": "never", "top": 1}
    found = plan(None, gpus, family="gpt", **asked)
    largest, best = found.largest, found.best
    assert largest is not None and best is not None and best.sized.verdict == "fits"
    assert best.strategy.placement is None and best.strategy.sharding == "optim"
    assert 18 * largest.parameters / gpus < 80 * GIB  # bytes of states, as nothing holds them but the GPUs
    assert largest.limit.startswith("GPU memory: ")
    assert largest.unclipped_parameters == largest.parameters


def test_a_family_needs_its_objective() -> None:
    for arguments in ({"family": "gpt"}, {"family": "opt", "objective": "max-model-size"}, {}):
        with pytest.raises(ConfigError):
            plan(None, 1, **arguments)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="--place-states is 'maybe': use auto, never"):
        ask("gpt-7b", 1, place_states="maybe")
    with pytest.raises(ConfigError, match="--exp-avg-sq-dtype is 'fp16': use fp32, bf16"):
        ask("gpt-7b", 8, exp_avg_sq_dtype="fp16")
