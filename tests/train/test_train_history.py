"""What train() returns, and stop(): records that plot themselves, and callbacks that end a run on all ranks at once."""

import dataclasses
import math
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from ranks import run_ranks
from trainers import SMALL_RUN

import memo
from memo.artifacts.run_log import StepRecord
from memo.report.curve import curve_svg
from memo.train import history as histories
from memo.train.history import History

RUN: dict[str, Any] = {**SMALL_RUN, "mock_data": True}


def record(iteration: int, loss: float = 1.0) -> StepRecord:
    values = {field.name: 0 for field in dataclasses.fields(StepRecord)}
    return StepRecord(**{**values, "iteration": iteration, "lm_loss": loss})  # type: ignore[arg-type]


def test_train_returns_its_records_and_the_attributes_of_the_last() -> None:
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
    page = history._repr_html_()
    svg = ElementTree.fromstring(page[page.index("<svg") : page.index("</svg>") + 6])
    lines = [line.attrib["points"].split() for line in svg.iter("{http://www.w3.org/2000/svg}polyline")]
    assert [len(line) for line in lines] == [4, 2]
    assert f"steps 1 to 4: loss {seen[0].lm_loss:.4f} to {seen[-1].lm_loss:.4f}" in page


def test_points_of_a_curve_stand_where_their_values_are() -> None:
    svg = ElementTree.fromstring(curve_svg([("a < b", [(1, 4.0), (2, 2.0), (3, math.nan), (5, 3.0)])], "step", "loss"))
    (line,) = svg.iter("{http://www.w3.org/2000/svg}polyline")
    points = [tuple(map(float, point.split(","))) for point in line.attrib["points"].split()]
    (left, top), (second, bottom), (right, middle) = points
    assert second - left == pytest.approx((right - left) / 4, abs=0.1)
    assert middle == pytest.approx((top + bottom) / 2, abs=0.1) and top < bottom
    assert curve_svg([("none", [(1, math.inf)])], "step", "loss") == ""


def test_a_long_run_keeps_every_second_record_and_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(histories, "_MOST", 8)
    history = History()
    for iteration in range(1, 31):
        history.add(record(iteration))
        assert history.iteration == iteration and len(history) <= 9
    kept = [each.iteration for each in history]
    assert kept == [1, 5, 9, 13, 17, 21, 25, 29, 30]


def stop_on_one_rank(save: str) -> tuple[int, bool, list[int]]:
    """One of two ranks asks after its third step."""
    seen: list[int] = []

    def watch(each: StepRecord) -> None:
        seen.append(each.iteration)
        if each.iteration == 3 and dist.get_rank() == 1:
            trainer.stop("the loss is low enough")

    with memo.Trainer("gpt-tiny", train_iters=100, save=save, callbacks=[watch], **RUN) as trainer:
        history = trainer.train()
        return history.iteration, trainer.was_stopped, seen


def test_stop_on_one_rank_ends_all_ranks_after_the_same_step(tmp_path: Path) -> None:
    assert run_ranks(2, stop_on_one_rank, str(tmp_path / "run")) == [(4, True, [1, 2, 3, 4])] * 2
    assert (tmp_path / "run" / "iter_0000004").is_dir()


def test_stop_names_its_reason(capsys: pytest.CaptureFixture[str]) -> None:
    with memo.Trainer("gpt-tiny", train_iters=9, callbacks=[lambda _: trainer.stop("a callback")], **RUN) as trainer:
        assert trainer.train().iteration == 2
    assert "stopped by a callback at iteration 2 of 9" in capsys.readouterr().out
