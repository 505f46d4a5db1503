"""Bytes of states: torch's allocator is asked for what lies on the device, to the byte; the arena is not in it."""

import gc
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from ranks import run_ranks
from state_runs import StateRun
from swap_runs import stage_ops

from memo.executor.cpu_streams import VirtualStreams
from memo.mesh import Mesh, RankGrid
from memo.spec.placement import StatePlacement
from memo.train.watching import MemoryUse

LAYERS, MICROBATCHES = 5, 2
OPS = stage_ops(1, 1, MICROBATCHES, LAYERS, 0)
ZERO3: dict[str, Any] = {"shards_gradients": True, "shards_weights": True}
CASES: dict[str, tuple[int, StatePlacement]] = {
    "nothing streams": (1, StatePlacement(LAYERS)),
    "optimizer": (1, StatePlacement(LAYERS, LAYERS)),
    "all": (1, StatePlacement(LAYERS, LAYERS, LAYERS, LAYERS)),
    "all, no weight copy": (1, StatePlacement(LAYERS, LAYERS, LAYERS, LAYERS, weight_copy=False)),
    "fractions": (1, StatePlacement(LAYERS, 4, 3, 2)),
    "dp 2, fractions": (2, StatePlacement(LAYERS, 4, 3, 2)),
    "dp 2, ZeRO-3": (2, StatePlacement(LAYERS, **ZERO3)),
    "dp 2, ZeRO-3, half": (2, StatePlacement(LAYERS, 3, 3, 3, **ZERO3)),
}


def measured_and_told(world_size: int, placement: StatePlacement, dtype: torch.dtype) -> tuple[int, MemoryUse, int]:
    """Bytes that torch gave out and has not got back after a step, and what a run tells of them.

    Last, bytes of torch's that are no states on the device: host staging, on a CPU, and the NaN of parameters.
    """
    from allocated_bytes import AllocatedBytes

    rank = torch.distributed.get_rank() if world_size > 1 else 0
    mesh = Mesh(RankGrid(tp=1, cp=1, dp=world_size, pp=1), rank)
    counter = AllocatedBytes()
    gc.collect()
    before = counter.live_bytes
    run = StateRun(OPS, placement, VirtualStreams() if placement.streams else None, mesh, dtype)
    run.step()
    run.step()
    run.seen.weights.clear()
    run.data_parallel.main_gradients.begin_step(MICROBATCHES)  # forgets the norms of the last step
    gc.collect()
    parts: Any = SimpleNamespace(
        data_parallel=run.data_parallel, optimizer=run.optimizer, swap=None, states=run.states, coded=None
    )
    told = MemoryUse.of(parts)
    for _ in range(100):  # gloo's threads let go of a message's memory when they next run
        measured = counter.live_bytes - before
        if measured <= told.device_bytes + dtype.itemsize:
            break
        time.sleep(0.05)
    return measured, told, dtype.itemsize


@pytest.mark.parametrize("name", CASES)
def test_device_bytes_are_what_is_told(name: str) -> None:
    world_size, placement = CASES[name]
    dtype = torch.float32 if list(CASES).index(name) % 3 == 0 else torch.bfloat16
    for measured, told, other_bytes in run_ranks(world_size, measured_and_told, world_size, placement, dtype):
        assert measured == told.device_bytes + other_bytes
        assert (told.host_records_bytes > 0) == (placement.optimizer > 0)
        if placement.optimizer == LAYERS:
            assert told.optimizer_bytes < 100, "only counts of steps"
