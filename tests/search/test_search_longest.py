"""The longest sequence that fits: the next one does not, and the reason is named."""

import json
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest

from memo.config.checks import check
from memo.config.derived import SLOT_TILES, SWEPT_TOKENS
from memo.search.candidates import SHARDINGS, Layout, config_of
from memo.search.launch import run_of
from memo.search.longest import length_unit, longest
from memo.search.placed import placed
from memo.search.planning import answer, plan
from memo.search.question import Question, ask
from memo.search.ranking import search
from memo.search.sweeping import sweeps
from memo.spec.sweep import WHOLE


@pytest.mark.parametrize(
    ("model", "gpus", "changes", "binds"),
    [
        # All recompute attention.
        pytest.param("gpt-7b", 8, {"gpu_memory_gib": 55}, "GPU memory: 5", marks=pytest.mark.full),
        pytest.param("llama-3.1-8b", 8, {"host_memory_gib": 400}, "GPU memory: 79", marks=pytest.mark.full),
        ("llama-3.1-8b", 6, {"gpu_memory_gib": 60}, "GPU memory: 59.51"),  # hidden states in host memory
    ],
)
def test_the_next_length_does_not_fit(model: str, gpus: int, changes: dict[str, float], binds: str) -> None:
    question = ask(model, gpus, global_batch_size=gpus, place_states="never", **changes)  # type: ignore[arg-type]
    found = longest(question)
    assert found.seq_len > 0 and found.seq_len % found.unit == 0
    assert search(question.at_length(found.seq_len), top=1).best is not None
    for units in (1, 5):
        assert search(question.at_length(found.seq_len + units * found.unit), top=1).best is None
    assert found.limit.startswith(binds) and f"with {found.seq_len + found.unit:,} tokens under tp" in found.limit


def test_more_memory_never_shortens_it() -> None:
    question = ask("gpt-7b", 2, global_batch_size=2)
    lengths = [longest(replace(question, gpu_memory_gib=float(gib))).seq_len for gib in (40, 80, 141)]
    assert lengths == sorted(lengths) and lengths[0] < lengths[-1]


def test_a_table_of_positions_ends_it(tmp_path: Path) -> None:
    values = {"n_embd": 768, "n_layer": 12, "n_head": 12, "n_positions": 5000, "vocab_size": 50257}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2", **values}))
    question: Question = ask(str(tmp_path), 8, seq_len=1024)
    found = longest(question)
    assert (found.seq_len, found.limit) == (4096, "the model's table of 5,000 positions")
    assert found.unit == 1024


def test_it_must_be_fast_enough() -> None:
    """At 128K tokens a GPU trains some 3,000 tokens a second, and fewer the longer the sequence is."""
    question = ask("llama-3.1-8b", 2, global_batch_size=2, hardware="h200", place_states="never")
    found = answer(question, "max-seq-len", min_tgs=3000.0, top=1)
    assert found.longest is not None and found.best is not None and found.longest.seq_len < longest(question).seq_len
    assert found.best.step.tgs >= 3000.0
    next_seq_len = found.longest.seq_len + found.longest.unit
    beyond = search(question.at_length(next_seq_len), top=1).best
    assert beyond is not None and beyond.step.tgs < 3000.0
    assert f"{next_seq_len:,} tokens train at no more than {beyond.step.tgs:,.0f} tokens" in found.longest.limit
    never = answer(question, "max-seq-len", min_tgs=1e6).longest
    assert never is not None and never.seq_len == 0 and "all lengths train at no more than" in never.limit


def test_states_may_move_for_a_longer_sequence() -> None:
    """Adam's states of 4 billion parameters take most of one GPU, which has room for more than half a million tokens
    without them: also where shorter sequences fit with them."""
    question = ask("qwen3.5-4b", 1, global_batch_size=1)
    auto, never = (longest(replace(question, place_states=when)) for when in ("auto", "never"))
    assert 0 < never.seq_len < 2**19 < auto.seq_len and " binds: " in auto.limit
    best = search(question.at_length(auto.seq_len), top=1).best
    assert best is not None and best.strategy.placement is not None
    assert search(question.at_length(auto.seq_len + auto.unit), top=1).best is None


