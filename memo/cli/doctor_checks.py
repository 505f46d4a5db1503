"""The checks of `memo doctor`: one pure function each, from facts to a finding with its remedy."""

import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

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

State = Literal["ok", "note", "STOPS"]
"""note: a run works, but slower or with less; STOPS: it does not start, or not on the GPUs that are here."""


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
        return Finding("torch", "STOPS", "not installed", f"pip install 'torch>={needed}'")
    numbers = re.match(r"(\d+)\.(\d+)", version)
    if numbers is None or (int(numbers[1]), int(numbers[2])) < TORCH_NEEDED:
        return Finding("torch", "STOPS", f"{version}, older than {needed}", f"pip install -U 'torch>={needed}'")
    return Finding("torch", "ok", version)


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
        return Finding("CUDA", "note", found, remedy)
    if torch_cuda is None:
        found = f"{present} GPUs, but torch is built for CPUs"
        return Finding("CUDA", "STOPS", found, "install torch for CUDA: https://pytorch.org")
    if driver_cuda is not None and int(torch_cuda.split(".")[0]) > driver_cuda // 1000:
        found = f"torch is built for CUDA {torch_cuda}, and driver {driver} serves up to {driver_cuda // 1000}"
        return Finding("CUDA", "STOPS", found, "update the driver, or install torch for the older CUDA")
    if not usable:
        remedy = "look at CUDA_VISIBLE_DEVICES and at python -c 'import torch; torch.zeros(1).cuda()'"
        return Finding("CUDA", "STOPS", f"the driver sees {present} GPUs, and torch none", remedy)
    found = f"{torch_cuda}, driver {driver or 'of a version that it hides'}, {usable} of {present} GPUs"
    if usable < present:
        return Finding("CUDA", "note", found, "CUDA_VISIBLE_DEVICES hides the others")
    return Finding("CUDA", "ok", found)


def check_gpus(gpus: Sequence[Gpu], known: Collection[str]) -> Finding:
    """Old GPUs, GPUs in use, and names of which memo knows no speed.

    Args:
        known: names, as drivers report them, of the machines that `memo hardware` lists.
    """
    if not gpus:
        return Finding("GPUs", "ok", "none")
    found = ", ".join(f"{name} x {count}" for name, count in Counter(gpu.name for gpu in gpus).items())
    old = [gpu.capability for gpu in gpus if gpu.capability is not None and gpu.capability < CAPABILITY_NEEDED]
    if old:
        found += f": compute capability {'.'.join(map(str, old[0]))} has no bf16"
        return Finding("GPUs", "STOPS", found, "take GPUs from Ampere (8.0) on, or train on the CPU with --device cpu")
    busy = {index: gpu.used_bytes for index, gpu in enumerate(gpus) if gpu.used_bytes > gpu.total_bytes / 20}
    if busy:
        found += f": up to {format_bytes(max(busy.values()))} are taken on {', '.join(map(str, busy))}"
        return Finding("GPUs", "note", found, "nvidia-smi names who does")
    if any(gpu.name not in known for gpu in gpus):
        remedy = "plans need a machine: `memo hardware` has the nearest, for a file to mend"
        return Finding("GPUs", "note", f"{found}: not among the machines that plans know by name", remedy)
    return Finding("GPUs", "ok", found)


def check_compiler(compiler: str | None, cuda_headers: str | None, has_gpus: bool) -> Finding:
    """What planned memory is compiled with on first use; paths, None for what is missing."""
    without = "without it --memory-planner leaves memory to torch's allocator"
    if compiler is None:
        return Finding("compiler", "note", f"no C++ compiler; {without}", "install g++, or set CXX")
    if has_gpus and cuda_headers is None:
        remedy = "pip install nvidia-cuda-runtime nvidia-cuda-crt, or set CUDA_HOME to a toolkit"
        return Finding("compiler", "note", f"{compiler}, but no headers of CUDA; {without}", remedy)
    return Finding("compiler", "ok", compiler + (f", CUDA's headers in {cuda_headers}" if cuda_headers else ""))


def check_locked_memory(limit_bytes: int | None, host_bytes: int, has_gpus: bool) -> Finding:
    """Activations that move to host memory lie in pinned memory. `limit_bytes` is ulimit -l; None for no limit."""
    found = "no limit" if limit_bytes is None else f"at most {format_bytes(limit_bytes)} (ulimit -l)"
    if limit_bytes is None or not has_gpus or limit_bytes >= host_bytes / 2:
        return Finding("locked memory", "ok", found)
    remedy = (
        "ulimit -l unlimited before the start, memlock in /etc/security/limits.conf, docker run --ulimit memlock=-1; "
        "else CUDA may refuse to pin host memory, and InfiniBand to register it"
    )
    return Finding("locked memory", "note", found, remedy)


