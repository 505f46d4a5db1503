"""Makes two runs give the same bits, and tells users whether they do.

Bits repeat if everything is added in a fixed order. Attention's backward and cuBLAS have a fixed order as an option.
NCCL's reductions have one on a ring, but none in the switch (NVLS: github.com/NVIDIA/nccl/issues/1497). memo's own
kernels use no atomic additions, neither on CPUs nor in kernels/memo_kernels.

The same order needs the same layout, tiles, versions and kind of machine. It does not depend on the share that moves
to host memory.
"""

import os

import torch

from memo.config.run import HardwareConfig
from memo.errors import ConfigError

ENVIRONMENT = {
    "CUBLAS_WORKSPACE_CONFIG": (":4096:8", ":16:8"),
    "NCCL_ALGO": ("Ring", "^NVLS"),
    "NVTE_ALLOW_NONDETERMINISTIC_ALGO": ("0",),
}
"""Variables that libraries read when they start, and the values for a fixed order of additions, the default first.

cuBLAS: https://docs.nvidia.com/cuda/cublas, "Results reproducibility". NCCL: as Megatron-LM's --deterministic-mode
(megatron/training/determinism.py), which excludes Tree, because users cannot fix the order inside a node; torch
excludes NVLS (github.com/pytorch/pytorch/pull/191782). The last variable is TransformerEngine's."""


def make_deterministic(hardware: HardwareConfig) -> None:
    """Apply --deterministic to this process; call it before the process starts a process group or uses a GPU.

    Raises ConfigError for an environment variable that contradicts the flag.
    """
    if not hardware.deterministic:
        return
    for name, accepted in ENVIRONMENT.items():
        value = os.environ.setdefault(name, accepted[0])
        if value not in accepted:
            raise ConfigError(
                f"--deterministic needs {name} to be {' or '.join(accepted)}, but the environment has {name}={value}: "
                "unset it, or leave --deterministic out"
            )
    torch.use_deterministic_algorithms(True)
    # torch would fill every new tensor, for programs that read memory before they write it. memo does not.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def describe_bits(hardware: HardwareConfig, device_type: str, attention_backend: str) -> str:
    """A line for the header: whether another run with the same flags gives the same bits, and how to get them."""
    if device_type == "cpu":
        return "bits: every run of these flags gives the same, as kernels of a CPU add in one order"
    if hardware.deterministic:
        return "bits: every run of these flags on such machines gives the same (--deterministic)"
    return (
        f"bits: runs differ in the last ones, as the backward of {attention_backend} adds in no fixed order: "
        "--deterministic makes them repeat"
    )
