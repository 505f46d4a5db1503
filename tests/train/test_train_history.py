"""What train() returns, and stop(): records that plot themselves, and callbacks that end a run on all ranks at once."""

import contextlib
import dataclasses
import io
import sys
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from pages import Page
from ranks import run_ranks
from trainers import SMALL_RUN

import memo
from memo.artifacts.run_log import StepRecord
from memo.train import history as histories
from memo.train.history import History

RUN: dict[str, Any] = {**SMALL_RUN, "mock_data": True}


def record(iteration: int, loss: float = 1.0) -> StepRecord:
    values = {field.name: 0 for field in dataclasses.fields(StepRecord)}
    return StepRecord(**{**values, "iteration": iteration, "lm_loss": loss})  # type: ignore[arg-type]


def test_train_returns_its_records_and_the_attributes_of_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[StepRecord] = []
    with memo.Trainer("gpt-tiny", train_iters=4, eval_interval=2, eval_iters=1, callbacks=[seen.append], **RUN) as run:
        history = run.train()
        assert history.records == seen == list(history) and len(history) == 4
        assert history.last is seen[-1] and history[0] is seen[0]
        assert (history.iteration, history.lm_loss, history.tgs) == (4, seen[-1].lm_loss, seen[-1].tgs)
        assert [step for step, _ in history.evaluations] == [2, 4]
        assert history.to_dicts() == [dataclasses.asdict(each) for each in seen]
        nothing = run.train()  # all steps are taken
    assert not nothing and nothing.last is None and repr(nothing) == "History of no steps"
    with pytest.raises(AttributeError, match=r"lm_loss is of the last step, but train\(\) took none"):
        nothing.lm_loss  # noqa: B018
    with pytest.raises(AttributeError, match="no attribute 'loss'"):
        history.loss  # noqa: B018
    text = f"steps 1 to 4: loss {seen[0].lm_loss:.4f} to {seen[-1].lm_loss:.4f}"
    assert text in repr(history) and f"<p>{nothing!r}</p>" == nothing._repr_html_()
    drawn = Page(history._repr_html_())
    assert text in drawn.texts[0] and len(drawn.images()) == 1
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    told = Page(history._repr_html_())
    assert text in told.texts[0] and "pip install 'memo-train[report]'" in told.texts[1] and not told.images()


def test_a_long_run_keeps_every_second_record_and_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(histories, "_MOST", 8)
    history = History()
    for iteration in range(1, 31):
        history.add(record(iteration))
        assert history.iteration == iteration and len(history) <= 9
    kept = [each.iteration for each in history]
    assert kept == [1, 5, 9, 13, 17, 21, 25, 29, 30]


def stop_on_one_rank(save: str) -> tuple[int, bool, list[int], str]:
    """One of two ranks asks after its third step; also what rank 0 prints."""
    seen: list[int] = []

    def watch(each: StepRecord) -> None:
        seen.append(each.iteration)
        if each.iteration == 3 and dist.get_rank() == dist.get_world_size() - 1:
            trainer.stop("the loss is low enough")

    with memo.Trainer("gpt-tiny", train_iters=100, save=save, callbacks=[watch], **RUN) as trainer:
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            history = trainer.train()
        return history.iteration, trainer.was_stopped, seen, printed.getvalue()


@pytest.mark.parametrize(("world_size", "who"), [(1, "the loss is low enough"), (2, "a signal or stop() on another")])
def test_stop_on_one_rank_ends_all_ranks_after_the_same_step(tmp_path: Path, world_size: int, who: str) -> None:
    found = run_ranks(world_size, stop_on_one_rank, str(tmp_path / "run"))
    assert [rest for *rest, _ in found] == [[4, True, [1, 2, 3, 4]]] * world_size
    assert (tmp_path / "run" / "iter_0000004").is_dir()
    assert f"stopped by {who}" in found[0][-1] and " at iteration 4 of 100" in found[0][-1]
