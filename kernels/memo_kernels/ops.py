"""All operations in one object, which modules get as an argument."""

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module

import torch
from torch import Tensor

KERNELS = ("torch", "triton")


@dataclass(frozen=True)
class Ops:
    """The operations of one implementation; the reference of each gives shapes, dtypes and sources.

    norm, add_norm, rotate and activate are differentiable. The rest work in place or on tensors without gradients.
    """

    name: str
    norm: Callable[[Tensor, Tensor, Tensor | None, float], Tensor]
    add_norm: Callable[[Tensor, Tensor, Tensor, Tensor | None, float], tuple[Tensor, Tensor]]
    rotate: Callable[[Tensor, Tensor, Tensor], Tensor]
    rotate_: Callable[..., None]
    activate: Callable[[Tensor, str], Tensor]
    merge_: Callable[[Tensor, Tensor, Tensor, Tensor], None]
    logit_sums: Callable[[Tensor, Tensor, int, Callable[[Tensor], Tensor]], tuple[Tensor, Tensor, Tensor, Tensor]]
    logit_gradient_: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, int], None]
    squared_norm: Callable[[Tensor], Tensor]


_FOLDERS = {
    "norm": "norm",
    "add_norm": "norm",
    "rotate": "rope",
    "rotate_": "rope",
    "activate": "activation",
    "merge_": "merge",
    "logit_sums": "cross_entropy",
    "logit_gradient_": "cross_entropy",
    "squared_norm": "squared_norm",
}


def select_ops(name: str, dtype: torch.dtype) -> Ops:
    """Return the operations called `name`, one of KERNELS; fp64 models always get torch's.

    Raises ValueError for an unknown name, and ImportError if Triton is missing.
    """
    if name not in KERNELS:
        raise ValueError(f"kernels {name!r}: known are {', '.join(KERNELS)}")
    if name == "triton" and importlib.util.find_spec("triton") is None:
        raise ImportError("kernels 'triton' need the package triton, which is not installed")
    if dtype == torch.float64:
        name = "torch"
    module = "reference" if name == "torch" else name
    functions = {
        function: getattr(import_module(f"memo_kernels.{folder}.{module}"), function)
        for function, folder in _FOLDERS.items()
    }
    return Ops(name, **functions)


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of sums over values of `dtype`: fp64 for fp64, else fp32. Softmax, attention's merged outputs,
    and the gradients, masters and moments of weights have this dtype."""
    return torch.float64 if dtype == torch.float64 else torch.float32
