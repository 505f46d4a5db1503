"""The ranking is that of trying everything, nothing is chosen that does not surely fit, and refusals say why."""

from dataclasses import replace
from typing import Any

import pytest
from golden import golden_rows

from memo.estimate.verdict import Verdict
from memo.planner.problem import Limit
from memo.search.candidates import AUTO, FULL, GRID, KEEP, SELECTIVE, Layout, batches, exchanges, grids, pipelines
from memo.search.question import Question, ask
from memo.search.ranking import NOTHING_BINDS, Choice, Reason, evaluate, explain, search
from memo.simulate import StepPrediction, predict_step


def everything(question: Question) -> list[Choice]:
    """All candidates without pruning, bounds or order."""
    return [
        evaluate(question, way, strategy)
        for grid, why in grids(question)
        if not why
        for pipeline in pipelines(question, grid)
        for layout in batches(question, pipeline)
        for way in exchanges(question, layout)
        for strategy in (KEEP, SELECTIVE, FULL, AUTO)
    ]


@pytest.mark.parametrize(
    ("model", "seq_len", "memory_gib"),
    [("llama-3.1-8b", 8192, 94), ("gpt-7b", 1 << 18, 80), ("llama-3.1-8b", 1 << 17, 80)],
)
def test_the_ranking_is_that_of_trying_everything(model: str, seq_len: int, memory_gib: int) -> None:
    question = ask(
        model,
        4,
        seq_len=seq_len,
        global_batch_size=8,
        hardware="h100-80",
        gpu_memory_gib=memory_gib,
        host_memory_gib=900,
    )
    best: dict[tuple[int, int, int], float] = {}
    for choice in everything(question):
        if choice.sized.verdict == Verdict.FITS:
            key, step_s = (choice.layout.tp, choice.layout.cp, choice.layout.pp), choice.step.step_time_s
            best[key] = min(step_s, best.get(key, step_s))
    found = search(question, top=4).choices
    assert all(choice.sized.verdict == Verdict.FITS for choice in found)
    assert [c.step.tgs for c in found] == sorted((c.step.tgs for c in found), reverse=True)
    fastest = sorted(best.values())[:4]
    assert len(found) == len(fastest) > 1
    for choice, step_s in zip(found, fastest, strict=True):
        given = choice.strategy in GRID  # only tried where it beats auto
        assert (
            choice.step.step_time_s <= step_s if given else choice.step.step_time_s == pytest.approx(step_s, rel=1e-12)
        )


