"""--save-interval-minutes: when checkpoints are written, that all ranks agree, and which of them stay."""

import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist
from ranks import run_ranks
from torch import Tensor
from trainers import tiny_trainer

import memo
from memo.checkpoint.directory import whole_checkpoints
from memo.checkpoint.run_state import read_state
from memo.config import RunConfig
from memo.config.derived import resolved_save_interval_minutes
from memo.train import agreement, persistence

STEP_MINUTES = 12.0


def iterations(folder: Path) -> list[int]:
    return [read_state(path).iteration for path in whole_checkpoints(folder)]


class Killed(Exception):
    pass


def saves(
    folder: Path, minutes: tuple[float, ...] = (STEP_MINUTES,), killed_in: int = 0, **overrides: Any
) -> list[int]:
    """The iterations at which a run of 9 steps saves, as this rank sees it.

    Its clock advances by what `minutes` says of the rank after each step, and not otherwise. Raises Killed in step
    `killed_in`, before that step would save.
    """
    rank = dist.get_rank()
    clock, found = SimpleNamespace(now_s=0.0), list[int]()
    persistence.time = SimpleNamespace(monotonic=lambda: clock.now_s)  # type: ignore[assignment]

    def advance(record: memo.StepRecord) -> None:
        clock.now_s += 60.0 * minutes[rank]
        if record.iteration == killed_in:
            raise Killed

    values = {"train_iters": 9, "save": str(folder), "load": str(folder), **overrides}
    with tiny_trainer(callbacks=[advance], **values) as made:
        save = made.persistence.save

        def noted(state: Any, *rest: Any) -> Path:
            found.append(state.iteration)
            return save(state, *rest)

        made.persistence.save = noted  # type: ignore[method-assign]
        made.train()
    return found


def test_the_clock_of_rank_0_decides_for_all(tmp_path: Path) -> None:
    """Steps of 12 minutes: half an hour is over in step 4, and after that checkpoint, of minute 48, in step 8."""
    for name, others_minutes in (("slow", 0.0), ("fast", 1e6)):
        folder = tmp_path / name
        assert run_ranks(2, saves, folder, (STEP_MINUTES, others_minutes)) == [[4, 8, 9]] * 2
        assert iterations(folder) == [9]  # each that time alone has asked for went when the next was whole


@pytest.mark.parametrize(
    ("flags", "saved", "left"),
    [
        ({"keep_latest_k": 2}, [4, 8, 9], [8, 9]),
        ({"async_save": True}, [4, 8, 9], [9]),
        ({"save_interval_minutes": 0.0}, [9], [9]),
        ({"save_interval_minutes": 90.0}, [9], [9]),  # step 9 is the last one, which is saved in any case
        ({"save_interval": 5}, [5, 9], [5, 9]),
        ({"save_interval": 5, "save_interval_minutes": 30.0}, [4, 5, 9], [5, 9]),
    ],
    ids=["of two", "beside", "never", "at the end", "by steps", "by both"],
)
def test_when_it_saves_and_what_stays(flags: dict[str, Any], saved: list[int], left: list[int], tmp_path: Path) -> None:
    assert run_ranks(1, saves, tmp_path, **flags) == [saved]
    assert iterations(tmp_path) == left
    assert not read_state(whole_checkpoints(tmp_path)[-1]).by_time


def _killed(folder: Path) -> list[int]:
    with pytest.raises(Killed):
        saves(folder, killed_in=6)
    return iterations(folder)


def test_a_run_goes_on_from_what_was_saved_by_time(tmp_path: Path) -> None:
    assert run_ranks(1, _killed, tmp_path) == [[4]]
    assert read_state(tmp_path / "iter_0000004").by_time
    assert run_ranks(1, saves, tmp_path) == [[8, 9]]
    assert iterations(tmp_path) == [9]  # also what an earlier start has saved by time


def test_no_step_sends_a_message_more(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    sent: list[int] = []

    def counted(x: Tensor, group: None, op: str = "sum") -> Tensor:
        sent.append(x.numel())
        return x

    with tiny_trainer(train_iters=3, save=str(tmp_path)) as made:
        monkeypatch.setattr(agreement, "all_reduce", counted)
        made.train()
    assert sent == [1, 4, 4, 4]  # before the first step, and with each: loss, stop, failure, save


def test_by_default_time_decides_where_there_is_a_place_and_no_number_of_steps() -> None:
    for save, steps, minutes in itertools.product((None, "runs/a"), (0, 5), (None, 0.0, 7.5)):
        config = RunConfig().override({"save": save, "save_interval": steps, "save_interval_minutes": minutes})
        default = 30.0 if save and not steps else 0.0
        assert resolved_save_interval_minutes(config) == (default if minutes is None else minutes)
