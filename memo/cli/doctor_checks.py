"""What `memo doctor` asks of a machine: one pure function a check, from facts to a finding with its remedy."""

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from memo.units import GIB, MIB, format_bytes

TORCH_NEEDED = (2, 11)
"""As pyproject.toml asks for."""
CAPABILITY_NEEDED = (8, 0)
"""Compute capability from which a GPU can run: attention on CUDA takes bf16, which GPUs compute from Ampere on."""
SHM_NEEDED_BYTES = GIB
"""Size of /dev/shm where several GPUs talk through it: what NCCL's guide gives containers (--shm-size=1g)."""
HOST_NEEDED_BYTES = 2 * GIB
"""Free host memory of a rank below which torch and CUDA's libraries alone may not start."""
DISK_NOTED_BYTES = 50 * GIB
"""Free disk space below which two checkpoints of a model of two billion parameters do not fit."""
IN_MEMORY = ("tmpfs", "ramfs", "devtmpfs")
OVER_THE_NETWORK = ("nfs", "nfs4", "cifs", "smb3", "lustre", "ceph", "beegfs", "gpfs", "9p", "fuse.sshfs", "fuse.s3fs")
"""File systems by their names in /proc/mounts."""
CPUS_OF_A_GPU = 4
"""CPUs for each GPU below which launching kernels, reading data and updating states in host memory wait for them."""


class State(StrEnum):
    OK = "ok"
    NOTE = "note"
    """Runs, but slower or with less."""
    STOPS = "STOPS"
    """A run does not start, or not on the GPUs that are here."""


@dataclass(frozen=True)
class Finding:
    """What one check found.

    Attributes:
        remedy: what to do; empty where all is well.
    """

    name: str
    state: State
    found: str
    remedy: str = ""


@dataclass(frozen=True)
class Gpu:
    """One GPU, as its driver reports it; None and 0 stand for what it does not tell."""

    name: str
    capability: tuple[int, int] | None
    total_bytes: int
    used_bytes: int
    numa_node: int | None = None


def check_torch(version: str | None) -> Finding:
    """`version` as torch states it, such as 2.13.0+cu130; None without torch."""
    needed = ".".join(map(str, TORCH_NEEDED))
    if version is None:
        return Finding("torch", State.STOPS, "not installed", f"pip install 'torch>={needed}'")
    numbers = re.match(r"(\d+)\.(\d+)", version)
    if numbers is None or (int(numbers[1]), int(numbers[2])) < TORCH_NEEDED:
        return Finding("torch", State.STOPS, f"{version}, older than {needed}", f"pip install -U 'torch>={needed}'")
    return Finding("torch", State.OK, version)


def check_cuda(
    torch_cuda: str | None, driver: str | None, driver_cuda: int | None, usable: int, present: int
) -> Finding:
    """Whether torch and the driver meet.

    Args:
        torch_cuda: the version of CUDA that torch was built for, such as 13.0; None for a build for CPUs.
        driver: its version; None without one.
        driver_cuda: the newest CUDA that it serves, as NVML writes it, such as 13000.
        usable, present: GPUs that torch sees, and that the driver sees.
    """
    if not present:
        found = "no GPU is seen" + (f", with driver {driver}" if driver else ", and no NVIDIA driver")
        remedy = "runs take the CPU; on a machine with GPUs install NVIDIA's driver, and give containers --gpus all"
        return Finding("CUDA", State.NOTE, found, remedy)
    if torch_cuda is None:
        found, remedy = f"{present} GPUs, but torch is built for CPUs", "install torch for CUDA: https://pytorch.org"
        return Finding("CUDA", State.STOPS, found, remedy)
    if driver_cuda is not None and int(torch_cuda.split(".")[0]) > driver_cuda // 1000:
        found = f"torch is built for CUDA {torch_cuda}, and driver {driver} serves up to {driver_cuda // 1000}"
        return Finding("CUDA", State.STOPS, found, "update the driver, or install torch for the older CUDA")
    if not usable:
        found = f"the driver sees {present} GPUs, and torch none"
        return Finding(
            "CUDA",
            State.STOPS,
            found,
            "look at CUDA_VISIBLE_DEVICES and at python -c 'import torch; torch.zeros(1).cuda()'",
        )
    state, remedy = (State.OK, "") if usable == present else (State.NOTE, "CUDA_VISIBLE_DEVICES hides the others")
    return Finding(
        "CUDA",
        state,
        f"{torch_cuda}, driver {driver or 'of a version that it hides'}, {usable} of {present} GPUs",
        remedy,
    )