def check_shared_memory(size_bytes: int | None, free_bytes: int, num_gpus: int) -> Finding:
    """/dev/shm, through which NCCL talks between the GPUs of a node; None where there is none."""
    found = "none" if size_bytes is None else f"{format_bytes(free_bytes)} free of {format_bytes(size_bytes)}"
    if num_gpus < 2 or (size_bytes is not None and free_bytes >= SHM_NEEDED_BYTES):
        return Finding("/dev/shm", "ok", found)
    remedy = "docker run --shm-size=1g or --ipc=host; in Kubernetes mount an emptyDir of medium Memory there"
    state: State = "STOPS" if size_bytes is None or free_bytes < 64 * MIB * num_gpus else "note"
    return Finding("/dev/shm", state, f"{found}, for {num_gpus} GPUs", remedy)


def check_numa(nodes: Mapping[int, Collection[int]], allowed: Collection[int], gpus: Sequence[Gpu]) -> Finding:
    """Whether each GPU's rank can run near it: `nodes` has the CPUs of each NUMA node, `allowed` this process's."""
    if len(nodes) < 2 or not gpus:
        return Finding("NUMA", "ok", f"{max(1, len(nodes))} node{'s' * (len(nodes) > 1)}")
    found = f"{len(nodes)} nodes"
    near = {gpu.numa_node for gpu in gpus}
    if None in near:
        remedy = "the system hides which GPU is on which node; bind ranks with torchrun --numa-binding or numactl"
        return Finding("NUMA", "note", f"{found}, GPUs on none of them", remedy)
    far = [node for node in near if node is not None and set(allowed).isdisjoint(nodes.get(node, ()))]
    if far:
        remedy = "start without taskset, or ask the scheduler for CPUs of all sockets: copies to the other are slower"
        return Finding("NUMA", "note", f"{found}, and no CPU of node {min(far)} may be used, where GPUs are", remedy)
    return Finding("NUMA", "ok", f"{found}, each rank runs on its GPU's")


def check_cpus(allowed: int, quota: float, num_gpus: int) -> Finding:
    """CPUs of this process, and the quota of its container, infinite without one."""
    cpus = min(float(allowed), quota)
    found = f"{cpus:g}" + (f" of {allowed}, by the container's quota" if quota < allowed else "")
    if cpus < CPUS_OF_A_GPU * num_gpus:
        remedy = f"give {CPUS_OF_A_GPU * num_gpus} or more, {CPUS_OF_A_GPU} a GPU: limits.cpu, --cpus-per-task, --cpus"
        return Finding("CPUs", "note", f"{found}, for {num_gpus} GPUs", remedy)
    return Finding("CPUs", "ok", found)


def check_host_memory(free_bytes: int, total_bytes: int, gpus: Sequence[Gpu]) -> Finding:
    """Host memory of this process, control groups counted; activations of long sequences and states wait there."""
    found = f"{format_bytes(free_bytes)} free of {format_bytes(total_bytes)}"
    if free_bytes < HOST_NEEDED_BYTES * max(1, len(gpus)):
        remedy = "end other programs, or raise the limit: --mem=0 in Slurm, limits.memory of a pod, docker run --memory"
        return Finding("host memory", "STOPS", found, remedy)
    device_bytes = sum(gpu.total_bytes for gpu in gpus)
    if free_bytes < device_bytes:
        found += f", less than the GPUs' {format_bytes(device_bytes)}"
        room = "`memo plan` says what fits, --offload-nvme-path takes a disk as well"
        return Finding("host memory", "note", found, f"ask for all of the node's (--mem=0); {room}")
    return Finding("host memory", "ok", found)


def check_disk(name: str, path: str, free_bytes: int | None, problem: str = "", file_system: str = "") -> Finding:
    """Where checkpoints or records of activations would go.

    Args:
        free_bytes: None where nothing can be written; `problem` says why.
        file_system: as /proc/mounts names it, for records, which belong on a disk of this machine.
    """
    if free_bytes is None:
        return Finding(name, "STOPS", f"{path} cannot be written ({problem})", "give a directory that you may write to")
    found = f"{format_bytes(free_bytes)} free in {path}"
    if file_system in (*IN_MEMORY, *OVER_THE_NETWORK):
        why = (
            "is host memory itself" if file_system in IN_MEMORY else "is on the network, which all ranks would wait for"
        )
        return Finding(name, "note", f"{found}, which {why} ({file_system})", "name a folder on a local disk")
    if free_bytes < DISK_NOTED_BYTES:
        remedy = "a checkpoint takes 12 bytes a parameter, and a run needs room for two: free some, or save elsewhere"
        return Finding(name, "note", found, remedy)
    return Finding(name, "ok", found)


def check_environment(environment: Mapping[str, str]) -> Finding:
    """Variables that a launcher sets, left over where there is none."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    given = [name for name in names if environment.get(name)]
    missing = [name for name in names if name not in given]
    if given and missing and environment.get("WORLD_SIZE", "1") != "1":
        found = f"{', '.join(given)} are set, but {', '.join(missing)} are not"
        return Finding("launcher", "STOPS", found, f"start with torchrun, or unset {' '.join(given)}")
    return Finding("launcher", "ok", "torchrun's variables are set" if given else "none: one process, or torchrun")
