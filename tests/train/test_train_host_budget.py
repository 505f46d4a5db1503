"""States and activations of all ranks of a node share one budget of its host memory, whoever asks first."""

import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from layouts import tiny
from ranks import run_ranks
from trainers import tiny_trainer

import memo
from memo.errors import HostMemoryError
from memo.estimate.state_memory import state_bytes
from memo.executor import host_budget
from memo.executor.host_pool import HostPool
from memo.units import GIB

BOTH: dict[str, Any] = {
    "num_layers": 4,
    "seq_length": 512,
    "offload_states": "all",
    "offload_alpha": 1.0,
    "offload_tiles": 4,
}
STATES: dict[str, Any] = {"num_layers": 16, "offload_states": "all"}
WAIT_S = 2.0
"""For a neighbour that maps before all have asked; none does, so the test takes as long."""


def trainer(**overrides: Any) -> memo.Trainer:
    """Not refused by the estimate before it starts."""
    return tiny_trainer(**{"global_batch_size": 2, "params_dtype": "bf16", "admission": False, **overrides})


def mapped(**overrides: Any) -> tuple[int, int]:
    """Bytes of states and of activations in host memory, after a step."""
    with trainer(**overrides) as run:
        run.step()
        assert run.parts.states is not None and run.parts.swap is not None
        return run.parts.states.host_bytes, run.parts.swap.swapper.records.pool.num_bytes


def test_activations_get_what_states_leave() -> None:
    """Half of what they want: asked a second time, the whole limit would still look free."""
    states, activations = run_ranks(1, mapped, **BOTH)[0]
    limit_bytes = states + activations // 2
    assert max(states, activations) <= limit_bytes, "either of them alone fits"
    found = run_ranks(1, mapped, **BOTH, offload_host_memory_gib=limit_bytes / GIB)[0]
    assert found[0] == states and 0 < found[1] < activations
    assert sum(found) <= limit_bytes


def refused(limit_bytes: int) -> str:
    with pytest.raises(HostMemoryError) as raised:
        trainer(**BOTH, offload_host_memory_gib=limit_bytes / GIB)
    return str(raised.value)


def test_activations_are_refused_where_states_take_all() -> None:
    states, activations = run_ranks(1, mapped, **BOTH)[0]
    assert (states + activations) / max(states, activations) > 1.67
    message = run_ranks(1, refused, max(states, activations))[0]
    assert "host memory" in message and "--offload-host-memory-gib" in message


def beside_a_neighbour(folder: Path, total_bytes: int) -> int:
    """This rank's states in host memory, on a node where rank 1 asks what is free as late as it can."""
    rank, map_arena = dist.get_rank(), HostPool._map

    def mapping(pool: HostPool, is_pinned: bool) -> torch.Tensor:
        with open(folder / str(rank), "a") as file:
            file.write(f"{pool.num_bytes}\n")
        return map_arena(pool, is_pinned)

    def available() -> int:
        deadline_s = time.monotonic() + WAIT_S
        while rank == 1 and not (folder / "0").exists() and time.monotonic() < deadline_s:
            time.sleep(0.01)
        return total_bytes - sum(int(line) for file in folder.iterdir() for line in file.read_text().split())

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(HostPool, "_map", mapping)
        patch.setattr(host_budget, "available_host_bytes", available)
        with trainer(**STATES) as run:
            assert run.parts.states is not None
            return run.parts.states.host_bytes


def test_no_rank_maps_before_its_neighbours_have_asked(tmp_path: Path) -> None:
    """Memory just large enough for both: what one has mapped must not count against the other's part."""
    config = tiny("llama-tiny", "bf16", global_batch_size=2, **STATES)
    states = state_bytes(config, 2, 0)
    assert states.device < states.host / 4
    total_bytes = int(2 * (states.device + states.host / 0.9)) + 4
    found = run_ranks(2, beside_a_neighbour, tmp_path, total_bytes)
    assert found == [states.host] * 2
    assert sum(found) <= 0.9 * total_bytes