def check_gpus(gpus: Sequence[Gpu], known: Collection[str]) -> Finding:
    """Old GPUs, GPUs in use, and names of which memo knows no speed.

    Args:
        known: names, as drivers report them, of the machines that `memo hardware` lists.
    """
    if not gpus:
        return Finding("GPUs", State.OK, "none")
    found = ", ".join(f"{name} x {count}" for name, count in _counted([gpu.name for gpu in gpus]))
    old = next(
        (each for each in (gpu.capability for gpu in gpus) if each is not None and each < CAPABILITY_NEEDED), None
    )
    if old is not None:
        capability = ".".join(map(str, old))
        remedy = "take GPUs from Ampere (8.0) on, or train on the CPU with --device cpu"
        return Finding("GPUs", State.STOPS, f"{found}: compute capability {capability} has no bf16", remedy)
    busy = [index for index, gpu in enumerate(gpus) if gpu.used_bytes > gpu.total_bytes / 20]
    if busy:
        taken = format_bytes(max(gpus[index].used_bytes for index in busy))
        where = ", ".join(map(str, busy))
        return Finding("GPUs", State.NOTE, f"{found}: up to {taken} are taken on {where}", "nvidia-smi names who does")
    unknown = next((gpu.name for gpu in gpus if gpu.name not in known), None)
    if unknown is not None:
        remedy = "plans need a machine: `memo hardware` has the nearest, for a file to mend"
        return Finding("GPUs", State.NOTE, f"{found}: not among the machines that plans know by name", remedy)
    return Finding("GPUs", State.OK, found)


def check_compiler(compiler: str | None, cuda_headers: str | None, has_gpus: bool) -> Finding:
    """What planned memory is compiled with on first use; paths, None for what is missing."""
    without = "without it --memory-planner leaves memory to torch's allocator"
    if compiler is None:
        return Finding("compiler", State.NOTE, f"no C++ compiler; {without}", "install g++, or set CXX")
    if has_gpus and cuda_headers is None:
        remedy = "pip install nvidia-cuda-runtime nvidia-cuda-crt, or set CUDA_HOME to a toolkit"
        return Finding("compiler", State.NOTE, f"{compiler}, but no headers of CUDA; {without}", remedy)
    return Finding("compiler", State.OK, compiler + (f", CUDA's headers in {cuda_headers}" if cuda_headers else ""))


def check_locked_memory(limit_bytes: int | None, host_bytes: int, has_gpus: bool) -> Finding:
    """Activations that move to host memory lie in pinned memory. `limit_bytes` is ulimit -l; None for no limit."""
    found = "no limit" if limit_bytes is None else f"at most {format_bytes(limit_bytes)} (ulimit -l)"
    if limit_bytes is None or not has_gpus or limit_bytes >= host_bytes / 2:
        return Finding("locked memory", State.OK, found)
    remedy = (
        "ulimit -l unlimited before the start, memlock in /etc/security/limits.conf, docker run --ulimit memlock=-1; "
        "else CUDA may refuse to pin host memory, and InfiniBand to register it"
    )
    return Finding("locked memory", State.NOTE, found, remedy)


def check_shared_memory(size_bytes: int | None, free_bytes: int, num_gpus: int) -> Finding:
    """/dev/shm, through which NCCL talks between the GPUs of a node; None where there is none."""
    found = "none" if size_bytes is None else f"{format_bytes(free_bytes)} free of {format_bytes(size_bytes)}"
    if num_gpus < 2 or (size_bytes is not None and free_bytes >= SHM_NEEDED_BYTES):
        return Finding("/dev/shm", State.OK, found)
    remedy = "docker run --shm-size=1g or --ipc=host; in Kubernetes mount an emptyDir of medium Memory there"
    state = State.NOTE if size_bytes is not None and free_bytes >= 64 * MIB * num_gpus else State.STOPS
    return Finding("/dev/shm", state, f"{found}, for {num_gpus} GPUs", remedy)


