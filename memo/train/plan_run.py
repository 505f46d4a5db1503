"""--plan auto: chooses the fastest layout, recomputation and swapping that fit the machine of the run.

This is algorithm 1 of LLMem (arXiv 2404.10933), which estimates the memory of each way of fine-tuning and takes the
fastest that fits. Here the ways are all of memo's layouts, micro-batch sizes, recomputation and swapping.
"""

from dataclasses import replace

import torch

from memo.config import RunConfig
from memo.config.derived import local_world_size_from_env
from memo.config.model import CHOICES_OF_TRAINED
from memo.errors import ConfigError
from memo.estimate.hardware import Hardware
from memo.estimate.host_memory import total_host_bytes
from memo.estimate.machines import machine_of_gpu, nearest_hardware
from memo.search.launch import run_of
from memo.search.plan import Choice
from memo.search.planning import plan
from memo.units import GIB

_HOST_STEP_GIB = 8
"""Unit of this node's host memory. Nodes of one kind have some megabytes more or less, and must find the same plan."""


def has_own_layout(config: RunConfig) -> bool:
    """Whether flags set anything that a plan would choose."""
    default = RunConfig()
    return (config.parallel, config.memory) != (default.parallel, default.memory)


def plan_run(config: RunConfig, model: str, gpus: int, hardware: str | None = None) -> tuple[RunConfig, Choice]:
    """Return `config` with the fastest layout that fits, and the plan's choice.

    `model`: a preset, or a Hugging Face directory, of which only config.json is read; `hardware`: a machine as for
    `memo plan`, by default the one with the first GPU here, with the host memory of this node.

    Raises ConfigError for flags that the plan would overrule, for an unknown machine, and if nothing fits.
    """
    if has_own_layout(config):
        raise ConfigError(
            "--plan auto conflicts with flags of layout, recomputation or swapping: leave one of both out"
        )
    training = config.training
    found = plan(
        model,
        gpus,
        seq_len=config.data.seq_length,
        global_batch_size=training.global_batch_size,
        hardware=hardware or gpu_machine(),
        host_memory_gib=None if hardware else own_host_gib(),
        clip_grad=training.clip_grad,
        exp_avg_dtype=training.exp_avg_dtype,
        exp_avg_sq_dtype=training.exp_avg_sq_dtype,
        deterministic=config.hardware.deterministic,
        kernels=config.hardware.kernels,
        preference=training.preference,
        **{name: getattr(config.model, name) for name in CHOICES_OF_TRAINED},
    )
    if found.best is None:
        asked = found.question
        raise ConfigError(
            f"--plan auto: nothing fits on {gpus} x {asked.hardware.name} with {asked.host_memory_gib:,g} GiB of host "
            f"memory a node: `memo plan` with --host-memory-gib {asked.host_memory_gib:g} tells why; or use more GPUs"
        )
    run = run_of(found.question, found.best)
    sizes = {"global_batch_size": run.training.global_batch_size, "micro_batch_size": run.training.micro_batch_size}
    return replace(config, parallel=run.parallel, memory=run.memory).override(sizes), found.best


def own_host_gib() -> int:
    """GiB of this node's host memory for the ranks of this run: the part that they have of the GPUs found here."""
    ranks = local_world_size_from_env()
    num_bytes = total_host_bytes() * ranks // max(ranks, torch.cuda.device_count())
    return max(1, num_bytes // (_HOST_STEP_GIB * GIB)) * _HOST_STEP_GIB


def gpu_machine() -> Hardware:
    """The known machine that has the first GPU found here.

    Raises ConfigError without a GPU, and for a GPU that no known machine has.
    """
    if not torch.cuda.is_available():
        raise ConfigError("--plan auto finds no GPU here: name the machine to plan for with --plan-hardware")
    properties = torch.cuda.get_device_properties(0)
    memory_gib = properties.total_memory / GIB
    found = machine_of_gpu(properties.name, memory_gib)
    if found is None:
        near = nearest_hardware(properties.name, memory_gib).name
        raise ConfigError(
            f"--plan auto knows no machine with the GPU found here, {properties.name} with {memory_gib:.1f} GiB: name "
            f"one that is like it with --plan-hardware ({near} is nearest in memory), or describe yours in a file, "
            "--plan-hardware FILE.toml (`memo hardware` tells how)"
        )
    return found
