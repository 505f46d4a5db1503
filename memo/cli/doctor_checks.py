"""The checks of `memo doctor`: each function checks one part of this machine and returns its finding."""

import re
import resource
import shutil
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from memo.artifacts.toolchain import cuda_include, find_compiler
from memo.errors import AllocatorError, DiskError
from memo.estimate.host_cpus import allowed_cpus, cpu_quota
from memo.estimate.host_memory import available_host_bytes, total_host_bytes
from memo.units import GIB, MIB, format_bytes

TORCH_NEEDED = (2, 11)
"""The lowest version, as in pyproject.toml."""
CAPABILITY_NEEDED = 8.0
"""The lowest compute capability: attention on CUDA needs bf16, which GPUs compute from Ampere on."""
SHM_NEEDED_BYTES = GIB
"""Size of /dev/shm for the messages of several GPUs: the size that NCCL's guide gives containers (--shm-size=1g)."""
HOST_NEEDED_BYTES = 2 * GIB
"""Free host memory of a rank below which torch and CUDA's libraries may not even start."""
DISK_NOTED_BYTES = 50 * GIB
"""Free disk space for two checkpoints of a model of two billion parameters."""
NO_DISKS = ("tmpfs", "ramfs", "nfs", "nfs4", "cifs", "smb3", "lustre", "ceph", "beegfs", "gpfs", "9p", "fuse.sshfs")
"""File systems in host memory and on the network, by their names in /proc/mounts."""
CPUS_OF_A_GPU = 4
"""CPUs for each GPU. With fewer, kernel launches, data and updates of states in host memory wait for CPUs."""


@dataclass(frozen=True)
class Finding:
    name: str
    state: Literal["ok", "note", "STOPS"]
    """note: a run works, but slower or with less memory; STOPS: a run does not start on these GPUs."""
    found: str
    remedy: str = ""


@dataclass(frozen=True)
class Gpu:
    """One GPU as its driver reports it; 0: not reported."""

    name: str
    capability: float
    total_bytes: int
    used_bytes: int
    driver: str


def ask_driver() -> list[Gpu]:
    """The GPUs that NVIDIA's driver sees; none without a driver."""
    import pynvml

    def asked(name: str, *of: Any) -> Any:
        try:
            found = getattr(pynvml, name)(*of)
        except pynvml.NVMLError:  # the driver is too old for the query, or the container hides the answer
            return None
        return found.decode() if isinstance(found, bytes) else found

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return []
    driver, gpus = asked("nvmlSystemGetDriverVersion") or "unknown", []
    for handle in (asked("nvmlDeviceGetHandleByIndex", index) for index in range(asked("nvmlDeviceGetCount") or 0)):
        name, memory = asked("nvmlDeviceGetName", handle), asked("nvmlDeviceGetMemoryInfo", handle)
        major, minor = asked("nvmlDeviceGetCudaComputeCapability", handle) or (0, 0)
        total, used = (0, 0) if memory is None else (memory.total, memory.used)
        gpus.append(Gpu(name or "a GPU without a name", major + minor / 10, total, used, driver))
    return gpus


def check_torch(torch: Any) -> Finding:
    """`torch` is the module; None if it is not installed."""
    needed = ".".join(map(str, TORCH_NEEDED))
    if torch is None:
        return Finding("torch", "STOPS", "not installed", f"pip install 'torch>={needed}'")
    version = torch.__version__  # such as 2.13.0+cu130
    if tuple(map(int, re.findall(r"\d+", version)[:2])) < TORCH_NEEDED:
        return Finding("torch", "STOPS", f"{version}, older than {needed}", f"pip install -U 'torch>={needed}'")
    return Finding("torch", "ok", version)