def check_numa(nodes: Mapping[int, Collection[int]], allowed: Collection[int], gpus: Sequence[Gpu]) -> Finding:
    """Whether each GPU's rank can run near it: `nodes` has the CPUs of each NUMA node, `allowed` this process's."""
    if len(nodes) < 2 or not gpus:
        return Finding("NUMA", State.OK, f"{max(1, len(nodes))} node{'s' * (len(nodes) > 1)}")
    found = f"{len(nodes)} nodes"
    if any(gpu.numa_node is None for gpu in gpus):
        remedy = "the system hides which GPU is on which node; bind ranks with torchrun --numa-binding or numactl"
        return Finding("NUMA", State.NOTE, f"{found}, GPUs on none of them", remedy)
    far = [gpu.numa_node for gpu in gpus if not set(nodes.get(gpu.numa_node or 0, ())) & set(allowed)]
    if far:
        remedy = "start without taskset, or ask the scheduler for CPUs of all sockets: copies to the other are slower"
        return Finding("NUMA", State.NOTE, f"{found}, and no CPU of node {far[0]} may be used, where GPUs are", remedy)
    return Finding("NUMA", State.OK, f"{found}, each rank runs on its GPU's")


def check_cpus(allowed: int, quota: float, num_gpus: int) -> Finding:
    """CPUs of this process, and the quota of its container, infinite without one."""
    cpus = min(float(allowed), quota)
    found = f"{cpus:g}" + (f" of {allowed}, by the container's quota" if quota < allowed else "")
    if num_gpus and cpus < CPUS_OF_A_GPU * num_gpus:
        remedy = f"give {CPUS_OF_A_GPU * num_gpus} or more, {CPUS_OF_A_GPU} a GPU: limits.cpu, --cpus-per-task, --cpus"
        return Finding("CPUs", State.NOTE, f"{found}, for {num_gpus} GPUs", remedy)
    return Finding("CPUs", State.OK, found)


def check_host_memory(free_bytes: int, total_bytes: int, gpus: Sequence[Gpu]) -> Finding:
    """Host memory of this process, control groups counted; activations of long sequences and states wait there."""
    found = f"{format_bytes(free_bytes)} free of {format_bytes(total_bytes)}"
    if free_bytes < HOST_NEEDED_BYTES * max(1, len(gpus)):
        remedy = "end other programs, or raise the limit: --mem=0 in Slurm, limits.memory of a pod, docker run --memory"
        return Finding("host memory", State.STOPS, found, remedy)
    device_bytes = sum(gpu.total_bytes for gpu in gpus)
    if free_bytes < device_bytes:
        remedy = (
            "ask for all of the node's (--mem=0); `memo plan` says what fits, --offload-nvme-path takes a disk as well"
        )
        return Finding("host memory", State.NOTE, f"{found}, less than the GPUs' {format_bytes(device_bytes)}", remedy)
    return Finding("host memory", State.OK, found)


def check_disk(name: str, path: str, free_bytes: int | None, problem: str = "") -> Finding:
    """Where checkpoints or records of activations would go. `free_bytes` is None where nothing can be written."""
    if free_bytes is None:
        return Finding(
            name, State.STOPS, f"{path} cannot be written ({problem})", "give a directory that you may write to"
        )
    found = f"{format_bytes(free_bytes)} free in {path}"
    if free_bytes < DISK_NOTED_BYTES:
        remedy = "a checkpoint takes 12 bytes a parameter, and a run needs room for two: free some, or save elsewhere"
        return Finding(name, State.NOTE, found, remedy)
    return Finding(name, State.OK, found)


def check_records(path: str, free_bytes: int | None, problem: str, file_system: str) -> Finding:
    """Where records of activations would go: a disk of this machine. `file_system` is as /proc/mounts names it."""
    found = check_disk("disk of records", path, free_bytes, problem)
    if found.state == State.STOPS or file_system not in (*IN_MEMORY, *OVER_THE_NETWORK):
        return found
    why = "is host memory itself" if file_system in IN_MEMORY else "is on the network, which all ranks would wait for"
    return Finding(
        found.name, State.NOTE, f"{found.found}, which {why} ({file_system})", "name a folder on a local disk"
    )


def check_environment(environment: Mapping[str, str]) -> Finding:
    """Variables that a launcher sets, left over where there is none."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    given = [name for name in names if environment.get(name)]
    if given and len(given) < len(names) and environment.get("WORLD_SIZE", "1") != "1":
        missing = ", ".join(name for name in names if name not in given)
        found = f"{', '.join(given)} are set, but {missing} are not"
        return Finding("launcher", State.STOPS, found, f"start with torchrun, or unset {' '.join(given)}")
    return Finding("launcher", State.OK, "torchrun's variables are set" if given else "none: one process, or torchrun")


def _counted(names: Sequence[str]) -> list[tuple[str, int]]:
    return [(name, names.count(name)) for name in dict.fromkeys(names)]
