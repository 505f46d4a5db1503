"""A custom layer under swap plans: any alpha gives the same bits, whole or swept, and the plain layer's numbers.

torch.equal on the loss and on every gradient against alpha = 0, with buffers poisoned, copies late and every access
checked. In fp64 all agree with the plain layer to 1e-12 of the largest value.
"""

from typing import Any

import pytest
from custom_layers import PARALLEL, SANDWICH
from layouts import assemble, relative_error, tiny
from ranks import run_ranks
from swapped_steps import Workplace, differences, observed, profiled_once
from torch import Tensor

TILES = 4
ALPHAS = (0.5, 1.0)
BASE: dict[str, Any] = {"num_layers": 3, "global_batch_size": 2}
SWEPT: dict[str, Any] = {"offload_granularity": "tile", "offload_slot_tiles": 1}
CASES: list[tuple[str, int, dict[str, Any], dict[str, Any]]] = [
    (PARALLEL, 1, {}, {}),
    (PARALLEL, 1, {}, SWEPT),
    (PARALLEL, 2, {"tp": 2}, {}),
]
MORE: list[tuple[str, int, dict[str, Any], dict[str, Any]]] = [
    (SANDWICH, 1, {}, {}),
    (PARALLEL, 2, {"cp": 2, "cp_comm_type": "all_gather"}, SWEPT),
    (SANDWICH, 2, {"pp": 2, "num_layers": 4}, {}),
]


def examine(
    layer: str, world_size: int, layout: dict[str, Any], memory: dict[str, Any], dtype: str
) -> tuple[list[str], int, dict[str, dict[str, Tensor]]]:
    """What differs from alpha = 0 on this rank, how often a layer left the device, and the pieces of the plain layer
    and of alpha = 0."""
    workplace = Workplace(tiny("llama-tiny", custom_layer=layer, **{**BASE, **layout}), world_size)
    is_swept, unequal, moves = bool(memory), [], 0
    common = {"params_dtype": dtype, "offload_tiles": TILES, **memory}
    with profiled_once():
        plain = workplace.build(params_dtype=dtype, offload_alpha="off")
        expected = workplace.step(plain, workplace.batches())
        batches = workplace.batches(TILES, is_swept)
        reference = workplace.step(workplace.build(**common, offload_alpha=0.0), batches)
        runs: list[dict[str, Any]] = [{"offload_alpha": alpha} for alpha in ALPHAS]
        runs += [{"offload_alpha": 1.0, "recompute_attention_layers": 1}] if is_swept and not layout else []
        for run in runs:
            with observed():
                model = workplace.build(**common, **run)
            assert model.swap is not None
            with model.swap.swapper.recorded() as recorder:
                different = differences(workplace.step(model, batches), reference)
            unequal += [f"{run}: {different}"] if different else []
            moves += sum(span.row == "offload" for span in recorder.spans())
    return unequal, moves, {"plain": expected.pieces, "swapped": reference.pieces}


@pytest.mark.parametrize(
    ("layer", "world_size", "layout", "memory", "dtype"),
    [
        *((*case, "fp64") for case in CASES),
        (*CASES[0], "bf16"),
        *(pytest.param(*case, "fp64", marks=pytest.mark.full) for case in MORE),
        *(pytest.param(*case, "bf16", marks=pytest.mark.full) for case in [*CASES[1:], *MORE]),
    ],
    ids=lambda value: value.rpartition(":")[2] if isinstance(value, str) else str(value),
)
def test_any_alpha_gives_the_same_bits(
    layer: str, world_size: int, layout: dict[str, Any], memory: dict[str, Any], dtype: str
) -> None:
    found = run_ranks(world_size, examine, layer, world_size, layout, memory, dtype)
    assert not [text for unequal, _, _ in found for text in unequal]
    assert sum(moves for _, moves, _ in found) > 0
    plain, swapped = (assemble([pieces[name] for _, _, pieces in found]) for name in ("plain", "swapped"))
    if dtype == "fp64":
        assert relative_error(swapped, plain) <= 1e-12