def check_cuda(torch: Any, gpus: Sequence[Gpu]) -> Finding:
    """Check that torch works with the driver; if not, the finding quotes torch's error."""
    if not gpus:
        remedy = "runs take the CPU; on a machine with GPUs install NVIDIA's driver, and give containers --gpus all"
        return Finding("CUDA", "note", "no GPU is seen, or no NVIDIA driver", remedy)
    if torch is None:
        return Finding("CUDA", "STOPS", f"{len(gpus)} GPUs, and no torch", "install torch: https://pytorch.org")
    try:
        torch.cuda.init()
    except Exception as error:  # of several kinds
        found = f"the driver ({gpus[0].driver}) sees {len(gpus)} GPUs, and torch none: {str(error).splitlines()[0]}"
        remedy = (
            "install torch for the driver's CUDA (https://pytorch.org), update the driver; see CUDA_VISIBLE_DEVICES"
        )
        return Finding("CUDA", "STOPS", found, remedy)
    usable = torch.cuda.device_count()
    found = f"{torch.version.cuda}, driver {gpus[0].driver}, {usable} of {len(gpus)} GPUs"
    if usable < len(gpus):
        return Finding("CUDA", "note", found, "CUDA_VISIBLE_DEVICES hides the others")
    return Finding("CUDA", "ok", found)


def check_gpus(gpus: Sequence[Gpu]) -> Finding:
    """Check for GPUs that are too old, and GPUs in use."""
    found = ", ".join(f"{name} x {count}" for name, count in Counter(gpu.name for gpu in gpus).items())
    old = [gpu.capability for gpu in gpus if 0 < gpu.capability < CAPABILITY_NEEDED]
    if old:
        found += f": compute capability {old[0]} has no bf16"
        return Finding("GPUs", "STOPS", found, "take GPUs from Ampere (8.0) on, or train on the CPU with --device cpu")
    busy = {index: gpu.used_bytes for index, gpu in enumerate(gpus) if gpu.used_bytes > gpu.total_bytes / 20}
    if busy:
        found += f": up to {format_bytes(max(busy.values()))} are taken on {', '.join(map(str, busy))}"
        return Finding("GPUs", "note", found, "nvidia-smi names who does")
    return Finding("GPUs", "ok", found or "none")


def check_compiler(torch: Any, gpus: Sequence[Gpu]) -> Finding:
    """Check for the compiler and headers that build the planned allocator on first use."""
    without = "without it --memory-planner leaves memory to torch's allocator"
    try:
        found = find_compiler("memo doctor", AllocatorError)
    except AllocatorError:
        return Finding("compiler", "note", f"no C++ compiler; {without}", "install g++, or set CXX")
    try:
        folder = Path("/" if torch is None else torch.__file__).parent
        found += f", CUDA's headers in {cuda_include(folder, 'memo doctor', AllocatorError)}"
    except AllocatorError:
        if gpus:
            remedy = "pip install nvidia-cuda-runtime nvidia-cuda-crt, or set CUDA_HOME to a toolkit"
            return Finding("compiler", "note", f"{found}, but no headers of CUDA; {without}", remedy)
    return Finding("compiler", "ok", found)


def check_locked_memory(gpus: Sequence[Gpu]) -> Finding:
    """Check the limit of pinned memory (`ulimit -l`), which offloaded activations use."""
    limit_bytes, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    is_free = limit_bytes == resource.RLIM_INFINITY
    found = "no limit" if is_free else f"at most {format_bytes(limit_bytes)} (ulimit -l)"
    if is_free or not gpus or limit_bytes >= total_host_bytes() / 2:
        return Finding("locked memory", "ok", found)
    remedy = (
        "ulimit -l unlimited before the start, memlock in /etc/security/limits.conf, docker run --ulimit memlock=-1; "
        "else CUDA may refuse to pin host memory, and InfiniBand to register it"
    )
    return Finding("locked memory", "note", found, remedy)


