"""The same training on a CPU and on a GPU, by how wrong bf16 itself is."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from gpu_sizes import SHORTER

from memo import Trainer
from memo.executor.pieces import add_weight_gradient

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

RUN: dict[str, Any] = {
    "mock_data": True,
    "seq_length": 256 // SHORTER,
    "micro_batch_size": 2,
    "train_iters": 4,
    "lr": 1e-3,
    "memory_planner": "off",
}
STEPS = 3


def figures(device: str, dtype: str, **run: Any) -> list[tuple[float, float]]:
    """Loss and gradient norm of each step."""
    trainer = Trainer(**RUN, **run, device=device, params_dtype=dtype, profile_cache="off", progress=False)
    return [(record.lm_loss, record.grad_norm) for record in (trainer.step() for _ in range(STEPS))]


def error(found: list[tuple[float, float]], exact: list[tuple[float, float]]) -> list[float]:
    """Of losses and of gradient norms: the largest, relative to the exact value."""
    return [max(abs(f[i] - e[i]) / abs(e[i]) for f, e in zip(found, exact, strict=True)) for i in range(2)]


@pytest.mark.parametrize("kernels", ["torch", "triton"])
@pytest.mark.parametrize("alpha", ["off", 0.5])
@pytest.mark.parametrize("model", ["gpt-tiny", "llama-tiny"])
def test_gpu_is_as_exact_as_cpu(model: str, alpha: str | float, kernels: str) -> None:
    """bf16 against fp64 on a CPU. Bound: three times the error of bf16 on a CPU, or four roundings of bf16."""
    if kernels == "triton":
        pytest.importorskip("triton", reason="Triton is not installed")
    exact = figures("cpu", "fp64", model=model, offload_alpha=alpha)
    cpu = error(figures("cpu", "bf16", model=model, offload_alpha=alpha), exact)
    gpu = error(figures("cuda", "bf16", model=model, offload_alpha=alpha, kernels=kernels), exact)
    floor = 4 * torch.finfo(torch.bfloat16).eps
    assert [g <= max(3 * c, floor) for g, c in zip(gpu, cpu, strict=True)] == [True, True], (gpu, cpu)


def test_weight_gradients_of_tiles_are_not_rounded_before_they_are_summed() -> None:
    """Sums over 8 tiles of bf16 factors, in fp32: 1e-5 from fp64, which narrow products miss by 100 times as much."""
    torch.manual_seed(0)
    linear = torch.nn.Linear(48, 64, bias=False, device="cuda", dtype=torch.bfloat16)
    main = torch.zeros(64, 48, device="cuda")
    sink = SimpleNamespace(main_gradient=lambda parameter: main)
    exact, narrow = torch.zeros(64, 48, dtype=torch.float64), torch.zeros(64, 48)
    for _ in range(8):
        grad = torch.randn(96, 1, 64, device="cuda", dtype=torch.bfloat16)
        x = torch.randn(96, 1, 48, device="cuda", dtype=torch.bfloat16)
        add_weight_gradient(sink, linear, grad, x)
        left, right = grad[:, 0].cpu().t(), x[:, 0].cpu()
        exact += left.double() @ right.double()
        narrow += left @ right
    far = [float((sums.cpu() - exact).abs().max() / exact.abs().max()) for sums in (main, narrow)]
    assert far[0] < 1e-5 and far[1] > 100 * far[0], far
