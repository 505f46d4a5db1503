"""The choice among attention kernels, by name and device."""

import torch

from memo.attention.backends import AttentionBackend, CpuFlash
from memo.errors import ConfigError

BACKENDS = ("auto", "cpu", "cudnn", "flash", "flash_attn", "te")


def select_backend(name: str, device_type: str, compute_capability: tuple[int, int] | None = None) -> AttentionBackend:
    """The backend for ``name`` (one of BACKENDS) on ``device_type`` ("cpu" or "cuda").

    "auto" is the CPU kernel on a CPU; on CUDA it is cuDNN from compute capability 9.0 on, where that is 1.7
    to 2.3 times as fast as flash, and flash below. ``compute_capability`` defaults to the current device's.
    Raises ConfigError for an unknown name, one of the other device type, or one whose package is missing.
    """
    if name not in BACKENDS:
        raise ConfigError(f"attention_backend is {name!r}; known are {', '.join(BACKENDS)}")
    if device_type == "cpu":
        if name not in ("auto", "cpu"):
            raise ConfigError(
                f"attention_backend is {name!r}, which needs CUDA, but the device is 'cpu'; use 'auto' or 'cpu'"
            )
        return CpuFlash()
    if device_type != "cuda" or name == "cpu":
        raise ConfigError(
            f"attention_backend is {name!r}, but the device is {device_type!r}; "
            "use 'auto', and 'cpu' or 'cuda' as device"
        )
    # Only here: nothing of CUDA may be touched on a CPU.
    from memo.attention import cuda

    if name == "auto":
        major, _ = compute_capability or torch.cuda.get_device_capability()
        name = "cudnn" if major >= 9 else "flash"
    return cuda.build(name)
