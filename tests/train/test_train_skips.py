"""Weights and gradients that are not finite end a run, publish nothing, and never cost the last good checkpoint."""

import contextlib
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import contents
from ranks import run_ranks
from trainers import tiny_trainer

import memo
from memo.checkpoint.directory import latest_checkpoint, whole_checkpoints
from memo.errors import DivergenceError
from memo.parallel.main_gradients import MainGradients
from memo.train.entry import main
from memo.train.metrics import StepRecord

RANKS = pytest.mark.parametrize("world_size", [1, 2])


def trainer(folder: Path, callback: Callable[[StepRecord], None], **overrides: Any) -> memo.Trainer:
    values = {"save": str(folder), "load": str(folder), "save_interval": 1, "keep_latest_k": 1, "train_iters": 20}
    return tiny_trainer(callbacks=[callback], **{**values, **overrides})


def _with_a_moment_that_overflows(folder: Path, value: float, save: dict[str, bool]) -> str:
    """After iteration 3, on the last rank alone."""

    def spoil(record: StepRecord) -> None:
        if record.iteration == 3 and made.mesh.rank == made.mesh.grid.world_size - 1:
            _, kinds = made.parts.optimizer.segment_states()[-1]
            kinds["exp_avg_sq"][-1] = value

    made = trainer(folder, spoil, **save)
    with pytest.raises(DivergenceError) as caught, made:
        made.train()
    return str(caught.value)


@RANKS
@pytest.mark.parametrize(("value", "save"), [(float("nan"), False), (float("inf"), True)], ids=["plain", "beside"])
def test_what_is_not_finite_is_never_published(tmp_path: Path, world_size: int, value: float, save: bool) -> None:
    messages = run_ranks(world_size, _with_a_moment_that_overflows, tmp_path, value, {"async_save": save})
    assert len(set(messages)) == 1
    assert "iteration 3 is not saved, because values of exp_avg_sq/" in messages[0]
    assert f" on rank {world_size - 1} are not finite; older checkpoints are untouched: go on from one" in messages[0]
    assert [path.name for path in tmp_path.glob("iter_*")] == ["iter_0000002"]
    state, values = contents(latest_checkpoint(tmp_path))
    assert state.iteration == 2 and all(value.isfinite().all() for value in values.values())


def _gradients_overflow_after(made: memo.Trainer, iteration: int) -> None:
    norm = made.parts.data_parallel.main_gradients.norm

    def overflowing() -> torch.Tensor:
        return norm() * (float("inf") if made.iteration >= iteration else 1.0)

    made.parts.data_parallel.main_gradients.norm = overflowing  # type: ignore[method-assign]


def _train_with_overflow(folder: Path, iteration: int, **overrides: Any) -> tuple[str, int, int]:
    """(message, iteration, steps skipped) at the end."""
    made = trainer(folder, lambda _: None, **overrides)
    with made:
        _gradients_overflow_after(made, iteration)
        try:
            made.train()
        except DivergenceError as error:
            return str(error), made.iteration, made.state.consecutive_skips
        return "", made.iteration, made.state.consecutive_skips


@RANKS
def test_a_run_of_skipped_steps_ends_the_run_and_spares_the_checkpoint_before_it(
    tmp_path: Path, world_size: int
) -> None:
    """Skips count on from one start to the next."""
    run_ranks(world_size, _train_with_overflow, tmp_path, 3, max_consecutive_skips=5, train_iters=5)
    assert [path.name for path in whole_checkpoints(tmp_path)] == ["iter_0000003", "iter_0000005"]
    results = run_ranks(world_size, _train_with_overflow, tmp_path, 0, max_consecutive_skips=5)
    assert len(set(results)) == 1
    message, iteration, skips = results[0]
    assert (iteration, skips) == (8, 5)
    assert "iterations 4 to 8 were all skipped" in message and "--max-consecutive-skips is 5" in message
    assert "--load from a checkpoint before iteration 4" in message
    assert [path.name for path in whole_checkpoints(tmp_path)] == ["iter_0000003", "iter_0000007"]


def test_fewer_skips_or_no_limit_let_a_run_go_on(tmp_path: Path) -> None:
    ((message, iteration, skips),) = run_ranks(
        1, _train_with_overflow, tmp_path, 3, max_consecutive_skips=0, train_iters=15, save_interval=3
    )
    assert (message, iteration, skips) == ("", 15, 12)
    ((message, iteration, skips),) = run_ranks(1, _train_with_overflow, tmp_path, 99, train_iters=17)
    assert (message, iteration, skips) == ("", 17, 0)
    assert [path.name for path in whole_checkpoints(tmp_path)] == ["iter_0000017"]  # no run of skips any more


def _main_with_overflow(flags: list[str]) -> tuple[int | str | None, str]:
    norm = MainGradients.norm
    MainGradients.norm = lambda self: norm(self) * float("nan")
    with contextlib.redirect_stderr(io.StringIO()) as errors, pytest.raises(SystemExit) as caught:
        main(flags)
    return caught.value.code, errors.getvalue()


def test_the_command_fails_and_tells_it_in_one_line(tmp_path: Path) -> None:
    """With the default limit, from the first step on; nothing is saved at the end."""
    flags = (
        "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --vocab-size 61 --mock-data --seq-len 64 "
        "--train-iters 50 --device cpu --num-threads 1 --peak-tflops 1 --no-progress --max-step-minutes 1000 "
        f"--offload-alpha off --save {tmp_path}"
    )
    ((status, errors),) = run_ranks(1, _main_with_overflow, flags.split())
    assert status not in (0, None)
    assert errors.startswith("error: iterations 1 to 10 were all skipped") and errors.count("\n") == 1
    assert not whole_checkpoints(tmp_path)
