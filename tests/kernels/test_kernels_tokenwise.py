"""RoPE and activations: forward and backward, against fp64."""

from functools import partial
from typing import Any

import pytest
import torch
from kernel_checks import DEVICE, DTYPES, assert_as_exact, far_apart, normal

triton = pytest.importorskip("triton", reason="Triton is not installed")

from memo_kernels.activation import reference as activation  # noqa: E402
from memo_kernels.activation import triton as activation_kernel  # noqa: E402
from memo_kernels.rope import reference as rope  # noqa: E402
from memo_kernels.rope import triton as rope_kernel  # noqa: E402


def angles(s: int, b: int, half: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    turns = normal(s, b, 1, half, dtype=torch.float32, seed=3, scale=2.0)
    return turns.cos().to(dtype), turns.sin().to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("heads", "size"), [(3, 16), (17, 24)])
def test_rotation(heads: int, size: int, dtype: torch.dtype) -> None:
    cos, sin = angles(3, 2, size // 2, dtype)
    x = normal(3, 2, heads, size, dtype=dtype)

    def call(module):  # type: ignore[no-untyped-def]
        return lambda y: module.rotate(y, cos.to(y.dtype), sin.to(y.dtype))

    assert_as_exact(call(rope_kernel), call(rope), [x])


@pytest.mark.parametrize("module", [rope, rope_kernel], ids=["torch", "triton"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rotation_in_place_of_some_heads(module: Any, dtype: torch.dtype) -> None:
    """q and k of a fused [s, b, (a + 2k) d] turn where they lie; v stays. Each way to the bit as out of place."""
    qkv = normal(4, 2, 5, 16, dtype=dtype)
    table = angles(4, 2, 8, dtype)
    turned = module.rotate(qkv[:, :, :3], *table)
    given = qkv.clone()
    module.rotate_(given[:, :, :3], *table)
    assert torch.equal(given, torch.cat((turned, qkv[:, :, 3:]), dim=2))


@pytest.mark.parametrize("module", [rope, rope_kernel], ids=["torch", "triton"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rotation_back_is_the_gradient(module: Any, dtype: torch.dtype) -> None:
    """As autograd finds it: torch's to a rounding of each of two products, the kernel's to the bit."""
    x, table = normal(4, 2, 3, 16, dtype=dtype).requires_grad_(), angles(4, 2, 8, dtype)
    grad = normal(4, 2, 3, 16, dtype=dtype, seed=5)
    (expected,) = torch.autograd.grad(module.rotate(x, *table), x, grad)
    most = grad.abs().max().item()
    module.rotate_(grad, *table, back=True)
    torch.testing.assert_close(
        grad, expected, rtol=0, atol=0 if module is rope_kernel else torch.finfo(dtype).eps * most
    )


def test_heads_that_are_not_contiguous_are_refused() -> None:
    x = normal(2, 1, 16, 4, dtype=torch.float32).transpose(2, 3)
    with pytest.raises(ValueError, match="the elements of a head lie 4 apart"):
        rope_kernel.rotate_(x, *angles(2, 1, 8, torch.float32))


def test_a_tile_of_a_table() -> None:
    """Rows of a longer table, and one table for both batch rows."""
    cos, sin = (angle[:, :1] for angle in angles(8, 2, 8, torch.float32))
    x = normal(3, 2, 2, 16, dtype=torch.float32)
    table = (cos[2:5].expand(3, 2, 1, 8), sin[2:5].expand(3, 2, 1, 8))
    torch.testing.assert_close(rope_kernel.rotate(x, *table), rope.rotate(x, *table), atol=1e-6, rtol=0)


def test_rotation_of_tokens_further_apart_than_32_bits() -> None:
    near = normal(2, 1, 1, 16, dtype=torch.float16)
    table = angles(2, 1, 8, torch.float16)
    far = far_apart(near.view(2, 16)).view(2, 1, 1, 16)
    assert torch.equal(rope_kernel.rotate(far, *table), rope_kernel.rotate(near, *table))
    for x in (far, near):
        rope_kernel.rotate_(x, *table)
    assert torch.equal(far, near)


@pytest.mark.parametrize("kind", ["gelu", "gelu_tanh", "swiglu", "swiglu_clamped", "geglu_tanh"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_activation(dtype: torch.dtype, kind: str) -> None:
    """Eight roundings where torch's own, which differ from CPU to CPU, are fewer: the gradient of gelu_tanh holds
    x u' (1 - t^2) / 2 with t = tanh u, where an error in t counts x u' t times: 5 at x = 3, where t is off by one."""
    x = normal(3, 2, 200, dtype=dtype, scale=3.0)
    kernel, reference = (partial(module.activate, kind=kind) for module in (activation_kernel, activation))
    assert_as_exact(kernel, reference, [x], floor=8.0)


@pytest.mark.parametrize("kind", ["gelu", "gelu_tanh", "swiglu", "swiglu_clamped", "geglu_tanh"])
def test_extreme_inputs_stay_finite(kind: str) -> None:
    """exp of a large argument must not turn a plain answer into NaN."""
    x = torch.tensor([[-1e4, -200.0, -20.0, 0.0, 20.0, 200.0, 1e4, 1.0]], device=DEVICE, requires_grad=True)
    kernel_out = activation_kernel.activate(x, kind)
    (kernel_grad,) = torch.autograd.grad(kernel_out.sum(), x)
    out = activation.activate(x, kind)
    (grad,) = torch.autograd.grad(out.sum(), x)
    torch.testing.assert_close(kernel_out, out, atol=1e-5, rtol=1e-6)
    torch.testing.assert_close(kernel_grad, grad, atol=1e-5, rtol=1e-6)


def test_activation_of_rows_further_apart_than_32_bits() -> None:
    near = normal(2, 64, dtype=torch.float16)
    for kind in ("gelu", "swiglu"):
        found = []
        for x in (near, far_apart(near)):
            leaf = x.detach().requires_grad_()
            out = activation_kernel.activate(leaf, kind)
            found.append((out, *torch.autograd.grad(out, leaf, near[:, : out.shape[1]])))
        assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
