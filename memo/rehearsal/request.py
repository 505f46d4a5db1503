"""The input of a rehearsal: the configuration of one rank of the run, and the machine on which it would run."""

import dataclasses
from dataclasses import dataclass

from memo.artifacts.artifact import Artifact
from memo.config import RunConfig
from memo.config.checks import check
from memo.config.derived import resolved_a2a_size, resolved_vocab_size, world_size_from_env
from memo.config.grid import Coordinates, rank_grid
from memo.config.require import require, require_count
from memo.config.run import CheckpointConfig, LoggingConfig
from memo.config.training import TrainingConfig
from memo.emulated_gpu.launch import Device
from memo.estimate.hardware import Hardware
from memo.estimate.memory_account import worst_ring_rank
from memo.estimate.unseen_memory import CONTEXT
from memo.units import GIB

STEADY_STEPS = 2
"""Steps that are measured, after a first step in which libraries and the optimizer allocate memory that they keep, and
after those from which memory is planned and the first that is served as planned."""

MOST_MINUTES = 10_000.0
"""Time-out of messages: a step on the emulated GPU may take many minutes, and no other rank can be lost."""

STANDS_IN = {
    "kernels": {"triton": "torch"},
    "delta_backend": {"fla": "torch"},
    "attention_backend": dict.fromkeys(("flash_attn", "flash_attn_3", "flash_attn_4", "te"), "flash"),
}
"""{field of the configuration: {kernels of another package: torch's kernels that replace them}}, because the emulated
GPU supports only torch's kernels."""

_EVALUATION = ("eval_interval", "eval_positions", "check_replicas_interval")


@dataclass(frozen=True)
class RehearsalRequest(Artifact):
    """The input of one process.

    Attributes:
        config: the configuration, with --simulate-world and --simulate-rank.
        hardware: the machine whose times are modelled.
        trace_out: file for a trace of one more step, as `memo.Trainer.trace` writes it.
    """

    schema = "rehearsal_request"
    remedy = "rehearse again"

    config: RunConfig
    hardware: Hardware
    trace_out: str | None = None


def checked_run(config: RunConfig, gpus: int) -> RunConfig:
    """The run that `memo train` would start on `gpus` GPUs, with mock data if no data are given.

    Raises ConfigError for flags that memo train refuses, for a device other than CUDA, and for --simulate-world.
    """
    parallel, device = config.parallel, config.hardware.device
    require(device != "cpu", "--device cpu conflicts with memo rehearse, which rehearses on a GPU: leave it out")
    require(
        parallel.simulate_world is None and parallel.simulate_rank == 0,
        f"--simulate-world {parallel.simulate_world} and --simulate-rank {parallel.simulate_rank} conflict with --gpus "
        f"{gpus}, of which memo rehearse runs one rank after the other: leave them out, and choose with --rank",
    )
    path = config.memory.offload_nvme_path
    require(
        path is None,
        f"--offload-nvme-path {path} conflicts with memo rehearse, whose GPU has no numbers to write: leave it out and "
        "raise --offload-host-memory-gib by what lies on the disk",
    )
    started = world_size_from_env()
    require(
        started == 1,
        f"memo rehearse runs alone, but {started} processes were started (WORLD_SIZE): start one, without torchrun",
    )
    preference, data_path = config.training.preference, config.data.data_path
    require(
        preference is None or data_path is not None,
        f"--preference {preference} needs pairs of answers to rehearse on: give --data-path PREFIX (`memo data pairs` "
        "makes a corpus of them)",
    )
    mock = {} if data_path else {"mock_data": True}
    config = config.override({"device": "cuda", "num_epochs": None, **mock})
    check(config, gpus, needs_data=False)
    return config


def ranks_that_differ(config: RunConfig, gpus: int, rank: int | None = None) -> list[int]:
    """A rank of the first, the second and the last pipeline stage; or only `rank`.

    Ranks of one stage have the same shapes, but those of a ring of cp differ in their calls of attention: the one that
    needs most is taken. The second stage has the most microbatches in flight of all stages in the middle. Raises
    ConfigError for a rank that the run does not have.
    """
    if rank is not None:
        require(
            0 <= rank < gpus, f"--rank is {rank}, but --gpus {gpus} have the ranks 0 to {gpus - 1}: give one of them"
        )
        return [rank]
    grid, last = rank_grid(config.parallel, gpus), config.parallel.pp - 1
    in_group = resolved_a2a_size(config.model, config.parallel)  # consecutive ranks, each in a ring of its own
    sized = config.override({"vocab_size": resolved_vocab_size(config.model)})
    places = {stage: worst_ring_rank(sized, gpus, stage) for stage in sorted({0, min(1, last), last})}
    return [grid.rank_at(Coordinates(0, place * in_group, 0, stage)) for stage, place in places.items()]


def as_one_rank(config: RunConfig, gpus: int, rank: int, ranks_per_node: int) -> RunConfig:
    """The configuration that runs only `rank`, without checkpoints, logs and evaluations."""
    require_count("--gpus", gpus)
    grid, training, memory = rank_grid(config.parallel, gpus), config.training, config.memory
    axes = ",".join(f"{axis}={getattr(grid, axis)}" for axis in ("tp", "cp", "pp", "dp"))
    plain = TrainingConfig()
    quiet = dataclasses.replace(training, **{name: getattr(plain, name) for name in _EVALUATION})
    limit_gib = memory.offload_host_memory_gib
    return dataclasses.replace(
        config, checkpoint=CheckpointConfig(), logging=LoggingConfig(progress=False), training=quiet
    ).override(
        {
            "simulate_world": axes,
            "simulate_rank": rank,
            "eval_data_path": None,
            "num_threads": 1,
            "profile_cache": "off",  # the cache is for times that were measured on a GPU
            "distributed_timeout_minutes": MOST_MINUTES,
            **stand_ins(config),
            "offload_host_memory_gib": None if limit_gib is None else limit_gib / ranks_per_node,
        }
    )


def stand_ins(config: RunConfig) -> dict[str, object]:
    """{field that names kernels of another package: torch's kernels that replace them}."""
    given = {name: getattr(config.hardware, name) for name in STANDS_IN}
    return {name: STANDS_IN[name][value] for name, value in given.items() if value in STANDS_IN[name]}


def emulated_device(gpus: int, hardware: Hardware, timed: str) -> Device:
    """The emulated GPU of one rank, with the memory that a driver would report minus CUDA's context, and with the
    rank's share of the node's host memory. Its clock models the machine named by `timed`, a name or a file.

    The rehearsal allocates the memory of NCCL's communicators once the run is checked. Page tables of host memory are
    not allocated.
    """
    return Device(
        name=hardware.driver_name,
        num_devices=1,
        memory_gib=hardware.visible_gib,
        context_gib=CONTEXT.foreseen / GIB,
        capability=hardware.capability,
        multiprocessors=hardware.multiprocessors,
        without_numbers=True,
        timed=timed,
        host_memory_gib=hardware.host_memory_gib / hardware.local_ranks(gpus),
    )
