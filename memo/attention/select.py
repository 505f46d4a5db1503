"""Chooses the attention kernel by name, by device, and by measured times."""

import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

import torch

from memo.artifacts.attention_table import AttentionCase, AttentionTable
from memo.attention.backends import AttentionBackend, CpuFlash
from memo.attention.squares import Squares
from memo.config.attention_kernels import (
    CAPPING,
    DETERMINISTIC_HEAD_DIM,
    backend_by_capability,
    flash_2_times,
    largest_deterministic,
)
from memo.errors import ConfigError

_MODULES = {
    "cudnn": "torch",
    "flash": "torch",
    "flash_attn": "flash_attn.flash_attn_interface",
    "flash_attn_3": "flash_attn_interface",
    "flash_attn_4": "flash_attn.cute.interface",
    "te": "transformer_engine.pytorch",
}
"""The module that each CUDA backend imports."""
CUDA_BACKENDS = tuple(_MODULES)
BACKENDS = ("auto", "cpu", *CUDA_BACKENDS, "torch")


@dataclass(frozen=True)
class AttentionChoice:
    """The name of a backend, never "auto", and the reason for it, for people."""

    name: str
    reason: str


def choose_backend(
    name: str,
    device_type: str,
    head_dim: int,
    calls: Mapping[AttentionCase, float] | None = None,
    table: AttentionTable | None = None,
    capped: bool = False,
) -> AttentionChoice:
    """Choose the backend for ``name`` (one of BACKENDS) on ``device_type`` ("cpu" or "cuda"), and give the reason.

    "auto" is the CPU kernel on a CPU; where scores are ``capped``, it is the package flash-attn if that can run, else
    torch's operations. On CUDA it is the installed backend that is fastest for ``calls`` (how often each case runs) in
    ``table``. If the table lacks one of the cases, "auto" is the backend that `backend_by_capability`
    gives for the current device if it is eligible, else flash. Under torch.use_deterministic_algorithms, which
    --deterministic turns on, only backends whose gradients are deterministic at ``head_dim`` are eligible.

    Raises ConfigError for an unknown name, a backend of the other device type, or a backend whose gradients are not
    deterministic although they must be.
    """
    _check(name, device_type)
    if name == "auto" and capped:
        has_flash = device_type == "cuda" and is_installed("flash_attn") and _is_eligible("flash_attn", head_dim)
        return AttentionChoice("flash_attn" if has_flash else "torch", "scores are capped")
    if device_type == "cpu" and name == "auto":
        return AttentionChoice("cpu", "the one fused kernel of this device")
    if name != "auto":
        _check_deterministic(name, head_dim)
        return AttentionChoice(name, "--attention-backend")
    eligible = [backend for backend in CUDA_BACKENDS if is_installed(backend) and _is_eligible(backend, head_dim)]
    totals = table.totals(calls) if table is not None and calls else {}
    measured = [backend for backend in totals if backend in eligible]
    limited = (
        "; torch.use_deterministic_algorithms leaves out those that add in no fixed order" if _must_repeat() else ""
    )
    if table is not None and calls and measured:
        return AttentionChoice(measured[0], _figures(measured, totals, table, calls) + limited)
    major, minor = torch.cuda.get_device_capability()
    capability = 10 * major + minor
    by_rule = backend_by_capability(capability)
    chosen = by_rule if by_rule in eligible else "flash"
    if limited and chosen != by_rule and flash_2_times(capability) > 1:
        limited += f", and this one takes about {flash_2_times(capability):g} times as long as {by_rule}"
    _check_deterministic(chosen, head_dim)
    return AttentionChoice(
        chosen,
        f"by compute capability {major}.{minor}{limited}; kernels were not measured here for this shape: "
        "`memo profile --attention` with the flags of this run",
    )


def select_backend(name: str, device_type: str, softcap: float = 0.0) -> AttentionBackend:
    """Make the backend for ``name`` (one of BACKENDS); for "auto" `choose_backend` chooses it without a table.

    ``softcap``: the cap of scores, 0: none. Raises ConfigError also for a backend whose package is missing, and for one
    that does not cap scores although it must.
    """
    _check(name, device_type)
    if name == "auto":
        name = choose_backend(name, device_type, 0, capped=bool(softcap)).name
    if softcap and name not in CAPPING:
        raise ConfigError(f"attention_backend is {name!r}, which cannot cap scores; use {' or '.join(CAPPING)}")
    backend = _class_of(name)()
    backend.softcap = softcap
    return backend


def is_installed(name: str) -> bool:
    """Whether the module of a CUDA backend is installed; it is not imported, but the packages that contain it are."""
    try:
        return importlib.util.find_spec(_MODULES[name]) is not None
    except (ImportError, ValueError):  # a parent is missing, or sys.modules says that it must not be there
        return False


def _class_of(name: str) -> type[AttentionBackend]:
    if name not in CUDA_BACKENDS:
        return {cls.name: cls for cls in (CpuFlash, Squares)}[name]
    # Imported here, so that a run on a CPU does not import CUDA's operators.
    from memo.attention import cuda, packages

    classes: Sequence[type[AttentionBackend]] = (
        cuda.CudnnSdpa,
        cuda.FlashSdpa,
        packages.FlashAttn,
        packages.FlashAttn3,
        packages.FlashAttn4,
        packages.TransformerEngine,
    )
    return {cls.name: cls for cls in classes}[name]


def _check(name: str, device_type: str) -> None:
    if name not in BACKENDS:
        raise ConfigError(f"attention_backend is {name!r}; known are {', '.join(BACKENDS)}")
    if device_type == "cpu" and name in CUDA_BACKENDS:
        raise ConfigError(
            f"attention_backend is {name!r}, which needs CUDA, but the device is 'cpu'; use 'auto', 'cpu' or 'torch'"
        )
    if device_type not in ("cpu", "cuda") or (device_type == "cuda" and name == "cpu"):
        raise ConfigError(
            f"attention_backend is {name!r}, but the device is {device_type!r}; "
            "use 'auto', and 'cpu' or 'cuda' as device"
        )


def _must_repeat() -> bool:
    # If torch only warns, its FlashAttention 2 does not add in a fixed order either.
    return torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled()


def _is_eligible(name: str, head_dim: int) -> bool:
    return not _must_repeat() or max(1, head_dim) <= DETERMINISTIC_HEAD_DIM[name]


def _check_deterministic(name: str, head_dim: int) -> None:
    if not _is_eligible(name, head_dim):
        raise ConfigError(
            f"attention_backend is {name!r}, whose gradients have the same bits each time "
            f"{largest_deterministic(name)}, and heads are of {head_dim}, but torch.use_deterministic_algorithms is "
            "on: use 'auto', or turn that off"
        )


def _figures(
    measured: Sequence[str], totals: Mapping[str, float], table: AttentionTable, calls: Mapping[AttentionCase, float]
) -> str:
    """The day, the cases and the times of all backends that could have been chosen, the fastest first."""
    rows = [row for row in table.rows if row.case in calls]
    day = datetime.fromisoformat(min(row.measured_at for row in rows)).strftime("%Y-%m-%d")
    times = ", ".join(f"{name} {totals[name] * 1e3:.3g} ms" for name in measured)
    return f"measured {day}, forward and backward of {'; '.join(str(case) for case in calls)}: {times}"
