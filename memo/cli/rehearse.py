"""`memo rehearse`: runs steps of a run on an emulated GPU."""

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from memo.config.flag import Flag, PositiveInt, SizeGib
from memo.config.flags import parse_command
from memo.config.require import require
from memo.emulated_gpu.build import find_torch
from memo.errors import ConfigError, tell
from memo.estimate.hardware import Hardware
from memo.estimate.machines import named_hardware, require_full_nodes
from memo.estimate.node_share import part_of_node, share_text
from memo.rehearsal.request import RehearsalRequest, as_one_rank, checked_run, emulated_device, ranks_that_differ
from memo.rehearsal.start import start
from memo.rehearsal.text import Run, text, verdict
from memo.spec.foreseen_kernels import foreseen_kernels

ABOUT = (
    "Run steps of one rank of the run that `memo train` would start with the same flags, on an emulated GPU, "
    "and print their device memory, host memory and modelled time, and whether the run fits. Takes "
    "every flag of `memo train`. Needs a CUDA build of torch and no GPU; data need not be given, checkpoints and logs "
    "are not written. docs/rehearse.md tells the limits of a rehearsal."
)

EXAMPLES = ("memo rehearse --gpu h100-80 --gpus 8 --model gpt-7b --seq-len 256K --tp 8",)


@dataclass(frozen=True)
class _Options:
    gpu: Annotated[str | None, Flag(aliases=("hardware",))] = None
    """Machine by name, such as a100-40 or h100-80, or a TOML file of one."""
    gpus: PositiveInt | None = None
    """All GPUs of the run."""
    gpu_memory_gib: SizeGib | None = None
    """Memory of one GPU, as nvidia-smi reports it; default: the machine's."""
    host_memory_gib: SizeGib | None = None
    """Host memory of each node that the run gets; default: the share of its GPUs in the machine's."""
    rank: int | None = None
    """The rank to rehearse; default: of the first, second and last pipeline stage the rank that needs most memory."""
    trace_out: str | None = None
    """File for the trace of one more step (compute, copies, messages), which https://ui.perfetto.dev opens; one file
    for each rank."""
    json: bool = False
    """Print JSON instead of text."""


def main(argv: Sequence[str]) -> None:
    """Raises MemoError for a run that cannot start; a run that exceeds memory is an answer, not an error."""
    config, options = parse_command(argv, _Options(), prog="memo rehearse", about=ABOUT, examples=EXAMPLES)
    if not options.gpu:
        raise ConfigError("--gpu is not given: name the GPU that the run will have, such as h100-80")
    if options.gpus is None:
        raise ConfigError("--gpus is not given: say on how many GPUs the run will be, such as 8")
    machine = _machine(options.gpu, options.gpus, options)
    run = Run(checked_run(config, options.gpus), options.gpus, machine)
    ranks, ranks_per_node = ranks_that_differ(run.config, run.gpus, options.rank), run.hardware.local_ranks(run.gpus)
    find_torch()
    folder = Path(options.trace_out or "").parent
    require(
        folder.is_dir(),  # refused now rather than after minutes of work
        f"--trace-out {options.trace_out}: {folder} is no folder: make it, or give another path",
    )
    # The other process reads the file of a machine again.
    gpu = str(Path(options.gpu).resolve()) if options.gpu.endswith(".toml") else options.gpu
    device, found = emulated_device(run.gpus, run.hardware, gpu), []
    for rank in ranks:
        tell(f"rehearsing rank {rank} of {run.gpus}, without a GPU ...")
        one = as_one_rank(run.config, run.gpus, rank, ranks_per_node)
        found.append(start(RehearsalRequest(one, run.hardware, options.trace_out), device))
    if options.json:
        kernels = foreseen_kernels(run.config.model, run.config.hardware)
        objects = []
        for each in found:
            own = {"foreseen": each.foreseen._asdict(), "verdict": str(verdict(run, each))}
            objects.append(dataclasses.asdict(each) | own | {"foreseen_kernels": kernels})
        print(json.dumps(objects, indent=1))
    else:
        print(text(run, found))


def _machine(gpu: str, gpus: int, options: _Options) -> Hardware:
    """The part of the machine that the run gets."""
    machine = named_hardware("--gpu", gpu, options.gpu_memory_gib)
    require_full_nodes("--gpu", gpus, machine)
    require(
        machine.capability,
        f"--gpu {gpu} is a GPU that memo only plans for: a rehearsal runs the CUDA program; use memo plan, or "
        "the nearest GPU of NVIDIA",
    )
    told = share_text(machine, gpus, options.host_memory_gib)
    if told:
        tell(told)
    machine = part_of_node(machine, gpus, options.host_memory_gib)
    return dataclasses.replace(machine, memory_gib=options.gpu_memory_gib or machine.memory_gib)
