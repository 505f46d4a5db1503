"""The device of a rank: type, name, peak FLOP/s, CPU threads and peak memory."""

import os
import platform
import resource
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from memo.config import HardwareConfig
from memo.config.derived import local_world_size_from_env
from memo.errors import ConfigError
from memo.estimate.gpu_peaks import bf16_peak_tflops
from memo.estimate.hardware import Hardware
from memo.estimate.host_cpus import allowed_cpus, cpu_quota, threads_of_a_rank
from memo.estimate.machines import nearest_hardware
from memo.profiler.layer import once_s
from memo.train.numa import bind_near
from memo.units import GIB

_TINY_FLOPS = 1e10
"""A microbatch with fewer FLOPs is computed by one CPU thread; a tiny preset on a thousand tokens has fewer."""


@dataclass(frozen=True)
class PeakFlops:
    """Peak FLOP/s of one device, and where the number comes from."""

    flops: float
    source: str

    def __str__(self) -> str:
        return f"{self.flops / 1e12:.4g} TFLOP/s ({self.source})"


def resolve_device_type(config: HardwareConfig) -> str:
    """`cuda` or `cpu`; raises ConfigError if --device is cuda and torch finds no CUDA device."""
    available = torch.cuda.is_available()
    if config.device == "cuda" and not available:
        raise ConfigError(
            f"--device cuda, but torch {torch.__version__} finds no CUDA device here: "
            "use --device cpu, or install a CUDA build of torch and a driver"
        )
    if config.device == "auto":
        return "cuda" if available else "cpu"
    return config.device


def place_on_host(config: HardwareConfig, device: torch.device, microbatch_flops: float) -> str:
    """Bind this rank's threads to its GPU's NUMA node and set their number; returns a few words about it for people.

    Call it before anything large is allocated on the host, because memory lies where it is touched first. torchrun sets
    OMP_NUM_THREADS=1 for each rank, but work on the CPU should use the rank's share of the cores. The exception is a
    microbatch so small that threads would mostly wait for each other.
    """
    local_ranks = local_world_size_from_env()
    launcher = allowed_cpus(os.getppid() if local_ranks > 1 else 0)
    where = ""
    if device.type == "cuda" and config.numa_binding == "auto":
        where = f", {bind_near(pci_address(device))}"
    is_tiny = device.type == "cpu" and microbatch_flops < _TINY_FLOPS
    share = 1 if is_tiny else threads_of_a_rank(allowed_cpus(), launcher, cpu_quota(), local_ranks)
    threads = config.num_threads or share
    torch.set_num_threads(threads)
    return f"{threads} CPU thread{'s' * (threads > 1)} a rank{where}"


def device_peak(config: HardwareConfig, device: torch.device, dtype: torch.dtype) -> PeakFlops:
    """Peak FLOP/s for MFU: from the flag, else from the table by the device's whole name, else measured.

    The source tells whether the peak was measured, because a share of a measured peak is not the MFU of publications.
    For a GPU it also names --peak-tflops.
    """
    if config.peak_tflops is not None:
        return PeakFlops(config.peak_tflops * 1e12, "--peak-tflops")
    measured = f"measured matrix product, {str(dtype).removeprefix('torch.')}"
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        tflops = bf16_peak_tflops(name)
        if tflops is not None and dtype == torch.bfloat16:
            return PeakFlops(tflops * 1e12, f"{name}, bf16 dense")
        unknown = "memo knows no peak of" if tflops is None else "memo knows the peak in bf16 alone of"
        measured += f"; {unknown} {name}: give its data sheet's with --peak-tflops"
    return PeakFlops(_measured_flops(device, dtype), measured)


def known_machine(device: torch.device) -> Hardware:
    """The known machine that is most like this one, by the name and memory of its GPU."""
    if device.type == "cpu":
        return nearest_hardware("cpu", 0)
    return nearest_hardware(torch.cuda.get_device_name(device), torch.cuda.mem_get_info(device)[1] / GIB)


def taken_beside_torch(device: torch.device) -> int:
    """Bytes of a GPU that are used outside torch's allocator: by the CUDA context, NCCL and other processes."""
    free_bytes, total_bytes = torch.cuda.mem_get_info(device)
    return int(total_bytes - free_bytes - torch.cuda.memory_reserved(device))


def pci_address(device: torch.device) -> str:
    """The PCI address of a GPU as sysfs writes it (0000:3b:00.0)."""
    gpu: Any = torch.cuda.get_device_properties(device)
    return f"{gpu.pci_domain_id:04x}:{gpu.pci_bus_id:02x}:{gpu.pci_device_id:02x}.0"


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else _cpu_name()


def _cpu_name() -> str:
    """The CPU's name that Linux reports; on other systems, or without a name, the architecture."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    models = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.processor() or platform.machine()


def _measured_flops(device: torch.device, dtype: torch.dtype) -> float:
    """The best rate of square matrix products larger than the caches, over half a second of them."""
    size = 1024 if device.type == "cpu" else 8192
    a = torch.ones(size, size, dtype=dtype, device=device)
    best_s, end = float("inf"), time.perf_counter() + 0.5
    while time.perf_counter() < end:
        best_s = min(best_s, once_s(lambda: a @ a, device))
    return 2.0 * size**3 / best_s


def peak_memory_bytes(device: torch.device) -> tuple[int, int]:
    """(device, host) peaks of this process so far, in bytes; on a CPU both are the peak of the resident set."""
    host = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device), host
    return host, host
