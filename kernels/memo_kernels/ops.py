"""The operations as one object, which is handed to whoever computes."""

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module

import torch
from torch import Tensor

KERNELS = ("torch", "triton")


@dataclass(frozen=True)
class Ops:
    """Shapes, dtypes and sources stand in the reference of each operation.

    norm, add_norm, rotate and activate are differentiable; the others work in place or on what needs no gradient.
    """

    name: str
    norm: Callable[[Tensor, Tensor, Tensor | None, float], Tensor]
    add_norm: Callable[[Tensor, Tensor, Tensor, Tensor | None, float], tuple[Tensor, Tensor]]
    rotate: Callable[[Tensor, Tensor, Tensor], Tensor]
    rotate_: Callable[..., None]
    activate: Callable[[Tensor, str], Tensor]
    merge_: Callable[[Tensor, Tensor, Tensor, Tensor], None]
    logit_sums: Callable[[Tensor, Tensor, int, Callable[[Tensor], Tensor]], tuple[Tensor, Tensor, Tensor]]
    logit_gradient_: Callable[[Tensor, Tensor, Tensor, Tensor, int], None]
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
    """The operations called `name`, one of KERNELS; fp64 models have none but torch's.

    Raises ValueError for an unknown name, ImportError where Triton is missing.
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
    """The dtype of sums over values of `dtype`: fp64 for fp64, else fp32. So of softmax, of attention's merged outputs,
    and of gradients, masters and moments of weights."""
    return torch.float64 if dtype == torch.float64 else torch.float32
