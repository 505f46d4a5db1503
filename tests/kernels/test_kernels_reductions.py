"""Merging of partial attention, cross-entropy of a slice of the logits, sum of squares: against fp64."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from kernel_checks import DEVICE, DTYPES, far_apart, normal

triton = pytest.importorskip("triton", reason="Triton is not installed")

from memo_kernels.cross_entropy import reference as entropy  # noqa: E402
from memo_kernels.cross_entropy import triton as entropy_kernel  # noqa: E402
from memo_kernels.merge import reference as merge  # noqa: E402
from memo_kernels.merge import triton as merge_kernel  # noqa: E402
from memo_kernels.squared_norm import reference as squares  # noqa: E402
from memo_kernels.squared_norm import triton as squares_kernel  # noqa: E402

Parts = list[tuple[torch.Tensor, torch.Tensor]]


def parts(dtype: torch.dtype) -> Parts:
    """Outputs [b, n, s, d] as views of [s, b, n, d], and log-sum-exps far apart."""
    return [
        (
            normal(35, 2, 3, 24, dtype=dtype, seed=i).permute(1, 2, 0, 3),
            normal(2, 3, 35, dtype=torch.float32, seed=10 + i, scale=8.0),
        )
        for i in range(3)
    ]


def merged(module, given: Parts, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[no-untyped-def]
    out = torch.zeros(35, 2, 3, 24, dtype=dtype, device=DEVICE).permute(1, 2, 0, 3)
    lse = torch.full((2, 3, 35), -torch.inf, dtype=dtype, device=DEVICE)
    for part, part_lse in given:
        module.merge_(out, lse, part, part_lse)
    return out, lse


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_merge(dtype: torch.dtype) -> None:
    """Sums in fp32, whatever the parts' dtype: an error of at most twice torch's own in fp32."""
    given = parts(dtype)
    exact = merged(merge, [(out.double(), lse.double()) for out, lse in given], torch.float64)
    found, theirs = (merged(module, given, torch.float32) for module in (merge_kernel, merge))
    for our, their, truth in zip(found, theirs, exact, strict=True):
        bound = 2 * (their.double() - truth).abs().max().item()
        torch.testing.assert_close(our.double(), truth, atol=bound, rtol=0)


def test_a_merge_of_two_million_tokens_can_be_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA takes 2^31 - 1 programs along the first axis of a grid, and 65,535 along the second."""
    grids = []

    class Launched:
        def __getitem__(self, grid: tuple[int, int]) -> Callable[..., None]:
            grids.append(grid)
            return lambda *_, **__: None

    monkeypatch.setattr(merge_kernel, "_merge", Launched())
    out, lse = torch.empty(1, 32, 1 << 21, 128, device="meta"), torch.empty(1, 32, 1 << 21, device="meta")
    merge_kernel.merge_(out, lse, out, lse)
    assert grids == [(1 << 17, 32)]


def test_merge_of_a_part_of_the_queries() -> None:
    """Only the queries that a block covers change.

    fp32. Outputs are weighted by exp of a difference of log-sum-exps, of whose values a rounding is as large as they
    are: so many roundings of the largest output are the bound.
    """
    (out, lse), (part, part_lse) = parts(torch.float32)[:2]
    totals = [x.contiguous().clone() for x in (out, lse)]
    expected = [x.clone() for x in totals]
    rows = slice(7, 20)
    for module, (total, total_lse) in ((merge_kernel, totals), (merge, expected)):
        module.merge_(total[:, :, rows], total_lse[:, :, rows], part[:, :, rows], part_lse[:, :, rows])
    bound = torch.finfo(torch.float32).eps * expected[1].abs().max().item()
    for our, their in zip(totals, expected, strict=True):
        torch.testing.assert_close(our, their, atol=bound * their.abs().max().item(), rtol=0)
        assert torch.equal(our[:, :, 20:], their[:, :, 20:])


def test_merge_of_queries_further_apart_than_32_bits() -> None:
    near = normal(2, 16, dtype=torch.float32)
    total_near, total_far = (x.view(1, 1, 2, 16) for x in (near.clone(), far_apart(near)))
    for total in (total_near, total_far):
        lse = torch.zeros(1, 1, 2, device=DEVICE)
        merge_kernel.merge_(total, lse, near.view(1, 1, 2, 16), torch.ones(1, 1, 2, device=DEVICE))
    assert torch.equal(total_near, total_far)


