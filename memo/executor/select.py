"""The choice among stream backends, by name and device."""

import torch

from memo.errors import ConfigError
from memo.executor.checker import Checked
from memo.executor.cpu_streams import ThreadStreams, VirtualStreams
from memo.executor.streams import StreamBackend

_DEVICE_TYPES = {"cuda": "cuda", "virtual": "cpu", "threads": "cpu"}


def make_backend(name: str, device: torch.device, check: bool = False) -> StreamBackend:
    """The backend for a device; auto: cuda on CUDA, and virtual with eager copies on a CPU.

    Eager copies have no cost beyond the copy itself. Threads would compete with compute for cores and memory bandwidth,
    so on a CPU they are for tests only.

    Raises ConfigError if the backend is unknown or is not for this type of device.
    """
    if name == "auto":
        name = "cuda" if device.type == "cuda" else "virtual"
    if name not in _DEVICE_TYPES:
        raise ConfigError(f"offload_backend is {name!r}: choose auto, {', '.join(_DEVICE_TYPES)}")
    if device.type != _DEVICE_TYPES[name]:
        raise ConfigError(
            f"offload_backend {name!r} runs on {_DEVICE_TYPES[name]}, but the device is {device}: choose auto"
        )
    backend: StreamBackend
    if name == "cuda":
        from memo.executor.cuda_streams import CudaStreams

        backend = CudaStreams(device)
    elif name == "threads":
        backend = ThreadStreams()
    else:
        backend = VirtualStreams("eager")
    return Checked(backend) if check else backend
