"""Traces on paper: against recordings of real steps, and a few layers against all of them."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from ranks import run_ranks
from trainers import SMALL_RUN

import memo
from memo.artifacts.memory_trace import Malloc, Trace, requests
from memo.config import RunConfig, preset
from memo.train import paper
from memo.train.paper import trace_on_paper

SWAP: dict[str, Any] = {"offload_alpha": 0.5, "offload_tiles": 2}
EXPERTS: dict[str, Any] = {"num_experts": 4, "moe_router_topk": 2, "moe_aux_loss_coeff": 1e-2}
BIG = 2048
"""Bytes; what is smaller differs between shapes alone and a real step (scalars, masks)."""


def run_config(**overrides: Any) -> RunConfig:
    base = {**SMALL_RUN, "vocab_size": 257, "params_dtype": "fp32", "offload_alpha": "off", "mock_data": True}
    return dataclasses.replace(RunConfig(), model=preset("llama-tiny")).override({**base, **overrides})


def recorded_on_rank(**overrides: Any) -> Trace:
    config = run_config(**overrides, memory_planner="paper", memory_planner_from="rehearsal", profile_cache="off")
    with memo.Trainer(config=config) as trainer:
        transients = trainer.parts.transients
        assert transients is not None and transients.planned is not None
        return transients.planned.trace


def by_phase(trace: Trace) -> dict[str, list[int]]:
    """Sizes of what is made in each phase, sorted."""
    return {
        str(phase): sorted(e.num_bytes for e in phase.events if isinstance(e, Malloc) and e.num_bytes >= BIG)
        for phase in trace.phases
    }


def peak_bytes(trace: Trace) -> int:
    changes = [(r.lower, r.num_bytes) for r in requests(trace)] + [(r.upper, -r.num_bytes) for r in requests(trace)]
    live = peak = 0
    for _, change in sorted(changes):
        live += change
        peak = max(peak, live)
    return peak


def without_update(trace: Trace) -> Trace:
    """Forwards and backwards, which come first: more is not on paper."""
    kept = [phase for phase in trace.phases if phase.kind not in ("reduction", "optimizer")]
    assert trace.phases[: len(kept)] == tuple(kept)
    return dataclasses.replace(trace, phases=tuple(kept))


@pytest.mark.parametrize(
    ("world_size", "layout"),
    [
        pytest.param(1, {}, marks=pytest.mark.full),
        (1, SWAP),
        (1, {**EXPERTS, **SWAP}),
        (1, {"num_layers": 6, "moe_layer_freq": "[0]*2+[1]*4", **EXPERTS}),
        pytest.param(2, {"pp": 2}, marks=pytest.mark.full),
        (2, {"pp": 2, "vpp": 2, "num_layers": 4}),
        (2, {"tp": 2, **SWAP}),
    ],
    ids=["plain", "alpha", "experts", "kinds", "pp2", "pp2vpp2", "tp2alpha"],
)
def test_paper_foresees_the_peak_of_a_real_step(world_size: int, layout: dict[str, Any]) -> None:
    """Bound 1 % (measured 6e-6); with tp 15 % below (seen: 6 %): gloo copies what it gathers and scatters, and its
    threads drop that a little earlier or later. memo.estimate.program.messages counts those copies."""
    for stage, real in enumerate(run_ranks(world_size, recorded_on_rank, **layout)):
        if "tp" in layout and stage:
            continue  # tp ranks are alike
        on_paper = trace_on_paper(run_config(**layout), world_size, stage)
        real = without_update(real)
        assert [str(phase) for phase in on_paper.phases] == [str(phase) for phase in real.phases]
        least = 0.85 if "tp" in layout else 0.99
        assert least * peak_bytes(real) <= peak_bytes(on_paper) <= 1.01 * peak_bytes(real)


@pytest.mark.parametrize(
    "overrides", [pytest.param({}, marks=pytest.mark.full), SWAP, {"recompute_granularity": "full"}, EXPERTS]
)
def test_four_layers_stand_for_all(overrides: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    config = run_config(num_layers=6, global_batch_size=2, **overrides)
    composed = trace_on_paper(config, 1)
    monkeypatch.setattr(paper, "RECORDED_LAYERS", 6)
    whole = trace_on_paper(config, 1)
    assert by_phase(composed) == by_phase(whole)
    assert peak_bytes(composed) == peak_bytes(whole)
    assert composed.source == whole.source == "fake"


def test_a_long_sequence_takes_no_memory(tmp_path: Path) -> None:
    """One layer of a 7B model's rank at 1M tokens: GiBs of transient memory, on paper."""
    config = run_config(
        num_layers=1, hidden_size=4096, ffn_hidden_size=11008, num_attention_heads=32, num_query_groups=32,
        seq_length=1 << 20, tp=8, global_batch_size=1, params_dtype="bf16", loss_chunk_size=1 << 18, **SWAP,
    )  # fmt: skip
    trace = trace_on_paper(config, 8)
    assert 4 << 30 < peak_bytes(trace) < 24 << 30
    trace.save(tmp_path / "trace.json")
    assert Trace.load(tmp_path / "trace.json") == trace
    assert trace.run["seq_length"] == 1 << 20 and trace.run["world_size"] == 8
