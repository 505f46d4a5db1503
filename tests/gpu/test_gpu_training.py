"""The trainer on a GPU: it learns, and swapping at any alpha changes no bit of the loss."""

import pytest
import torch
from gpu_sizes import SHORTER

from memo import Trainer
from memo.errors import ConfigError

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

STEPS = 5


def losses(**overrides: object) -> list[float]:
    return train(**overrides)[0]


def train(**overrides: object) -> tuple[list[float], torch.Tensor, str]:
    """Losses, the weights after them, and the attention kernels."""
    trainer = Trainer(
        "llama-tiny",
        mock_data=True,
        vocab_size=1024,
        seq_length=1024 // SHORTER,
        micro_batch_size=2,
        train_iters=STEPS,
        lr=3e-3,
        device="cuda",
        deterministic=True,
        **overrides,
    )
    found = [trainer.step().lm_loss for _ in range(STEPS)]
    weights = [p.detach().flatten() for chunk in trainer.parts.chunks for p in chunk.parameters()]
    return found, torch.cat(weights), trainer.config.hardware.attention_backend


def test_two_runs_have_the_same_bits() -> None:
    """cuDNN, which newer GPUs prefer, is left out: its backward adds in no fixed order."""
    (first, weights, backend), (second, others, _) = train(plan=0.5), train(plan=0.5)
    assert first == second and torch.equal(weights, others)
    assert backend != "cudnn"
    with pytest.raises(ConfigError, match="--attention-backend cudnn conflicts with --deterministic"):
        train(attention_backend="cudnn")


def test_loss_falls_without_swapping() -> None:
    plain = losses(plan="off")
    assert plain[-1] < plain[0]


@pytest.mark.parametrize("policy", ["auto", "paper"])
def test_every_alpha_gives_the_same_losses(policy: str) -> None:
    runs = [losses(plan=alpha, offload_policy=policy) for alpha in (0.0, 0.125, 0.5, 1.0)]
    assert all(run == runs[0] for run in runs[1:])
