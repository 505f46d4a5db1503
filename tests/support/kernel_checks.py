"""Error bounds of kernels: about the error of torch itself, measured against fp64."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPES = [torch.float32, torch.float16, torch.bfloat16]

Function = Callable[..., Tensor | tuple[Tensor, ...]]


def assert_as_exact(kernel: Function, reference: Function, inputs: Sequence[Tensor], floor: float = 2.0) -> None:
    """Check outputs and the gradients of all floating inputs against the reference in fp64.

    The error may be at most twice that of the reference in this dtype, or `floor` roundings of the largest value."""
    generator = torch.Generator(DEVICE).manual_seed(7)
    exact = _run(reference, [x.double() if x.is_floating_point() else x for x in inputs], generator)
    ours, theirs = _run(kernel, inputs, generator), _run(reference, inputs, generator)
    assert len(ours) == len(exact)
    for index, (our, their, truth) in enumerate(zip(ours, theirs, exact, strict=True)):
        assert our.dtype == their.dtype and our.shape == truth.shape, f"result {index}"
        rounding = torch.finfo(our.dtype).eps * truth.abs().max().item()
        bound = max(2 * (their.double() - truth).abs().max().item(), floor * rounding)
        error = (our.double() - truth).abs().max().item()
        assert error <= bound, f"result {index}: error {error:.3g}, bound {bound:.3g}"


def _run(function: Function, inputs: Sequence[Tensor], generator: torch.Generator) -> list[Tensor]:
    """Return outputs, then gradients; all calls have the same incoming gradients."""
    generator.manual_seed(7)
    leaves = [x.detach().clone().requires_grad_() if x.is_floating_point() else x for x in inputs]
    outputs = function(*leaves)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    grads = [torch.randn(out.shape, generator=generator, device=DEVICE).to(out.dtype) for out in outputs]
    wanted = [leaf for leaf in leaves if leaf.requires_grad]
    return [*(out.detach() for out in outputs), *torch.autograd.grad(outputs, wanted, grads)]


def normal(*shape: int, dtype: torch.dtype, seed: int = 0, scale: float = 1.0) -> Tensor:
    generator = torch.Generator(DEVICE).manual_seed(seed)
    return (torch.randn(shape, generator=generator, device=DEVICE) * scale).to(dtype)


def far_apart(rows: Tensor) -> Tensor:
    """Return the two rows of [2, n] with 2^31 elements between them, so that their distance does not fit into 32 bits.

    Memory between the rows is never touched, so the machine only reserves it.
    """
    far = torch.empty(2**31 + rows.shape[1], dtype=rows.dtype, device=rows.device).as_strided(rows.shape, (2**31, 1))
    return far.copy_(rows)
