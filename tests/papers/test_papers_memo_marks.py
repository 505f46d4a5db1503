"""MEMO's printed marks of memory, at the printed strategies, through benchmarks/paper_marks.py."""

from dataclasses import replace
from typing import Any

import paper_marks as marks
import pytest

from memo.config import preset
from memo.estimate.cases import Case, read_case
from memo.estimate.rank_memory import rank_memory
from memo.estimate.verdict import Verdict
from memo.papers import memo_paper
from memo.papers.memo_paper import host_bytes
from memo.papers.methods import answer_by_paper
from memo.spec.shapes import shape_of
from memo.units import GIB


def missed() -> dict[tuple[str, str, int], str]:
    found = {}
    for mark in (*marks.table7(), *marks.table4()):
        says = marks.WORDS[mark.of_the_paper()[0]]
        if says != mark.printed:
            found[mark.source, mark.model, mark.seq_k] = says
    return found


def test_all_marks_but_two() -> None:
    """48 of table 7 (three oom, one oohm) and 16 of table 4 (two oom, five oohm); none is called unsure."""
    printed = [mark.printed for mark in (*marks.table7(), *marks.table4())]
    assert {word: printed.count(word) for word in set(printed)} == {"ok": 53, "oom": 5, "oohm": 6}
    assert missed() == {("table 7", "65B", 128): "oom", ("table 7", "30B", 1408): "ok"}
    assert set(missed()) == set(marks.EXPLAINED)


def test_what_is_said_of_the_two() -> None:
    large = next(m for m in marks.table7() if (m.model, m.seq_k) == ("65B", 128))
    config = large.config
    rank = rank_memory(config, shape_of(config.model, "", 128 << 10), 64, 0, moved=0.0)
    assert (rank.weights + rank.gradients) / GIB == pytest.approx(91, abs=0.5)
    assert replace(large, layout=(8, 2, 1)).of_the_paper()[0] == Verdict.FITS
    model, tokens = preset("gpt-30b"), 1408 << 10
    node = [8 * host_bytes(model, tokens, alpha, 8, 4, powers_of_two=True) / 1e12 for alpha in (0.0, 0.125, 0.25)]
    assert node[0] == pytest.approx(0.79, abs=0.005) and node[1] < 2 < node[2]


@pytest.mark.parametrize(("logit_bytes", "wrong"), [(7.2, 3), (8.4, 7), (10, 9)])
def test_marks_tell_what_a_logit_takes(logit_bytes: float, wrong: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """10, as in Megatron-LM (memo.estimate.rank_memory), would have let 7B stop at 768K; the bounds stated hold."""
    monkeypatch.setattr(memo_paper, "LOGIT_BYTES", logit_bytes)
    assert len(missed()) == wrong


def test_memos_own_loss_fits_where_the_papers_does_not() -> None:
    """Chunked, 7B goes on beyond 1,024K tokens on 8 GPUs in 46 GiB, and host memory in one slab also at 384K."""
    own: dict[Any, tuple[Verdict, int, int]] = {
        (mark.source, mark.model, mark.seq_k): mark.of_memo() for mark in (*marks.table7(), *marks.table4())
    }
    refused = {key for key, (verdict, _, _) in own.items() if verdict != Verdict.FITS}
    assert refused == {
        ("table 7", "65B", 128),
        ("full_swap+plan", "7B", 896),
    }
    assert own["table 7", "7B", 1408][1] / GIB == pytest.approx(45.85, abs=0.1)


def test_host_memory_runs_out_before_the_loss() -> None:
    """Full swapping at 896K: neither memory would do, and forward fills the host's."""
    swapped = next(m for m in marks.table4() if m.source == "full_swap+plan" and m.seq_k == 896)
    verdict, gpu, host = swapped.of_the_paper()
    assert verdict == Verdict.OOHM and gpu > 80 * GIB and host > 2e12


def case(seq_k: int, **cells: str) -> Case:
    """7B on 8 A800 with tp 4 and cp 2, as most of table 7 has it."""
    given = {"method": "paper-alpha", "model": "gpt-7b", "seq_len": str(seq_k << 10), "hardware": "a800-80"}
    return read_case({**given, "tp": "4", "cp": "2", "gpus": "8", **cells}, "here")


def test_a_printed_alpha_gives_the_marks_account() -> None:
    mark = next(mark for mark in marks.table7() if (mark.model, mark.seq_k) == ("7B", 384))
    said = answer_by_paper(case(384, alpha=str(mark.alpha), global_batch_size="16"))
    _, gpu_bytes, host = mark.of_the_paper()
    assert (said.total_bytes, said.host_bytes) == (gpu_bytes, host) and "alpha 0.5, as given" in said.bound


@pytest.mark.parametrize(
    ("seq_k", "alpha", "limit"),
    [(64, "0.", "link (offload)"), (256, "1,", "nothing"), (768, "0.375,", "host memory")],
)
def test_alpha_by_the_papers_equations(seq_k: int, alpha: str, limit: str) -> None:
    """Short sequences wait for the link, long ones for host memory, whose pinned blocks are powers of two."""
    said = answer_by_paper(case(seq_k))
    assert said.bound.startswith(f"alpha {alpha}") and f"limited by {limit}" in said.bound
    assert said.host_bytes <= 2048 * GIB


@pytest.mark.parametrize(
    ("changed", "verdict", "says"),
    [
        ({"offload_gb_per_s": 1.0}, Verdict.FITS, "link (offload)"),
        ({"host_memory_gib": 64}, Verdict.OOHM, "host memory"),
    ],
)
def test_where_no_alpha_meets_the_equations_it_is_0_and_says_why(
    changed: dict[str, float], verdict: Verdict, says: str
) -> None:
    asked = case(256, **{"host_memory_gib": "64"} if "host_memory_gib" in changed else {})
    said = answer_by_paper(replace(asked, hardware=replace(asked.hardware, **changed)))
    assert said.bound.startswith("alpha 0, equations 1 to 3 allow none (") and says in said.bound
    assert said.verdict == verdict
