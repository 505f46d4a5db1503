"""The trainer on a GPU: it learns, and swapping at any alpha changes no bit of the loss."""

import pytest
import torch
from gpu_sizes import SHORTER

from memo import Trainer

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

STEPS = 5


def losses(**overrides: object) -> list[float]:
    trainer = Trainer(
        "llama-tiny",
        mock_data=True,
        vocab_size=1024,
        seq_length=1024 // SHORTER,
        micro_batch_size=2,
        train_iters=STEPS,
        lr=3e-3,
        device="cuda",
        attention_backend="flash",  # deterministic, unlike cuDNN's backward
        **overrides,
    )
    return [trainer.step().lm_loss for _ in range(STEPS)]


@pytest.fixture(autouse=True)
def deterministic() -> None:
    torch.use_deterministic_algorithms(True, warn_only=True)


def test_loss_falls_without_swapping() -> None:
    plain = losses(plan="off")
    assert plain[-1] < plain[0]


@pytest.mark.parametrize("policy", ["auto", "paper"])
def test_every_alpha_gives_the_same_losses(policy: str) -> None:
    runs = [losses(plan=alpha, offload_policy=policy) for alpha in (0.0, 0.125, 0.5, 1.0)]
    assert all(run == runs[0] for run in runs[1:])