def logits_and_labels(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Of 4500 columns the last 4 are padding; row 2's label is on another rank."""
    labels = torch.tensor([0, 4495, -1, 2048, 2047], device=DEVICE)
    return normal(5, 4500, dtype=dtype, scale=4.0), labels


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_logit_sums(dtype: torch.dtype) -> None:
    """fp32 sums of 4,496 terms: 1e-5 relative."""
    logits, labels = logits_and_labels(dtype)
    exact = entropy.logit_sums(logits.double(), labels, 4496, alone)
    before = logits.clone()
    *found, kept = entropy_kernel.logit_sums(logits, labels, 4496, alone)
    for our, truth in zip(found, exact[:3], strict=True):
        torch.testing.assert_close(our.double(), truth, atol=0, rtol=1e-5)
    assert kept is logits and torch.equal(logits, before)  # no wide copy is made to be destroyed


@pytest.mark.parametrize("module", [entropy, entropy_kernel], ids=["torch", "triton"])
def test_logit_sums_of_slices_add_up(module: Any) -> None:
    """fp32, three ranks' slices, of which the last has padding alone: 1e-6 relative to the whole."""
    whole = normal(5, 600, dtype=torch.float32, scale=4.0)
    labels = torch.tensor([0, 299, 300, 599, 17], device=DEVICE)
    maximum, total, target, _ = entropy.logit_sums(whole.double(), labels, 600, alone)
    parts = [(whole[:, :300], 0, 300), (whole[:, 300:], 300, 300), (torch.full((5, 8), 99.0, device=DEVICE), 600, 0)]
    highest = torch.stack([x[:, :valid].amax(-1) if valid else maximum.float() - 1 for x, _, valid in parts]).amax(0)

    def of_all(own: torch.Tensor) -> torch.Tensor:
        return own.copy_(highest)  # in place, as a collective

    found = []
    for x, first, valid in parts:
        local = (labels - first).masked_fill((labels < first) | (labels >= first + valid), -1)
        found.append(module.logit_sums(x.clone(), local, valid, of_all))
    assert all(torch.equal(part[0], maximum.float()) for part in found)
    for index, truth in ((1, total), (2, target)):
        torch.testing.assert_close(sum(part[index] for part in found).double(), truth, atol=0, rtol=1e-6)


def alone(maximum: torch.Tensor) -> torch.Tensor:
    """Of a vocabulary on one rank."""
    return maximum


def gradient_over(module: Any, logits: torch.Tensor, labels: torch.Tensor, grad: torch.Tensor, num_valid: int) -> None:
    maximum, total, _, exponentials = module.logit_sums(logits, labels, num_valid, alone)
    module.logit_gradient_(logits, exponentials, labels, maximum, total, grad, num_valid)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_logit_gradient(dtype: torch.dtype) -> None:
    """One rounding of the result's dtype above 1e-6."""
    logits, labels = logits_and_labels(dtype)
    grad = normal(5, dtype=torch.float32, seed=9)
    exact = logits.double()
    gradient_over(entropy, exact, labels, grad.double(), 4496)
    for module in (entropy, entropy_kernel):
        found = logits.clone()
        gradient_over(module, found, labels, grad, 4496)
        assert not found[:, 4496:].any()
        torch.testing.assert_close(found.double(), exact, atol=1e-6, rtol=torch.finfo(dtype).eps)


def test_logits_further_apart_than_32_bits() -> None:
    near = normal(2, 64, dtype=torch.float16)
    labels, grad = torch.tensor([3, 59], device=DEVICE), torch.ones(2, device=DEVICE)
    far = far_apart(near)
    sums, far_sums = (entropy_kernel.logit_sums(x, labels, 60, alone) for x in (near, far))
    assert all(torch.equal(a, b) for a, b in zip(sums[:3], far_sums[:3], strict=True))
    for x in (near, far):
        gradient_over(entropy_kernel, x, labels, grad, 60)
    assert torch.equal(near, far)


@pytest.mark.parametrize("size", [1, 8192, 20001])
@pytest.mark.parametrize("scale", [1.0, 1e-30, 1e30], ids=str)
def test_squared_norm(size: int, scale: float) -> None:
    """Sums in fp64: n 2^-53 relative, also where a square is below or above all fp32 numbers."""
    x = normal(size, dtype=torch.float32) * scale
    truth = math.fsum(value * value for value in x.tolist())
    for module in (squares, squares_kernel):
        found = module.squared_norm(x)
        assert found.dtype == torch.float64 and found.shape == ()
        assert found.item() == pytest.approx(truth, rel=(size + 4) * 2.0**-53, abs=0)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="the interpreter takes minutes for 262,145 programs")
def test_squared_norm_of_more_than_2_31_elements() -> None:
    """Exact: ones at both sides of element 2^31 and at the end, in a tensor of zeros."""
    x = torch.zeros(2**31 + 5, dtype=torch.bfloat16, device=DEVICE)
    x[[0, 2**31 - 1, 2**31, 2**31 + 4]] = 1.0
    assert squares_kernel.squared_norm(x).item() == 4.0
