"""`memo doctor`: what this machine has for a run, what is missing, and what to do about it."""

import contextlib
import dataclasses
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
from memo.cli.doctor_checks import Finding, Gpu, State
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
    return EXIT_FAILED if any(each.state == State.STOPS for each in found) else 0


def findings(save: str, nvme_path: str | None) -> list[Finding]:
    """The findings of all checks on this machine; imports torch if it is installed."""
    torch, gpus, driver, driver_cuda = _torch(), *_gpus()
    usable = torch.cuda.device_count() if torch is not None and torch.cuda.is_available() else 0
    compiler, headers = _tools(torch)
    shm_bytes = _disk_bytes("/dev/shm")
    found = [
        checks.check_torch(None if torch is None else torch.__version__),
        checks.check_cuda(None if torch is None else torch.version.cuda, driver, driver_cuda, usable, len(gpus)),
        checks.check_gpus(gpus, {machine.driver_name for machine in HARDWARE.values()}),
        checks.check_compiler(compiler, headers, bool(gpus)),
        checks.check_locked_memory(_locked_limit(), total_host_bytes(), bool(gpus)),
        checks.check_shared_memory(*shm_bytes, len(gpus)),
        checks.check_cpus(len(allowed_cpus()), cpu_quota(), len(gpus)),
        checks.check_numa(cpus_by_node(), allowed_cpus(), gpus),
        checks.check_host_memory(available_host_bytes(), total_host_bytes(), gpus),
        checks.check_disk("disk of --save", save, *_writable_bytes(save)),
    ]
    if nvme_path is not None:
        found.append(checks.check_records(nvme_path, *_record_bytes(nvme_path), file_system(nvme_path)))
    return [*found, checks.check_environment(os.environ)]


def _text(found: Sequence[Finding]) -> str:
    rows = [(each.state.value, each.name, each.found) for each in found]
    lines = [f"memo {__version__} on {host_name()}"]
    for row, each in zip(text_table(rows, left={0, 1, 2}).splitlines(), found, strict=True):
        lines += [f"  {row}", *([f"      -> {each.remedy}"] if each.remedy else [])]
    stops = [each.name for each in found if each.state == State.STOPS]
    return "\n".join([*lines, f"a run is stopped by: {', '.join(stops)}" if stops else "nothing stops a run here"])


def _torch() -> Any:
    """The module; None where it cannot be imported."""
    try:
        import torch
    except (ImportError, OSError):  # OSError: a library that it links
        return None
    return torch


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


def _locked_limit() -> int | None:
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return None if limit == resource.RLIM_INFINITY else limit


def _disk_bytes(path: str) -> tuple[int | None, int]:
    """Size and free space of a file system."""
    try:
        usage = shutil.disk_usage(path)
    except OSError:
        return None, 0
    return usage.total, usage.free


def _writable_bytes(path: str) -> tuple[int | None, str]:
    """Free space where `path` is or would be made; None, and why, where nothing can be written."""
    folder = Path(path).absolute()
    while not folder.exists():
        folder = folder.parent
    try:
        with tempfile.TemporaryFile(dir=folder):
            return shutil.disk_usage(folder).free, ""
    except OSError as error:
        return None, error.strerror or str(error)


def _record_bytes(path: str) -> tuple[int | None, str]:
    """Free space for records of activations; None, and why, where they cannot be written."""
    from memo.executor.disk_budget import disk_free_bytes

    try:
        return disk_free_bytes(path), ""
    except DiskError as error:
        return None, str(error)


def file_system(path: str, mounts: Path = Path("/proc/mounts")) -> str:
    """The kind of the file system that holds `path`, such as ext4; empty where the system does not say.

    A line of `mounts`, which is an argument for tests, is: device, where it is mounted (\\040 for a blank), kind, ...
    """
    try:
        lines = [line.split() for line in mounts.read_text().splitlines()]
    except OSError:
        return ""
    real = os.path.realpath(path)
    found = [(words[1].replace("\\040", " "), words[2]) for words in lines if len(words) > 2]
    inside = [(folder, kind) for folder, kind in found if Path(real).is_relative_to(folder)]
    return max(inside, key=lambda each: len(each[0]), default=("", ""))[1]
