"""Numbers of the emulated GPU are the CPU's, to the bit, whatever the schedule."""

import ctypes
from collections.abc import Callable

import pytest
import torch
from cuda_calls import LEGACY, Cuda
from torch import Tensor
from torch.nn import functional as F

from memo.emulated_gpu.face import EmulatedGpu

OPERATIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "matmul": lambda a, b: a @ b,
    "linear": lambda a, b: F.linear(a, b, b[0]),
    "bmm": lambda a, b: torch.bmm(a.expand(3, -1, -1), b.expand(3, -1, -1)),
    "softmax": lambda a, b: torch.softmax(a + b, -1),
    "silu": lambda a, b: F.silu(a) * b,
    "gelu": lambda a, b: F.gelu(a - b, approximate="tanh"),
    "sum": lambda a, b: (a * b).sum(0),
    "norm": lambda a, b: torch.linalg.vector_norm(a) + b.norm(),
    "cat": lambda a, b: torch.cat([a, b.T], 1).contiguous(),
    "gather": lambda a, b: a.gather(1, b.argsort(1)),
    "mask": lambda a, b: a[b > 0],
    "where": lambda a, b: torch.where(a > b, a, b),
    "fill": lambda a, b: a.masked_fill(b > 0, 7.0),
    "index": lambda a, b: a[torch.arange(5, device=a.device)] + b[:5],
    "index_add": lambda a, b: a.index_add(0, torch.tensor([0, 3, 0], device=a.device), b[:3]),
    "nonzero": lambda a, b: torch.nonzero(a > b),
    "cumsum": lambda a, b: torch.cumsum(a * b, 1),
    "foreach": lambda a, b: torch.stack(torch._foreach_add([a, b], [b, a], alpha=2)),
    "layer_norm": lambda a, b: F.layer_norm(a, (16,), b[0], b[1]),
    "strided": lambda a, b: a[::2, 1::3] * b.T[::2, 1::3],
    "int": lambda a, b: (a * 100).to(torch.int64) % 7,
    "bfloat16": lambda a, b: (a.bfloat16() @ b.bfloat16()).float(),
}


class Grid(ctypes.Structure):
    _fields_ = (("x", ctypes.c_uint), ("y", ctypes.c_uint), ("z", ctypes.c_uint))


@pytest.mark.parametrize("name", OPERATIONS)
def test_an_operator_equals_the_cpus(any_schedule: EmulatedGpu, name: str) -> None:
    a, b = (torch.randn(16, 16, generator=torch.Generator().manual_seed(i)) for i in range(2))
    found = OPERATIONS[name](a.cuda(), b.cuda())
    assert found.is_cuda
    torch.testing.assert_close(found.cpu(), OPERATIONS[name](a, b), rtol=0, atol=0)


@pytest.mark.parametrize("draw", ["randn", "rand", "randint", "dropout", "uniform_", "bernoulli_", "randperm"])
def test_random_numbers_are_the_cpus(any_schedule: EmulatedGpu, draw: str) -> None:
    def numbers(device: str) -> list[Tensor]:
        torch.manual_seed(11)
        x = torch.zeros(4, 5, device=device)
        ways: dict[str, Callable[[], Tensor]] = {
            "randn": lambda: torch.randn(4, 5, device=device),
            "rand": lambda: torch.rand(7, device=device),
            "randint": lambda: torch.randint(100, (9,), device=device),
            "dropout": lambda: F.dropout(x + 1, 0.5),
            "uniform_": lambda: x.clone().uniform_(-1, 1),
            "bernoulli_": lambda: x.clone().bernoulli_(0.3),
            "randperm": lambda: torch.randperm(20, device=device),
        }
        return [ways[draw]().cpu() for _ in range(3)]

    for found, expected in zip(numbers("cuda"), numbers("cpu"), strict=True):
        assert torch.equal(found, expected)


def test_a_generator_that_is_put_back_gives_the_same_numbers(gpu: EmulatedGpu) -> None:
    torch.manual_seed(3)
    torch.randn(5, device="cuda")
    state = torch.cuda.get_rng_state()
    first, second = torch.randn(5, device="cuda"), torch.randn(5, device="cuda")
    torch.cuda.set_rng_state(state)
    assert torch.equal(first, torch.randn(5, device="cuda"))
    assert torch.equal(second, torch.randn(5, device="cuda"))


@pytest.mark.parametrize("fused", [True, False])
def test_a_few_steps_of_adamw_equal_the_cpus(any_schedule: EmulatedGpu, fused: bool) -> None:
    """Autograd's device thread, cross entropy, and the optimizer's kernel over lists of tensors."""

    def weights(device: str) -> list[Tensor]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.SiLU(), torch.nn.Linear(16, 4)).to(device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=fused, foreach=None if fused else True)
        for step in range(3):
            x = torch.randn(6, 8, generator=torch.Generator().manual_seed(step)).to(device)
            loss = F.cross_entropy(model(x), torch.arange(6, device=device) % 4)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        return [parameter.detach().cpu() for parameter in model.parameters()]

    for found, expected in zip(weights("cuda"), weights("cpu"), strict=True):
        assert torch.equal(found, expected)


def test_a_kernel_that_nothing_stands_for_is_refused(gpu: EmulatedGpu, capfd: pytest.CaptureFixture[str]) -> None:
    """Never wrong numbers in silence."""
    cuda, grid = Cuda(), Grid(1, 1, 1)
    assert cuda.call("cudaLaunchKernel", ctypes.c_void_p(1), grid, grid, None, ctypes.c_size_t(0), LEGACY) == 801
    assert "was launched outside of an operator that is emulated" in capfd.readouterr().err
    cuda.call("cudaGetLastError")
