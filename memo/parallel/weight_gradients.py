"""Weight gradients, which the matrix product adds to the main gradient itself where it can.

On GPUs cuBLAS adds a product of narrow factors to a wide sum. The gradient is then not rounded to the dtype of the
model; nor is it written, read and added afterwards, which takes 12 bytes of memory traffic an element and microbatch
in bf16. A backward that has added a gradient itself returns None to autograd, and calls `gradient_added`: whether
autograd runs hooks without a gradient depends on the version of torch, and the hooks do nothing in that case.
"""

import torch
from torch import Tensor

from memo.parallel.shards import ShardedParameter

_ADDING_DEVICES = ("cuda",)
"""Devices on which backwards under autograd add weight gradients themselves."""


def own_sum(weight: Tensor) -> Tensor | None:
    """Return the main gradient to which backwards under autograd add the gradient of `weight` themselves.

    Returns None on CPUs, which have no product of narrow factors that adds to a wide sum, and for a weight without a
    main gradient. Then autograd takes the gradient, unless the weight is frozen, and a hook adds it.
    """
    main = weight.main_grad if isinstance(weight, ShardedParameter) else None
    return main if main is not None and main.device.type in _ADDING_DEVICES else None


def gradient_added(weight: Tensor) -> None:
    """Report to the owner of the main gradient that a backward has added its contribution to `own_sum(weight)`."""
    assert isinstance(weight, ShardedParameter) and weight.on_added is not None, "no owner of a main gradient"
    weight.on_added(weight)


def add_weight_gradient(main: Tensor | None, grad_out: Tensor, x: Tensor) -> None:
    """Add dW [out, in] of y = x W^T, for y's gradient [t, out] and x [t, in], to `main`; None (a frozen weight): do
    nothing."""
    if main is None:
        return
    if main.dtype == grad_out.dtype:
        main.addmm_(grad_out.t(), x)
    elif main.is_cuda:  # narrow factors; the fp32 product is added without being rounded or written to memory
        torch.addmm(main, grad_out.t(), x, out_dtype=main.dtype, out=main)
    else:
        main.add_(grad_out.t() @ x)


def weight_gradient(weight: Tensor, grad_out: Tensor, x: Tensor) -> Tensor | None:
    """Return dW, summed over all leading dims of y's gradient and of x, for a backward to give to autograd.

    Adds dW to `own_sum(weight)` and returns None if there is one; the caller must then call `gradient_added`.
    """
    main, grad_out, x = own_sum(weight), grad_out.flatten(0, -2), x.flatten(0, -2)
    if main is None:
        return grad_out.t() @ x
    add_weight_gradient(main, grad_out, x)
    return None