def check_shared_memory(gpus: Sequence[Gpu]) -> Finding:
    """Check /dev/shm, which NCCL uses between the GPUs of a node."""
    try:
        usage = shutil.disk_usage("/dev/shm")
        free_bytes, found = usage.free, f"{format_bytes(usage.free)} free of {format_bytes(usage.total)}"
    except OSError:
        free_bytes, found = 0, "none"
    if len(gpus) < 2 or free_bytes >= SHM_NEEDED_BYTES:
        return Finding("/dev/shm", "ok", found)
    remedy = "docker run --shm-size=1g or --ipc=host; in Kubernetes mount an emptyDir of medium Memory there"
    stops = free_bytes < 64 * MIB * len(gpus)
    return Finding("/dev/shm", "STOPS" if stops else "note", f"{found}, for {len(gpus)} GPUs", remedy)


def check_cpus(gpus: Sequence[Gpu]) -> Finding:
    """Check the CPUs of this process and the quota of its container."""
    allowed, quota, needed = len(allowed_cpus()), cpu_quota(), CPUS_OF_A_GPU * len(gpus)
    found = f"{min(allowed, quota):g}" + (f" of {allowed}, by the container's quota" if quota < allowed else "")
    if min(allowed, quota) < needed:
        remedy = f"give {needed} or more, {CPUS_OF_A_GPU} a GPU: limits.cpu, --cpus-per-task, --cpus"
        return Finding("CPUs", "note", f"{found}, for {len(gpus)} GPUs", remedy)
    return Finding("CPUs", "ok", found)


def check_host_memory(gpus: Sequence[Gpu]) -> Finding:
    """Check the host memory of this process within its control groups, for offloaded activations and states."""
    free_bytes, device_bytes = available_host_bytes(), sum(gpu.total_bytes for gpu in gpus)
    found = f"{format_bytes(free_bytes)} free of {format_bytes(total_host_bytes())}"
    if free_bytes < HOST_NEEDED_BYTES * max(1, len(gpus)):
        remedy = "end other programs, or raise the limit: --mem=0 in Slurm, limits.memory of a pod, docker run --memory"
        return Finding("host memory", "STOPS", found, remedy)
    if free_bytes < device_bytes:
        room = "`memo plan` says what fits, --offload-nvme-path takes a disk as well"
        found += f", less than the GPUs' {format_bytes(device_bytes)}"
        return Finding("host memory", "note", found, f"ask for all of the node's (--mem=0); {room}")
    return Finding("host memory", "ok", found)


def check_disk(path: str) -> Finding:
    """Check the disk for checkpoints; `path` exists or would be made."""
    folder, name = Path(path).absolute(), "disk of --save"
    while not folder.exists():
        folder = folder.parent
    try:
        with tempfile.TemporaryFile(dir=folder):
            free_bytes = shutil.disk_usage(folder).free
    except OSError as error:
        return _unwritable(name, path, error.strerror)
    found = f"{format_bytes(free_bytes)} free in {path}"
    if free_bytes < DISK_NOTED_BYTES:
        remedy = "a checkpoint takes 12 bytes a parameter, and a run needs room for two: free some, or save elsewhere"
        return Finding(name, "note", found, remedy)
    return Finding(name, "ok", found)


def check_disk_of_records(path: str) -> Finding:
    """Check the disk for records of activations, which should be local, so that it is fast."""
    import psutil

    from memo.executor.disk_budget import disk_free_bytes  # imported here, because it imports torch

    name = "disk of records"
    try:
        found = f"{format_bytes(disk_free_bytes(path))} free in {path}"
    except DiskError as error:
        return _unwritable(name, path, error)
    mounts = [each for each in psutil.disk_partitions(all=True) if Path(path).resolve().is_relative_to(each.mountpoint)]
    kind = max(mounts, key=lambda each: len(each.mountpoint)).fstype if mounts else ""
    if kind in NO_DISKS:
        remedy = "name a folder on a local disk"
        return Finding(name, "note", f"{found}, which is in host memory or on the network ({kind})", remedy)
    return Finding(name, "ok", found)


def _unwritable(name: str, path: str, problem: object) -> Finding:
    return Finding(name, "STOPS", f"{path} cannot be written ({problem})", "give a directory that you may write to")
