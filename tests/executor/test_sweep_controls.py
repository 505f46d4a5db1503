"""Planted faults of a sweep: each is told by the checker of races, by poison, or by other numbers."""

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
from layouts import tiny
from swapped_steps import Workplace, differences, observed, profiled_once
from torch import Tensor

from memo.errors import MemoError
from memo.executor.key_values import KeyValues, KeyValueSwapper
from memo.executor.layer_inputs import LayerInputs
from memo.executor.sweep import SweptLayer

pytestmark = pytest.mark.usefixtures("one_thread")

SWEPT: dict[str, Any] = {
    "params_dtype": "fp64",
    "offload_granularity": "tile",
    "offload_tiles": 4,
    "offload_alpha": 0.5,
    "offload_slot_tiles": 1,
    "recompute_attention_layers": 1,
    "profile_cache": "off",
}


def keeps_the_sums(right: Callable[..., Any], layer: SweptLayer, grad: Tensor, context: Any) -> Tensor:
    """The sums of a layer's gradients of keys and values begin with those of the layer before."""
    with patch.object(layer.memory.keys, "sums", _NeverZero(layer.memory.keys.sums)):
        result: Tensor = right(layer, grad, context)
    return result


class _NeverZero:
    def __init__(self, sums: Tensor) -> None:
        self.sums = sums

    def zero_(self) -> None:
        pass

    def __getitem__(self, rows: slice) -> Tensor:
        return self.sums[rows]


def begins_one_part(right: Callable[..., Any], keys: KeyValueSwapper, kind: str, layer: int, section: int) -> None:
    """A backward waits only for the part of its first section."""
    if kind == "B" and section == keys.sections - 1:
        for swapper in keys.swappers:
            with patch.object(swapper.backend, "wait", lambda *_: None):
                swapper.begin(kind, layer)
        return
    right(keys, kind, layer, section)


def ends_forward_early(right: Callable[..., Any], keys: KeyValueSwapper, kind: str, layer: int, section: int) -> None:
    """A part is given away after its section of the backward's first tile, while earlier sections still read it."""
    if kind == "B" and section == keys.sections - 1:
        for swapper in reversed(keys.swappers):
            swapper.end(kind, layer)
    elif kind == "F":
        right(keys, kind, layer, section)


def reads_too_few_keys(right: Callable[..., Any], keys: KeyValues, row: int) -> tuple[Tensor, Tensor]:
    """The first token's key is missing from every sum."""
    dk, dv = right(keys, row)
    return dk.clone(), dv


def leaves_inputs_in_their_slots(right: Callable[..., Any], inputs: LayerInputs, *of: Any) -> None:
    """The second forward of attention does not wait for its input."""
    with patch.object(inputs.swapper.backend, "wait", lambda *_: None):
        right(inputs, *of)


def runs_attention_once(right: Callable[..., Any], layer: SweptLayer, shape: Tensor, context: Any) -> None:
    """The second forward passes its sections, but computes nothing."""
    with patch.object(layer, "tiles", []):
        right(layer, shape, context)


FAULTS: dict[str, tuple[type, str, Callable[..., Any]]] = {
    "sums are not set to zero": (SweptLayer, "run_backward", keeps_the_sums),
    "a backward does not wait for keys": (KeyValueSwapper, "begin", begins_one_part),
    "keys are given away early": (KeyValueSwapper, "end", ends_forward_early),
    "gradients of keys are lost": (KeyValues, "sums_before", reads_too_few_keys),
    "an input is not waited for": (LayerInputs, "take", leaves_inputs_in_their_slots),
    "attention is not recomputed": (SweptLayer, "_forward_again", runs_attention_once),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_told(name: str) -> None:
    cls, method, fault = FAULTS[name]
    right = getattr(cls, method)
    workplace = Workplace(tiny("llama-tiny", num_layers=3, global_batch_size=1), 1)
    batches = workplace.batches(4)
    with profiled_once():
        expected = workplace.step(workplace.build(**SWEPT), batches)
        with observed(copies="lazy"):
            model = workplace.build(**SWEPT)
        assert differences(workplace.step(model, batches), expected) == []
        with patch.object(cls, method, lambda *args: fault(right, *args)):
            try:
                found = workplace.step(model, batches)
            except MemoError:
                return
    assert differences(found, expected) != [], "the fault changed nothing"
