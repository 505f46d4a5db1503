"""What makes two runs give the same bits, and what a run says of its own.

Bits repeat where everything is added in one order. Attention's backward and cuBLAS have such orders if they are told;
NCCL's reductions have one round a ring, but none in the switch (NVLS: github.com/NVIDIA/nccl/issues/1497). memo's own
kernels have no atomic additions, on CPUs and in kernels/memo_kernels alike.

The same bits need the same order, so the same layout, tiles, versions and kind of machine. How much moves to host
memory is not among it.
"""

import os

import torch

from memo.config import RunConfig
from memo.errors import ConfigError

ENVIRONMENT = {
    "CUBLAS_WORKSPACE_CONFIG": (":4096:8", ":16:8"),
    "NCCL_ALGO": ("Ring", "^NVLS"),
    "NVTE_ALLOW_NONDETERMINISTIC_ALGO": ("0",),
}
"""Variables that libraries read when they begin, and the values with which they add in one order, the default first.

cuBLAS: https://docs.nvidia.com/cuda/cublas, "Results reproducibility". NCCL: as Megatron-LM's --deterministic-mode
(megatron/training/determinism.py), which takes no Tree, because the order inside of a node is not the user's; torch
itself leaves NVLS out then (github.com/pytorch/pytorch/pull/191782). The last is TransformerEngine's."""


def make_deterministic(config: RunConfig) -> None:
    """Obey --deterministic in this process, before it starts a process group or touches a GPU; without it, nothing.

    Raises ConfigError for a variable of the environment that says the opposite.
    """
    if not config.hardware.deterministic:
        return
    for name, accepted in ENVIRONMENT.items():
        value = os.environ.setdefault(name, accepted[0])
        if value not in accepted:
            raise ConfigError(
                f"--deterministic needs {name} to be {' or '.join(accepted)}, but the environment has {name}={value}: "
                "unset it, or leave --deterministic out"
            )
    torch.use_deterministic_algorithms(True)
    # Else every tensor is filled before its first use: for programs that read what they have not written.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def describe_bits(config: RunConfig, device_type: str, attention_backend: str) -> str:
    """One line for the header: whether another run of the same flags gives the same bits, and what to do if not."""
    if device_type == "cpu":
        return "bits: every run of these flags gives the same, as kernels of a CPU add in one order"
    if config.hardware.deterministic:
        return "bits: every run of these flags on such machines gives the same (--deterministic)"
    return (
        f"bits: runs differ in the last ones, as the backward of {attention_backend} adds in no fixed order: "
        "--deterministic makes them repeat"
    )
