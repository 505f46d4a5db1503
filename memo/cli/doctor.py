"""`memo doctor`: what this machine has for a run, what is missing, and what to do about it."""

import contextlib
import dataclasses
import importlib
import json
import os
import resource
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from memo import __version__
from memo.artifacts.toolchain import cuda_include, find_compiler
from memo.cli import doctor_checks as checks
from memo.cli.doctor_checks import Finding, Gpu
from memo.cli.doctor_ranks import from_slurm, with_ranks
from memo.config.command_line import parse_options
from memo.config.derived import world_size_from_env
from memo.config.require import require
from memo.errors import EXIT_FAILED, AllocatorError, DiskError, host_name
from memo.estimate.hardware_files import HARDWARE
from memo.estimate.host_cpus import allowed_cpus, cpu_quota
from memo.estimate.host_memory import available_host_bytes, total_host_bytes
from memo.text_table import text_table
from memo.train.numa import cpus_by_node, numa_node

ABOUT = (
    "Look at this machine as a run would find it: torch, CUDA and drivers, compilers, limits, memory, NUMA nodes, "
    "disks. Under srun or torchrun also at the others: which nodes are missing, what is wrong on each, and how fast "
    "they reduce together. Says for each what to do where something is missing. Exit status: 0 if a run can start, 3 "
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
    """Directory where checkpoints would go."""
    offload_nvme_path: str | None = None
    """Directory on a local disk, for records of activations that host memory does not hold."""
    wait_s: float = 60.0
    """Under srun or torchrun: seconds for which ranks wait for each other, before one counts as missing."""
    json: bool = False
    """Print a JSON list of the findings."""


def main(argv: Sequence[str]) -> int:
    """Exit status."""
    options = parse_options(_Options, argv, prog="memo doctor", about=ABOUT, examples=EXAMPLES)
    require(0 < options.wait_s <= 3600, f"--wait-s is {options.wait_s:g}: give seconds above 0, up to 3600, such as 60")
    found: list[Finding] | None = findings(options.save, options.offload_nvme_path)
    os.environ.update(from_slurm(os.environ))
    if found is not None and world_size_from_env() > 1:
        found = with_ranks(found, options.wait_s)
    if found is None:  # the first rank tells
        return 0
    print(json.dumps([dataclasses.asdict(each) for each in found], indent=1) if options.json else _text(found))
    return EXIT_FAILED if any(each.state == "STOPS" for each in found) else 0


def findings(save: str, nvme_path: str | None) -> list[Finding]:
    """The findings of all checks on this machine; imports torch if it is installed."""
    torch: Any = None
    with contextlib.suppress(ImportError, OSError):  # OSError: a library that it links
        torch = importlib.import_module("torch")
    gpus, driver, driver_cuda = _gpus()
    version, torch_cuda = (None, None) if torch is None else (torch.__version__, torch.version.cuda)
    usable = torch.cuda.device_count() if torch is not None and torch.cuda.is_available() else 0
    limit_bytes, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    locked_bytes = None if limit_bytes == resource.RLIM_INFINITY else limit_bytes
    host_bytes = total_host_bytes()
    found = [
        checks.check_torch(version),
        checks.check_cuda(torch_cuda, driver, driver_cuda, usable, len(gpus)),
        checks.check_gpus(gpus, {machine.driver_name for machine in HARDWARE.values()}),
        checks.check_compiler(*_tools(torch), bool(gpus)),
        checks.check_locked_memory(locked_bytes, host_bytes, bool(gpus)),
        checks.check_shared_memory(*_shared_bytes(), len(gpus)),
        checks.check_cpus(len(allowed_cpus()), cpu_quota(), len(gpus)),
        checks.check_numa(cpus_by_node(), allowed_cpus(), gpus),
        checks.check_host_memory(available_host_bytes(), host_bytes, gpus),
        checks.check_disk("disk of --save", save, *_free_bytes(save, _free_for_checkpoints)),
    ]
    if nvme_path is not None:
        from memo.executor.disk_budget import disk_free_bytes  # here, because it imports torch

        free = _free_bytes(nvme_path, disk_free_bytes)
        found.append(checks.check_disk("disk of records", nvme_path, *free, file_system(nvme_path)))
    return [*found, checks.check_environment(os.environ)]


def _text(found: Sequence[Finding]) -> str:
    rows = [(each.state, each.name, each.found) for each in found]
    lines = [f"memo {__version__} on {host_name()}"]
    for row, each in zip(text_table(rows, left={0, 1, 2}).splitlines(), found, strict=True):
        lines += [f"  {row}", *([f"      -> {each.remedy}"] if each.remedy else [])]
    stops = [each.name for each in found if each.state == "STOPS"]
    return "\n".join([*lines, f"a run is stopped by: {', '.join(stops)}" if stops else "nothing stops a run here"])


def _gpus() -> tuple[list[Gpu], str | None, int | None]:
    """What the driver sees, its version, and the newest CUDA that it serves; nothing without a driver."""
    import pynvml

    def asked(name: str, *of: Any) -> Any:
        try:
            found = getattr(pynvml, name)(*of)
        except pynvml.NVMLError:  # a driver that is older than the question, or a container that hides the answer
            return None
        return found.decode() if isinstance(found, bytes) else found

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return [], None, None
    handles = [asked("nvmlDeviceGetHandleByIndex", index) for index in range(asked("nvmlDeviceGetCount") or 0)]
    gpus = [_gpu(asked, handle) for handle in handles if handle is not None]
    return gpus, asked("nvmlSystemGetDriverVersion"), asked("nvmlSystemGetCudaDriverVersion")


def _gpu(asked: Callable[..., Any], handle: Any) -> Gpu:
    memory, pci = asked("nvmlDeviceGetMemoryInfo", handle), asked("nvmlDeviceGetPciInfo", handle)
    capability = asked("nvmlDeviceGetCudaComputeCapability", handle)
    return Gpu(
        asked("nvmlDeviceGetName", handle) or "a GPU without a name",
        None if capability is None else (capability[0], capability[1]),
        0 if memory is None else memory.total,
        0 if memory is None else memory.used,
        None if pci is None else numa_node(f"{pci.domain:04x}:{pci.bus:02x}:{pci.device:02x}.0"),
    )


def _tools(torch: Any) -> tuple[str | None, str | None]:
    """The compiler, and the folder of CUDA's headers."""
    compiler = headers = None
    folder = Path("/") if torch is None else Path(torch.__file__).parent
    with contextlib.suppress(AllocatorError):
        compiler = find_compiler("memo doctor", AllocatorError)
    with contextlib.suppress(AllocatorError):
        headers = str(cuda_include(folder, "memo doctor", AllocatorError))
    return compiler, headers


def _shared_bytes() -> tuple[int | None, int]:
    """Size and free space of /dev/shm."""
    with contextlib.suppress(OSError):
        usage = shutil.disk_usage("/dev/shm")
        return usage.total, usage.free
    return None, 0


def _free_bytes(path: str, measure: Callable[[str], int]) -> tuple[int | None, str]:
    """Free space by `measure`; None, and why, where it finds that nothing can be written."""
    try:
        return measure(path), ""
    except OSError as error:
        return None, error.strerror or str(error)
    except DiskError as error:
        return None, str(error)


def _free_for_checkpoints(path: str) -> int:
    """Where `path` is or would be made."""
    folder = Path(path).absolute()
    while not folder.exists():
        folder = folder.parent
    with tempfile.TemporaryFile(dir=folder):
        return shutil.disk_usage(folder).free


def file_system(path: str) -> str:
    """The kind of the file system that holds `path`, such as ext4; empty where the system does not say."""
    import psutil

    real = Path(path).resolve()
    mounts = [each for each in psutil.disk_partitions(all=True) if real.is_relative_to(each.mountpoint)]
    return max(mounts, key=lambda each: len(each.mountpoint)).fstype if mounts else ""