def test_few_of_the_candidates_are_simulated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory, then the bound, settle the others."""
    simulated: list[int] = []

    def counted(*args: Any) -> StepPrediction:
        simulated.append(1)
        return predict_step(*args)

    monkeypatch.setattr("memo.search.ranking.predict_step", counted)
    plan = search(ask("gpt-65b", 64, seq_len=1 << 18, global_batch_size=64), top=3)
    assert plan.num_candidates > 3000 and plan.num_fitting > 400
    assert len(simulated) < 20


def test_all_candidates_on_request() -> None:
    question = ask("gpt-7b", 4, seq_len=1 << 17, global_batch_size=4)
    plan = search(question, everything=True)
    assert len(plan.choices) == plan.num_fitting > 20
    assert len({(choice.layout, choice.strategy) for choice in plan.choices}) == len(plan.choices)
    assert {choice.strategy for choice in plan.choices} >= {AUTO, *GRID}
    assert plan.best == search(question).best


def test_keeping_everything_is_best_where_it_fits() -> None:
    plan = search(ask("llama-3.1-8b", 8, seq_len=2048, global_batch_size=64, hardware="h200"))
    assert plan.best is not None and plan.best.strategy == KEEP and plan.best.limit == NOTHING_BINDS
    assert plan.best.sized.host_bytes == 0 and plan.best.moved is None


def test_long_sequences_swap_and_name_what_binds() -> None:
    question = ask("gpt-7b", 8, seq_len=1 << 19, global_batch_size=16)
    best = search(question).best
    assert best is not None and best.strategy == AUTO and best.moved is not None
    assert 0 < best.sized.host_bytes <= 0.9 * question.room.host_bytes
    slow = replace(question, hardware=replace(question.hardware, offload_gb_per_s=0.5, prefetch_gb_per_s=0.5))
    swapped = evaluate(slow, best.layout, AUTO)
    assert swapped.limit == Limit.OFFLOAD and swapped.step.hidden_share < 1
    small = evaluate(replace(question, host_memory_gib=700.0), Layout(4, 2), AUTO)
    assert small.limit == Limit.HOST and small.sized.verdict == Verdict.FITS
    assert evaluate(replace(question, host_memory_gib=100.0), Layout(4, 2), AUTO).sized.verdict == Verdict.OOHM


def test_alpha_auto_fills_memory_and_never_more() -> None:
    """At whatever size, what is planned fits, and one more tile of anything would not, if memory is what binds."""
    question = ask("gpt-7b", 8, seq_len=1 << 20, global_batch_size=16)
    least_gib = evaluate(question, Layout(4, 2), GRID[0]).sized.memory.total / 2**30
    moved = []
    for share in (0.999, 1.001, 1.05, 1.1, 1.2):
        room = replace(question, gpu_memory_gib=share * least_gib / 0.985 / 0.98)
        choice = evaluate(room, Layout(4, 2), AUTO)
        assert choice.moved is not None and choice.sized.verdict == (Verdict.FITS if share > 1 else Verdict.UNSURE)
        moved.append(sum(choice.moved.values()))
        if choice.limit == Limit.DEVICE:
            assert choice.sized.gpu_excess > 0.9
    assert moved == sorted(moved) and moved[1] == 0 < moved[-1]


def test_unsure_is_shown_and_never_chosen() -> None:
    """A GPU whose memory lies just above what the only layout needs."""
    question = ask("gpt-7b", 8, seq_len=8192, global_batch_size=8)
    only = evaluate(question, Layout(8), KEEP).sized.memory.total / 2**30
    for usable, verdict in ((0.99, Verdict.UNSURE), (0.97, Verdict.FITS)):
        edge = replace(question, gpu_memory_gib=only / 0.985 / usable)
        assert evaluate(edge, Layout(8), KEEP).sized.verdict == verdict
    edge = replace(question, gpu_memory_gib=only / 0.985 / 0.99)
    plan = search(edge, everything=True)
    assert (Layout(8), KEEP) not in {(choice.layout, choice.strategy) for choice in plan.choices}
    assert all(choice.sized.verdict == Verdict.UNSURE for choice in plan.unsure)
    if plan.best is not None:
        assert all(choice.step.step_time_s < plan.best.step.step_time_s for choice in plan.unsure)


def test_refusals_one_by_one() -> None:
    question = ask("llama-3.1-8b", 8, seq_len=864 << 10, hardware="h100-80", host_memory_gib=400)
    refusals = {refused.layout: refused for refused in search(question).refusals}
    assert refusals[Layout()].reason == Reason.GPU
    assert "GiB needed, 77.22 GiB sure to fit" in refusals[Layout()].text
    host = [refused for refused in refusals.values() if refused.reason == Reason.HOST]
    assert host and all("GiB sure to fit (90% of a node's 400)" in refused.text for refused in host)
    plan = search(replace(question, gpus=3))
    texts = {refused.layout: refused.text for refused in plan.refusals}
    assert texts[Layout(3)].startswith("--num-attention-heads 32 does not divide by --tp 3")
    assert plan.counts()[Reason.LAYOUT] == 3 and plan.best is None  # tp 3, cp 3, pp 3


def test_micro_batches_beyond_one_that_does_not_fit_are_refused_with_it() -> None:
    question = ask("gpt-7b", 1, seq_len=1 << 20, global_batch_size=8)
    plan = search(question)
    assert [refused.layout.mbs for refused in plan.refusals] == [1, 2, 4, 8]
    assert plan.counts() == {Reason.GPU: 4}


def test_explaining_one_layout() -> None:
    question = ask("gpt-7b", 8, seq_len=1 << 18, global_batch_size=16)
    why, tried = explain(question, Layout(4, 2))
    assert not why and {choice.strategy for choice in tried} == {KEEP, SELECTIVE, FULL, AUTO, *GRID}
    times = [choice.step.step_time_s for choice in tried]
    assert times == sorted(times)
    why, tried = explain(question, Layout(3))
    assert (
        "--num-attention-heads 32" not in why and "8 ranks (world size) cannot hold whole copies" in why and not tried
    )


@pytest.mark.parametrize(
    ("table", "hardware"), [("p4d_table03_measured", "a100-40"), ("p4d_table04_measured", "h100-94")]
)
def test_the_first_choice_among_measured_layouts(table: str, hardware: str) -> None:
    """With the memory verdict applied it was measured within 5 % of the best one; in one column of eleven, 6 %."""
    rows = [row for row in golden_rows(table) if row["status"] != "not_run"]
    for gpus in sorted({int(row["gpus"]) for row in rows}):
        question = replace(
            ask("llama-3.1-8b", gpus, hardware=hardware, global_batch_size=1024), whole_logits=True
        )  # Megatron-LM's
        column = [row for row in rows if int(row["gpus"]) == gpus]
        ranked, unsure = [], []
        for row in column:
            layout = Layout(int(row["tp"]), int(row["cp"]), int(row["pp"]), mbs=int(row["mbs"]))
            choice = evaluate(question, layout, KEEP)
            if choice.sized.verdict == Verdict.FITS:
                ranked.append((choice.step.tgs, row))
            elif choice.sized.verdict == Verdict.UNSURE and row["status"] == "ok":
                unsure.append(float(row["tflops_per_gpu"]))
        chosen = max(ranked, key=lambda pair: pair[0])[1]
        measured = {row["tflops_per_gpu"]: row for row in column if row["status"] == "ok"}
        best = max(map(float, measured))
        lost = 1 - float(chosen["tflops_per_gpu"]) / best
        assert chosen["status"] == "ok"
        if (hardware, gpus) == ("a100-40", 8):  # 0.6 % above what surely fits, so the best is shown, but not chosen
            assert lost < 0.061 and unsure == [best]
        else:
            assert lost <= 0.05, (gpus, chosen)
