"""After an exception, or a step that is skipped, slots, records and states are as if it had not been."""

from collections.abc import Sequence
from typing import Any
from unittest.mock import patch

import pytest
import torch
from forward import loss_of
from layouts import make, tiny
from ranks import run_ranks
from streamed_steps import ALL, FRACTIONS, SMALL, Course, states_of, unlike
from swapped_steps import Copies, Injected, counted, observed

from memo.config import RunConfig
from memo.errors import PlanError
from memo.executor import tile_machine
from memo.executor.layer import TokenwiseLayer
from memo.executor.layer_states import LayerStates
from memo.executor.streamed import StreamedLayer
from memo.model.transformer import Microbatch
from memo.parallel.context import ContextAttention
from memo.parallel.data import ShardedDataParallel
from memo.parallel.main_gradients import MainGradients
from memo.parallel.units import Bucket
from memo.train.parallel_model import ParallelModel

PLACES: dict[str, tuple[type, str]] = {
    "a layer's forward": (ContextAttention, "forward"),
    "a layer's backward": (ContextAttention, "backward"),
    "what comes after a layer": (StreamedLayer, "forward"),
    "a gradient on its way": (LayerStates, "_deliver"),
    "a reduction": (MainGradients, "complete"),
    "the optimizer": (MainGradients, "norm"),
}
PLACES_ON_TILES: dict[str, tuple[Any, str]] = {
    "a tile of the MLP": (TokenwiseLayer, "_finish"),
    "a tile of the MLP's backward": (TokenwiseLayer, "_finish_backward"),
    "a matrix of forward or recompute": (tile_machine, "column_forward"),
}
"""Also while tiles are recomputed."""
CASES: dict[str, dict[str, Any]] = {
    "all": ALL,
    "fractions, fp32": {**ALL, **dict(zip(FRACTIONS, (0.75, 0.5, 0.5), strict=True)), "params_dtype": "fp32"},
    "swapped": {**ALL, "offload_alpha": 0.5, "offload_tiles": 2},
}
LR = 1e-2

pytestmark = pytest.mark.usefixtures("one_thread")


def config_of(**overrides: Any) -> RunConfig:
    return tiny("gpt-tiny", **{**SMALL, "num_layers": 4, "global_batch_size": 2, "params_dtype": "bf16", **overrides})


def started(config: RunConfig, copies: Copies = "lazy", world_size: int = 1) -> tuple[ParallelModel, list[Any]]:
    """A model, and batches for three steps."""
    with observed(copies=copies):
        model, feed = make(config, world_size)
    return model, [feed.next_global_batch() for _ in range(3)]


def step(model: ParallelModel, batches: list[Microbatch]) -> tuple[float, float, bool]:
    loss, norm, updated = model.train_step(batches, LR)
    return loss.item(), norm, updated


SHARED = [
    pytest.param(place, case, marks=[] if turn % len(CASES) == at else [pytest.mark.full])
    for turn, place in enumerate(PLACES)
    for at, case in enumerate(CASES)
]


@pytest.mark.parametrize(("place", "case"), [*SHARED, *((place, "swapped") for place in PLACES_ON_TILES)])
def test_the_step_after_a_failed_one_is_clean(place: str, case: str) -> None:
    copies: Copies = "threads" if case == "all" or "backward" in place else "lazy"
    (clean, batches), (model, _) = started(config_of(**CASES[case]), copies), started(config_of(**CASES[case]), copies)
    at = {**PLACES, **PLACES_ON_TILES}[place]
    with counted(*at) as calls:
        expected = [step(clean, batches[0])]
    num_calls = len(calls)
    assert num_calls > 0, "the place is never passed"
    found = [step(model, batches[0])]
    for batch in batches[1:]:
        for raises_at in sorted({0, num_calls // 2, num_calls - 1}):
            with counted(*at, raises_at), pytest.raises(Injected):
                model.train_step(batch, LR)
        expected.append(step(clean, batch))
        found.append(step(model, batch))
    assert unlike(Course(found, states_of(model)), Course(expected, states_of(clean))) == []
    assert loss_of(model, batches[0]).item() == loss_of(clean, batches[0]).item()


def test_a_failed_evaluation_leaves_nothing_behind() -> None:
    (clean, batches), (model, _) = started(config_of(**ALL)), started(config_of(**ALL))
    for raises_at in range(4):
        with counted(*PLACES["a layer's forward"], raises_at), pytest.raises(Injected):
            loss_of(model, batches[2])
        assert step(model, batches[0]) == step(clean, batches[0])
    assert unlike(Course([], states_of(model)), Course([], states_of(clean))) == []


def test_a_layer_shows_nan_while_its_weights_are_away() -> None:
    model, batches = started(config_of(**{**ALL, "weight_offload_fraction": 0.5}))
    names = {name for name, p in model.data_parallel.parameters.items() if p.isnan().all()}
    away = {
        n for n in model.data_parallel.parameters if n.split(".")[:3] in (["0", "layers", "1"], ["0", "layers", "3"])
    }
    assert names == away, "half of the layers, counted from the last"
    model.train_step(batches[0], LR)
    loss_of(model, batches[0])
    assert {name for name, p in model.data_parallel.parameters.items() if p.isnan().all()} == away
    with patch.object(ShardedDataParallel, "bind_weights", lambda *_: None):
        assert loss_of(model, batches[0]).isnan()


def test_another_order_than_the_plans_is_refused() -> None:
    model, _ = started(config_of(**ALL))
    assert model.states is not None
    model.states.next_step()
    model.states.begin("F", 0)
    with pytest.raises(PlanError, match=r"F of layer 1, but in the state plan F0 layer 0 comes next \(step 0 of 16\)"):
        model.states.begin("F", 1)


def skipped_step(config: RunConfig, world_size: int) -> list[str]:
    """One rank's gradients of a step are infinite: no rank's states change, and training goes on."""
    right = MainGradients.complete

    def spoilt(gradients: MainGradients, reduced: Sequence[tuple[Bucket, torch.Tensor]]) -> None:
        if model.mesh.rank == world_size - 1:
            for _, shard in reduced:
                shard.fill_(float("inf"))
        right(gradients, reduced)

    (clean, batches), (model, _) = (started(config, world_size=world_size) for _ in range(2))
    expected, found = [step(clean, batches[0])], [step(model, batches[0])]
    before = states_of(model)
    with patch.object(MainGradients, "complete", spoilt):
        _, norm, updated = step(model, batches[1])
    assert (norm, updated) == (float("inf"), False)
    assert unlike(Course([], states_of(model)), Course([], before)) == []
    expected.append(step(clean, batches[2]))
    found.append(step(model, batches[2]))
    return unlike(Course(found, states_of(model)), Course(expected, states_of(clean)))


@pytest.mark.parametrize(("layout", "placement"), [({}, {}), ({"tp": 2}, ALL), ({"pp": 2}, ALL)], ids=str)
def test_gradients_that_are_not_finite_skip_the_step_on_all_ranks(
    layout: dict[str, Any], placement: dict[str, Any]
) -> None:
    assert run_ranks(2, skipped_step, config_of(**placement, **layout), 2) == [[], []]
