"""`memo doctor`: checks what this machine has for a run, what is missing, and what to do about it."""

import contextlib
import dataclasses
import importlib
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from memo import __version__
from memo.artifacts.fields import in_range
from memo.cli import doctor_checks as checks
from memo.cli.doctor_checks import Finding
from memo.cli.doctor_ranks import from_slurm, with_ranks
from memo.config.command_line import parse_options
from memo.config.derived import world_size_from_env
from memo.errors import EXIT_FAILED, host_name
from memo.text_table import text_table

ABOUT = (
    "Check this machine as a run would find it: torch, CUDA and drivers, compilers, limits, memory, disks. "
    "Under srun or torchrun also check all other nodes: which are missing, what is wrong on each, and how fast "
    "they all-reduce together. Each finding comes with a remedy. Exit status: 0 if a run can start, 3 "
    "if something stops it."
)
EXAMPLES = (
    "memo doctor",
    "memo doctor --save /data/runs --offload-nvme-path /nvme",
    "torchrun --nproc-per-node 8 -m memo doctor",
    "srun --ntasks-per-node=8 memo doctor --save /data/runs",
)


@dataclass(frozen=True, kw_only=True)
class _Options:
    save: str = "."
    """Directory for checkpoints."""
    offload_nvme_path: str | None = None
    """Directory on a local disk, for records of activations that do not fit into host memory."""
    wait_s: Annotated[float, in_range(1, 3600)] = 60.0
    """Under srun or torchrun: seconds that ranks wait for each other before a rank counts as missing."""
    json: bool = False
    """Print a JSON list of the findings."""


def main(argv: Sequence[str]) -> int:
    """Run all checks and print them; returns the exit status."""
    options = parse_options(_Options, argv, prog="memo doctor", about=ABOUT, examples=EXAMPLES)
    found: list[Finding] | None = findings(options.save, options.offload_nvme_path)
    os.environ.update(from_slurm(os.environ))
    if found is not None and world_size_from_env() > 1:
        found = with_ranks(found, options.wait_s)
    if found is None:  # rank 0 prints
        return 0
    print(json.dumps([dataclasses.asdict(each) for each in found], indent=1) if options.json else _text(found))
    return EXIT_FAILED if any(each.state == "STOPS" for each in found) else 0


def findings(save: str, nvme_path: str | None) -> list[Finding]:
    """The findings of all checks on this machine; imports torch if it is installed."""
    torch: Any = None
    with contextlib.suppress(ImportError, OSError):  # OSError: a missing library that torch links
        torch = importlib.import_module("torch")
    gpus = checks.ask_driver()
    of_gpus = (checks.check_locked_memory, checks.check_shared_memory, checks.check_cpus, checks.check_host_memory)
    return [
        checks.check_torch(torch),
        checks.check_cuda(torch, gpus),
        checks.check_gpus(gpus),
        checks.check_compiler(torch, gpus),
        *(check(gpus) for check in of_gpus),
        checks.check_disk(save),
        *([] if nvme_path is None else [checks.check_disk_of_records(nvme_path)]),
    ]


def _text(found: Sequence[Finding]) -> str:
    rows = [(each.state, each.name, each.found) for each in found]
    lines = [f"memo {__version__} on {host_name()}"]
    for row, each in zip(text_table(rows, left={0, 1, 2}).splitlines(), found, strict=True):
        lines += [f"  {row}", *([f"      -> {each.remedy}"] if each.remedy else [])]
    stops = [each.name for each in found if each.state == "STOPS"]
    return "\n".join([*lines, f"a run is stopped by: {', '.join(stops)}" if stops else "nothing stops a run here"])