def test_nothing_fits() -> None:
    found = plan("llama-3.1-70b", 2, objective="max-seq-len", place_states="never")
    assert found.longest is not None and found.longest.seq_len == 0 and found.best is None
    assert found.longest.limit.startswith("GPU memory: ")


def test_swept_layers_reach_a_million_tokens_on_one_gpu() -> None:
    """Where slots that hold layers do not fit; what is written runs with slots of a few tiles, large ones as these fit
    as well."""
    question = ask("llama-3.1-8b", 1, seq_len=1 << 20, hardware="h100-80", host_memory_gib=1024, global_batch_size=1)
    best = search(question, top=1).best
    assert best is not None and best.strategy.sweep.tiles == 32
    memory = run_of(question, best).memory
    assert (memory.offload_granularity, memory.offload_tiles, memory.offload_slot_tiles) == ("tile", 32, SLOT_TILES)
    whole = best.strategy._replace(sweep=WHOLE)
    assert all(placed(question, best.layout, whole._replace(sharding=sharding)) is None for sharding in SHARDINGS)


def test_layers_are_swept_under_cp_but_in_rings() -> None:
    """Tiles are as long on a rank as without cp, and what is planned passes the rules of a run."""
    question = ask("llama-3.1-8b", 64, seq_len=30 << 20, hardware="h100-80")
    for kind, expected in {"all_gather": True, "a2a": True, "p2p": False, "a2a+p2p": False}.items():
        layout = Layout(tp=2, cp=4, cp_comm_type=kind)  # type: ignore[arg-type]  # keys of a dict
        found = list(sweeps(question, layout, 0.0))
        assert bool(found) is expected, kind
        for strategy in found:
            check(config_of(question, layout, strategy).override({"mock_data": True}), 64)
        sizes = [question.seq_len // layout.cp // strategy.sweep.tiles for strategy in found]
        assert tuple(dict.fromkeys(sizes)) == (SWEPT_TOKENS if expected else ())


@pytest.mark.parametrize(("gpu_memory_gib", "tokens"), [(29, 32768), (28, 16384), (27, 4096)])
def test_tiles_are_as_large_as_memory_allows(gpu_memory_gib: float, tokens: int) -> None:
    """Larger ones take less time and more memory. So the largest that fit are the fastest."""
    length, gpus = 2 << 20, 8
    question = ask("llama-3.1-8b", gpus, seq_len=length, hardware="h100-80", gpu_memory_gib=gpu_memory_gib)
    best = search(replace(question, place_states="never"), top=1).best
    assert best is not None and best.layout == Layout(tp=gpus)
    assert length // best.strategy.sweep.tiles == tokens


@pytest.mark.full
def test_sixty_four_gpus_sweep_under_cp() -> None:
    """More tokens fit than with whole layers, which reach 32M."""
    found = plan("llama-3.1-8b", 64, objective="max-seq-len", hardware="h100-80", host_memory_gib=2048)
    assert found.longest is not None and found.longest.seq_len > 35 << 20
    assert found.best is not None and found.best.strategy.sweep.tiles
    assert found.best.layout == Layout(tp=8, cp=8, cp_comm_type="all_gather")


def test_a_unit_that_every_layout_divides() -> None:
    for gpus in (1, 6, 8, 48, 4096):
        unit = length_unit(gpus)
        assert unit % 1024 == 0
        assert all(unit % (2 * part * 8) == 0 for part in range(1, gpus + 1) if gpus % part == 0)


def test_hidden_states_leave_the_gpu_only_where_it_lacks_room() -> None:
    """On small GPUs beside much host memory they allow longer sequences; shorter ones keep them on the GPU."""
    question = ask("llama-3.1-8b", 2, global_batch_size=1, host_memory_gib=8192, place_states="never")
    question = replace(question, gpu_memory_gib=90.0)
    found = longest(question)
    best = search(question.at_length(found.seq_len), top=1).best
    assert best is not None and best.strategy.sweep.hidden_on_host
    assert "hidden states in host memory" in str(best.strategy)
    assert run_of(question.at_length(found.seq_len), best).memory.offload_hidden_states
    shorter = search(question.at_length(found.seq_len // 4), top=1).best
    assert shorter is not None and not shorter.strategy.sweep.hidden_on_host
    with patch("memo.search.sweeping._fits_on_device", lambda *_: True):
        assert longest(question).seq_len < 0.9 * found.seq_len
