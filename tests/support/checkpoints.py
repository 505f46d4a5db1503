"""Checkpoints as plain values, to compare two of them."""

from pathlib import Path

import torch
from torch import Tensor

from memo.checkpoint.chunks import GlobalTensor
from memo.checkpoint.run_state import RunState
from memo.checkpoint.store import open_checkpoint, read_tensors


def contents(final: Path) -> tuple[RunState, dict[str, Tensor]]:
    """The state, and every global tensor (master, exp_avg, exp_avg_sq) of one checkpoint; in one process."""
    state, index = open_checkpoint(final)
    values = {name: torch.empty(entry.shape, dtype=entry.torch_dtype) for name, entry in index.items()}
    read_tensors(final, index, {name: GlobalTensor.whole(value) for name, value in values.items()})
    return state, values


def assert_equal_bits(first: Path, second: Path) -> None:
    """Two checkpoints hold the same state and the same tensors to the last bit."""
    (state, values), (other_state, other_values) = contents(first), contents(second)
    assert state == other_state
    assert values.keys() == other_values.keys()
    assert {name.split("/")[0] for name in values} == {"master", "exp_avg", "exp_avg_sq"}
    different = [name for name, value in values.items() if not torch.equal(value, other_values[name])]
    assert not different
