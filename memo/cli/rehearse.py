"""`memo rehearse`: steps of a run on a GPU that is not there."""

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from memo.config.flag import Flag
from memo.config.flags import parse_command
from memo.config.require import require, require_count, require_gib
from memo.emulated_gpu.build import find_torch
from memo.errors import tell
from memo.estimate.machines import named_hardware, require_full_nodes
from memo.estimate.node_share import part_of_node, share_text
from memo.rehearsal.request import RehearsalRequest, as_one_rank, checked_run, emulated_device, ranks_that_differ
from memo.rehearsal.start import start
from memo.rehearsal.text import Run, text, verdict

ABOUT = (
    "Run steps of the very run that `memo train` would start with the same flags, one of its ranks on an emulated GPU, "
    "and print what they take of device and host memory and of modelled time, and whether the run fits. Takes "
    "every flag of `memo train`. Needs a CUDA build of torch and no GPU; data need not be given, checkpoints and logs "
    "are not written. docs/rehearse.md says what it knows, and what it cannot know."
)

EXAMPLES = ("memo rehearse --gpu h100-80 --gpus 8 --model gpt-7b --seq-len 256K --tp 8",)


@dataclass(frozen=True)
class _Options:
    """Which machine, and what is told of it."""

    gpu: Annotated[str | None, Flag(aliases=("hardware",))] = None
    """Machine by name, such as a100-40 or h100-80, or a TOML file of one."""
    gpus: int | None = None
    """All GPUs of the run."""
    gpu_memory_gib: float | None = None
    """Memory of one GPU, as nvidia-smi reports it; default: the machine's."""
    host_memory_gib: float | None = None
    """Host memory that the run gets of each node; default: of the machine's the part of its GPUs."""
    rank: int | None = None
    """The rank that is rehearsed; default: one of the first pipeline stage, one of the second, and one of the last,
    because ranks of one stage are alike."""
    trace_out: str | None = None
    """File for one more step, which https://ui.perfetto.dev opens: compute, copies, messages; a file a rank."""
    json: bool = False
    """Print one JSON object instead of lines."""


def main(argv: Sequence[str]) -> None:
    """Raises MemoError for a run that cannot be; one that memory does not suffice for is an answer."""
    config, options = parse_command(argv, _Options(), prog="memo rehearse", about=ABOUT, examples=EXAMPLES)
    require(options.gpu, "--gpu is not given: name the GPU that the run will have, such as h100-80")
    require(options.gpus is not None, "--gpus is not given: say on how many GPUs the run will be, such as 8")
    assert options.gpu is not None and options.gpus is not None
    require_count("--gpus", options.gpus)
    for flag, size in (("--gpu-memory-gib", options.gpu_memory_gib), ("--host-memory-gib", options.host_memory_gib)):
        if size is not None:
            require_gib(flag, size)
    machine = named_hardware("--gpu", options.gpu, options.gpu_memory_gib)
    require_full_nodes("--gpu", options.gpus, machine)
    require(
        machine.capability,
        f"--gpu {options.gpu} is a GPU that memo only plans for: a rehearsal runs the CUDA program; use memo plan, or "
        "the nearest GPU of NVIDIA",
    )
    told = share_text(machine, options.gpus, options.host_memory_gib)
    if told:
        tell(told)
    machine = part_of_node(machine, options.gpus, options.host_memory_gib)
    machine = dataclasses.replace(machine, memory_gib=options.gpu_memory_gib or machine.memory_gib)
    run = Run(checked_run(config, options.gpus), options.gpus, machine)
    _rehearse(run, ranks_that_differ(run.config, run.gpus, options.rank), options)


def _rehearse(run: Run, ranks: Sequence[int], options: _Options) -> None:
    find_torch()
    _check_folder(options.trace_out)
    ranks_per_node = run.hardware.local_ranks(run.gpus)
    device, found = emulated_device(run.gpus, run.hardware, _full_path(options.gpu)), []
    for rank in ranks:
        tell(f"rehearsing rank {rank} of {run.gpus}, without a GPU ...")
        config = as_one_rank(run.config, run.gpus, rank, ranks_per_node)
        found.append(start(RehearsalRequest(config, run.hardware, options.trace_out), device))
    if options.json:
        print(json.dumps([dataclasses.asdict(each) | {"verdict": str(verdict(run, each))} for each in found], indent=1))
    else:
        print(text(run, found))


def _full_path(gpu: str | None) -> str:
    """The absolute path of a machine's file, which the other process reads again; the name of a machine unchanged."""
    assert gpu is not None, "main() has looked"
    return str(Path(gpu).resolve()) if gpu.endswith(".toml") else gpu


def _check_folder(trace_out: str | None) -> None:
    """Refuse a folder that does not exist now, and not after minutes of work."""
    folder = None if trace_out is None else Path(trace_out).parent
    require(
        folder is None or folder.is_dir(),
        f"--trace-out {trace_out}: {folder} is no folder: make it, or give another path",
    )
