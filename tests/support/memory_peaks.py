"""Small runs on the CPU whose peak of allocated memory is compared with memo's account."""

import dataclasses
import sys
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from trainers import QUIET

import memo
from memo.config import RunConfig, preset
from memo.estimate.program.memory import program_memory
from memo.estimate.swap_memory import SwapBytes

MOST_BELOW = 0.005
"""Largest share by which the account may lie below what is measured."""
SWEEP: dict[str, Any] = {
    "offload_granularity": "tile",
    "offload_slot_tiles": 1,
    "num_layers": 2,
    "seq_length": 1024,
    "loss_chunk_size": 64,
    "vocab_size": 256,
    "ffn_hidden_size": 1024,  # so that what a layer takes is much beside the few KiB that nobody accounts for
}
"""Flags of layers that are swept."""


def run_config(name: str, **overrides: object) -> RunConfig:
    base: dict[str, object] = {
        "num_layers": 4,
        "vocab_size": 1024,
        "params_dtype": "fp32",
        "offload_alpha": "off",
        "device": "cpu",
        "mock_data": True,
        "profile_cache": "off",
        **QUIET,
    }
    return dataclasses.replace(RunConfig(), model=preset(name)).override({**base, **overrides})


def counted() -> Any:
    """Count the requests to torch's allocator from now on, until this process ends."""
    from allocated_bytes import AllocatedBytes

    return AllocatedBytes()


class Peak(NamedTuple):
    """Bytes of one rank of a pipeline stage at the peak of a step.

    Attributes:
        swap: bytes that the layers took for swapping when they were built; None without a swap plan.
        printed: device and host bytes for swapping by the swap plan's solution, which is printed.
    """

    stage: int
    measured: int
    foreseen: int
    swap: SwapBytes | None
    printed: tuple[int, int] | None


def peak_of_training(config: RunConfig) -> Peak:
    """The peak of a step after the first, on one of the run's ranks.

    gloo's threads may still hold tensors of messages that have ended. Their number is random: in about one step of
    sixty it is one more than usual. So the least peak of up to three steps is taken, until no rank has more than is
    foreseen and MOST_BELOW.
    """
    world_size = dist.get_world_size()
    counter = counted()
    with memo.Trainer(config=config) as trainer:
        stage, runtime = trainer.mesh.at.pp, trainer.parts.swap
        swap = None if runtime is None else SwapBytes(runtime.device_bytes, runtime.host_bytes, runtime.host_bytes)
        solution = None if trainer.parts.chosen_swap is None else trainer.parts.chosen_swap.solution
        printed = None if solution is None else (solution.device_bytes, solution.host_bytes)
        trainer.step()  # makes the moments
        foreseen, measured = program_memory(config, world_size, stage).total, sys.maxsize
        for _ in range(3 if world_size > 1 else 1):
            counter.take_peak_bytes()
            trainer.step()
            measured = min(measured, int(counter.take_peak_bytes()))
            excess = torch.tensor(measured * (1 - MOST_BELOW) - foreseen)
            dist.all_reduce(excess, dist.ReduceOp.MAX)
            if excess <= 0:
                break
    return Peak(stage, measured, foreseen, swap, printed)
