"""The device of a rank: which one, how fast at best, and how much memory it used."""

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
from memo.estimate.host_cpus import allowed_cpus, cpu_quota, threads_of_a_rank
from memo.train.numa import bind_near


@dataclass(frozen=True)
class Peak:
    """Peak of one device and where the number comes from."""

    flops: float
    source: str

    def __str__(self) -> str:
        return f"{self.flops / 1e12:.4g} TFLOP/s ({self.source})"


def resolve_device_type(config: HardwareConfig) -> str:
    """`cuda` or `cpu`; raises ConfigError when CUDA is asked for and absent."""
    available = torch.cuda.is_available()
    if config.device == "cuda" and not available:
        raise ConfigError(
            f"--device cuda, but torch {torch.__version__} finds no CUDA device here: "
            "use --device cpu, or install a CUDA build of torch and a driver"
        )
    if config.device == "auto":
        return "cuda" if available else "cpu"
    return config.device


def place_on_host(config: HardwareConfig, device: torch.device) -> str:
    """Put this rank's threads near its GPU and settle how many they are; returns what was done, in a few words.

    Before anything large is allocated on the host: memory lies where it is touched first. torchrun sets
    OMP_NUM_THREADS=1 for each rank, but CPU-side work wants the rank's share of the cores.
    """
    local_ranks = local_world_size_from_env()
    launcher = allowed_cpus(os.getppid() if local_ranks > 1 else 0)
    where = ""
    if device.type == "cuda" and config.numa_binding == "auto":
        where = f", {bind_near(pci_address(device)).reason}"
    threads = config.num_threads or threads_of_a_rank(allowed_cpus(), launcher, cpu_quota(), local_ranks)
    torch.set_num_threads(threads)
    return f"{threads} CPU thread{'s' * (threads > 1)} a rank{where}"


def device_peak(config: HardwareConfig, device: torch.device, dtype: torch.dtype) -> Peak:
    """Peak FLOP/s for MFU: the flag, else the table by the device's whole name, else a measured matrix product.

    What is measured says so, and of a GPU also what helps: a share of it is no MFU that others would report.
    """
    if config.peak_tflops is not None:
        return Peak(config.peak_tflops * 1e12, "--peak-tflops")
    measured = f"measured matrix product, {str(dtype).removeprefix('torch.')}"
    if device.type == "cuda":
        name = gpu_name(device)
        tflops = bf16_peak_tflops(name)
        if tflops is not None and dtype == torch.bfloat16:
            return Peak(tflops * 1e12, f"{name}, bf16 dense")
        unknown = "memo knows no peak of" if tflops is None else "memo knows the peak in bf16 alone of"
        measured += f"; {unknown} {name}: give its data sheet's with --peak-tflops"
    return Peak(_measured_flops(device, dtype), measured)


def gpu_name(device: torch.device) -> str:
    """The name that the driver reports, or torch's name if the driver's library cannot be loaded."""
    try:
        import pynvml

        name = pynvml.nvmlDeviceGetName(_nvml_handle(device))
        return name.decode() if isinstance(name, bytes) else str(name)
    except Exception:  # no driver library, or a container that hides it
        return torch.cuda.get_device_name(device)


def pci_address(device: torch.device) -> str | None:
    """Where a GPU sits on the bus, as sysfs writes it (0000:3b:00.0); None where the driver cannot be asked."""
    try:
        import pynvml

        info = pynvml.nvmlDeviceGetPciInfo(_nvml_handle(device))
    except Exception:  # as above
        return None
    return f"{info.domain:04x}:{info.bus:02x}:{info.device:02x}.0"


def _nvml_handle(device: torch.device) -> Any:
    """By UUID: CUDA_VISIBLE_DEVICES renumbers devices for torch, not for NVML."""
    import pynvml

    pynvml.nvmlInit()
    return pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(device).uuid}")


def device_name(device: torch.device) -> str:
    """The GPU, or the model of the processor."""
    return gpu_name(device) if device.type == "cuda" else _cpu_name()


def _cpu_name() -> str:
    """The name of the CPU that Linux reports; on other systems, or without a name, the architecture."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    models = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.processor() or platform.machine()


def _measured_flops(device: torch.device, dtype: torch.dtype) -> float:
    """Best of the square products, large enough to leave the caches, that fit into half a second."""
    size = 1024 if device.type == "cpu" else 8192
    a = torch.ones(size, size, dtype=dtype, device=device)
    best_s, end = float("inf"), time.perf_counter() + 0.5
    while time.perf_counter() < end:
        _synchronize(device)
        start = time.perf_counter()
        a @ a
        _synchronize(device)
        best_s = min(best_s, time.perf_counter() - start)
    return 2.0 * size**3 / best_s


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def peak_memory_bytes(device: torch.device) -> tuple[int, int]:
    """(device, host) peaks of this process so far; on CPU both are the resident set's peak."""
    host = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device), host
    return host, host
