"""A whole model on the kernels: losses, norms and gradients of torch's, and every kernel has its caller.

Here they run in Triton's interpreter; tests/gpu/test_gpu_parity.py trains with them on a device.
"""

from collections import Counter
from collections.abc import Callable
from importlib import import_module
from typing import Any

import pytest
import torch
from layouts import Outcome, relative_error, tiny, train_here
from swapped_steps import profiled_once

pytest.importorskip("triton", reason="Triton is not installed")
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu trains with the kernels on the device")

BOTH_WAYS = {"norm", "add_norm", "activate", "logit_sums", "logit_gradient_"}


def trained(kernels: str, model: str, alpha: str | float, steps: int) -> Outcome:
    run: dict[str, Any] = {"num_layers": 3, "seq_length": 8, "loss_chunk_size": 5, "global_batch_size": 1}
    if alpha != "off":
        run |= {"offload_alpha": alpha, "offload_tiles": 2}
    run |= {"device": "auto", "kernels": kernels}  # a device that is named is checked: no user has the interpreter
    return train_here(tiny(model, "fp32", **run), 1, steps)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often each kernel's function was called, by name."""
    count: Counter[str] = Counter()

    def counted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            count[name] += 1
            return function(*args, **options)

        return call

    for folder, names in {
        "norm": ("norm", "add_norm"),
        "rope": ("rotate", "rotate_"),
        "activation": ("activate",),
        "cross_entropy": ("logit_sums", "logit_gradient_"),
    }.items():
        module = import_module(f"memo_kernels.{folder}.triton")
        for name in names:
            monkeypatch.setattr(module, name, counted(name, getattr(module, name)))
    return count


@pytest.mark.parametrize(
    ("model", "alpha", "rotation"),
    [
        ("gpt2-tiny", "off", set()),  # LayerNorm, GELU, no RoPE
        ("llama-tiny", "off", {"rotate_"}),
        ("llama-tiny", 0.5, {"rotate_"}),
        ("qwen3-tiny", 0.5, {"rotate_"}),  # normed heads
    ],
)
@pytest.mark.parametrize("steps", [1, pytest.param(2, marks=pytest.mark.full)])
def test_training(model: str, alpha: str | float, rotation: set[str], steps: int, calls: Counter[str]) -> None:
    """fp32: losses at 1e-6, gradient norms at 1e-5, the first gradients at 1e-5 of a tensor's largest value."""
    with profiled_once():
        theirs = trained("torch", model, alpha, steps)
        assert not calls
        ours = trained("triton", model, alpha, steps)
    assert calls.keys() == BOTH_WAYS | rotation
    assert ours.losses == pytest.approx(theirs.losses, rel=1e-6, abs=0)
    assert ours.norms == pytest.approx(theirs.norms, rel=1e-5, abs=0)
    assert relative_error(ours.gradients, theirs.gradients) <= 1e-5
