"""Norms: LayerNorm and RMSNorm, alone and of a sum, forward and backward, against fp64."""

from typing import Any

import pytest
import torch
from kernel_checks import DEVICE, DTYPES, assert_as_exact, far_apart, normal

triton = pytest.importorskip("triton", reason="Triton is not installed")

from memo_kernels.norm import reference  # noqa: E402
from memo_kernels.norm import triton as kernel  # noqa: E402

EPSILON = 1e-5


def parameters(size: int, dtype: torch.dtype, centered: bool) -> list[torch.Tensor]:
    weight, bias = 1 + normal(size, dtype=dtype, seed=1, scale=0.1), normal(size, dtype=dtype, seed=2)
    return [weight, bias] if centered else [weight]


@pytest.mark.parametrize("centered", [True, False], ids=["LayerNorm", "RMSNorm"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [64, 100])
def test_norm(size: int, dtype: torch.dtype, centered: bool) -> None:
    """Bound: twice torch's own error, or two roundings."""

    def call(module):  # type: ignore[no-untyped-def]
        return lambda x, weight, bias=None: module.norm(x, weight, bias, EPSILON)

    x = 3 + normal(5, 2, size, dtype=dtype)
    assert_as_exact(call(kernel), call(reference), [x, *parameters(size, dtype, centered)])


@pytest.mark.parametrize("centered", [True, False], ids=["LayerNorm", "RMSNorm"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_add_norm(dtype: torch.dtype, centered: bool) -> None:
    """The sum has its own gradient too."""

    def call(module):  # type: ignore[no-untyped-def]
        return lambda x, residual, weight, bias=None: module.add_norm(x, residual, weight, bias, EPSILON)

    x, residual = normal(4, 3, 96, dtype=dtype), normal(4, 3, 96, dtype=dtype, seed=5)
    assert_as_exact(call(kernel), call(reference), [x, residual, *parameters(96, dtype, centered)])


@pytest.mark.parametrize("module", [reference, kernel], ids=["torch", "triton"])
@pytest.mark.parametrize("centered", [True, False], ids=["LayerNorm", "RMSNorm"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [100, 4096])
def test_norm_of_a_sum_is_the_norm_of_that_sum(module: Any, size: int, dtype: torch.dtype, centered: bool) -> None:
    """To the bit: a layer on tiles sums and norms at once in forward, and one after the other when it recomputes."""
    x, residual = normal(5, 1, size, dtype=dtype), normal(5, 1, size, dtype=dtype, seed=5)
    if dtype == torch.bfloat16 and DEVICE.type == "cpu":  # Triton's interpreter cuts off bits instead of rounding
        x, residual = (part.mul(8).round().div(8) for part in (x, residual))  # sums that bf16 holds
    weight, bias = (*parameters(size, dtype, centered), None)[:2]
    total, normed = module.add_norm(x, residual, weight, bias, EPSILON)
    assert torch.equal(total, x + residual)
    assert torch.equal(normed, module.norm(x + residual, weight, bias, EPSILON))


def test_rows_of_a_wider_tensor() -> None:
    """Heads of a fused matrix are normed where they lie."""
    wide = normal(6, 2, 160, dtype=torch.float32)
    weight = parameters(32, torch.float32, centered=False)[0]
    heads = wide.unflatten(-1, (5, 32))[:, :, 1:4]
    torch.testing.assert_close(
        kernel.norm(heads, weight, None, EPSILON), reference.norm(heads, weight, None, EPSILON), atol=1e-6, rtol=0
    )


def test_more_rows_than_programs_give_the_same_sums_twice() -> None:
    """Weight gradients have a fixed order of addition: two runs are equal to the bit. A program takes 32 rows at a
    time, the last one fewer. Sums of 261 rows of numbers near 1 in fp32: bound 2e-6, for 16 roundings."""
    x, weight = normal(8 * 32 + 5, 48, dtype=torch.float32), parameters(48, torch.float32, centered=False)[0]
    found = []
    for _ in range(2):
        leaf = weight.clone().requires_grad_()
        kernel.norm(x, leaf, None, EPSILON).square().sum().backward()
        found.append(leaf.grad)
    assert torch.equal(*found)
    leaf = weight.double().requires_grad_()
    reference.norm(x.double(), leaf, None, EPSILON).square().sum().backward()
    torch.testing.assert_close(found[0].double(), leaf.grad, atol=0, rtol=2e-6)


def test_rows_further_apart_than_32_bits() -> None:
    rows = normal(2, 64, dtype=torch.float16)
    weight = parameters(64, torch.float16, centered=False)[0]
    far = far_apart(rows)
    assert torch.equal(kernel.norm(far, weight, None, EPSILON), kernel.norm(rows, weight, None, EPSILON))
    assert all(
        torch.equal(ours, near)
        for ours, near in zip(
            kernel.add_norm(far, far_apart(rows), weight, None, EPSILON),
            kernel.add_norm(rows, rows, weight, None, EPSILON),
            strict=True,
        )
    )
    grad = normal(2, 64, dtype=torch.float16, seed=3)
    ours, near = (
        kernel._launch_backward(grads, x, weight, None, EPSILON, False)[:2]
        for x, grads in ((far, far_apart(grad)), (rows, grad))
    )
    assert all(torch.equal(a, b) for a, b in zip(ours, near, strict=True))


def test_too_wide_a_row_is_refused() -> None:
    x = torch.empty(1, 65537)
    with pytest.raises(ValueError, match="65537 columns: the kernel takes at most 65536"):
        kernel.norm(x, x[0], None, EPSILON)
