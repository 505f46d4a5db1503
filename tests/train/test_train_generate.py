"""trainer.generate: what a model that has learnt to count writes, in any layout, and what it refuses."""

from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from trainers import SMALL_RUN

import memo
from memo.data.sample import Sample, cut_sample
from memo.errors import ConfigError
from memo.train.generate import Sampling, _draw

SIZES: dict[str, Any] = {**SMALL_RUN, "seq_length": 32, "profile_cache": "off"}
SIZES |= {"params_dtype": "fp64", "vocab_size": 16, "train_iters": 60, "num_query_groups": 2}
SWEPT: dict[str, Any] = {"offload_alpha": 0.5, "offload_tiles": 4, "offload_granularity": "tile"}
LAYOUTS: list[Any] = [
    (2, {"tp": 2}),
    pytest.param(2, {"pp": 2}, marks=pytest.mark.full),
    pytest.param(1, SWEPT, marks=pytest.mark.full),
    pytest.param(2, {"tp": 2, "offload_alpha": 0.5, "offload_tiles": 4}, marks=pytest.mark.full),
    pytest.param(2, {"cp": 2}, marks=pytest.mark.full),
    pytest.param(2, {}, marks=pytest.mark.full),
    pytest.param(4, {"tp": 2, "cp": 2}, marks=pytest.mark.full),
]
PROMPTS = ([3, 4, 5], [9], [14, 15])


class Counting:
    """Each sample counts upward from its index, modulo 16."""

    seq_length = 32

    def sample(self, index: int) -> Sample:
        window = (index + np.arange(self.seq_length + 1)) % 16
        return cut_sample(window, np.array([], dtype=int))


def written(layout: dict[str, Any], steps: int = 5) -> tuple[Any, Any, float]:
    """What three prompts are continued with after some steps, greedily and drawn, and a later loss."""
    with memo.Trainer("llama-tiny", train_data=Counting(), **{**SIZES, **layout}) as trainer:
        for _ in range(steps):
            trainer.step()
        greedy = trainer.generate(PROMPTS, 3)
        drawn = trainer.generate(PROMPTS, 3, temperature=5.0, seed=5)
        if dist.get_world_size() == 1:
            assert trainer.generate(PROMPTS[0], 3) == greedy[0], "a prompt alone"
            assert trainer.generate(PROMPTS, 3, temperature=5.0, seed=5) == drawn, "the same seed"
            assert trainer.generate(PROMPTS, 3, temperature=5.0, top_k=1, seed=5) == greedy
        return greedy, drawn, trainer.step().lm_loss


@pytest.fixture(scope="module")
def alone() -> tuple[Any, Any, float]:
    (found,) = run_ranks(1, written, {})
    return found


def test_what_was_learnt_is_written() -> None:
    ((greedy, drawn, _),) = run_ranks(1, written, {}, 25)
    assert greedy == [[(prompt[-1] + i) % 16 for i in range(1, 4)] for prompt in PROMPTS]
    assert drawn != greedy


@pytest.mark.parametrize(("world_size", "layout"), LAYOUTS, ids=str)
def test_every_layout_writes_the_same(world_size: int, layout: dict[str, Any], alone: tuple[Any, Any, float]) -> None:
    greedy, drawn, loss = alone
    for found in run_ranks(world_size, written, layout):
        assert found[:2] == (greedy, drawn)
        assert found[2] == pytest.approx(loss, rel=1e-9)


def test_text_in_and_text_out() -> None:
    with memo.Trainer("llama-tiny", mock_data=True, tokenizer="byte", **{**SIZES, "vocab_size": None}) as trainer:
        text = trainer.generate("On a ", 4)
        assert isinstance(text, str)
        ids = trainer.generate(list(b"On a "), 4)
        assert bytes(token for token in ids if token < 256).decode("utf-8", errors="replace") == text


@pytest.mark.parametrize(
    ("prompt", "how", "message"),
    [
        ("text", {}, r"no tokenizer: give --tokenizer .*, or token ids in Python"),
        ([], {}, r"0 prompts, but --global-batch-size is 4: give 1 to 4"),
        ([[1]] * 5, {}, r"5 prompts, but --global-batch-size is 4"),
        ([16], {}, r"token ids from 16 to 16, but --vocab-size is 16"),
        ([1] * 30, {"max_new_tokens": 3}, r"30 tokens and --max-new-tokens 3 .* 32 together: give .* 2 or less"),
        ([1] * 32, {}, r"--seq-length 32 together: give a shorter prompt or a longer --seq-length"),
        ([1], {"temperature": -1.0}, r"--temperature is -1.0: give 0"),
        ([1], {"top_p": 0.0}, r"--top-p is 0.0: give a share"),
        ([1], {"max_new_tokens": 0}, r"--max-new-tokens is 0: give 1"),
    ],
)
def test_what_cannot_be_continued_is_refused(
    refusing: memo.Trainer, prompt: Any, how: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        refusing.generate(prompt, **{"max_new_tokens": 1, **how})


@pytest.fixture(scope="module")
def refusing() -> Any:
    with memo.Trainer("llama-tiny", train_data=Counting(), **SIZES) as trainer:
        yield trainer


def test_draws_follow_the_probabilities_that_are_left() -> None:
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05], dtype=torch.float64).log()

    def shares(**how: Any) -> list[float]:
        generator, sampling = torch.Generator().manual_seed(0), Sampling(temperature=1.0, **how)
        drawn = torch.tensor([_draw(logits, sampling, generator) for _ in range(1000)])
        found: list[float] = (torch.bincount(drawn, minlength=4) / 1000).tolist()
        return found

    within = 0.05  # three standard deviations of a share of 1,000 draws
    assert shares() == pytest.approx([0.5, 0.3, 0.15, 0.05], abs=within)
    for how in ({"top_k": 2}, {"top_p": 0.6}):
        assert shares(**how) == pytest.approx([0.625, 0.375, 0.0, 0.0], abs=within)
        assert shares(**how)[2:] == [0.0, 0.0]
    assert shares(top_p=0.5) == [1.0, 0.0, 0.0, 0.0]
