"""What a swept step moves is recorded whole, as its plans alone foresee it: every copy, in the order of its stream."""

from pathlib import Path
from typing import Any

import pytest
from layouts import make, one_step_backward, tiny
from swap_drawing import draw_swaps
from sweep_timeline import SweepTimes, simulate_sweep

from memo.executor.runtime import SweepRuntime
from memo.report.timeline import Row, SwapSpan, tenancies
from memo.simulate.streams import LayerTimes

SECTIONS, LAYERS = 4, 4
COPIES = LayerTimes(0.0, 0.0, 0.2, 0.2)
TIMES = SweepTimes(LayerTimes(1.0, 2.5, 0.5, 0.5), COPIES, COPIES, COPIES)


def swept_step(**overrides: Any) -> tuple[list[SwapSpan], list[SwapSpan], SweepRuntime]:
    """The spans of the second of two steps, and those that its plans foresee."""
    values = {"num_layers": LAYERS, "seq_length": 32 * SECTIONS, "offload_alpha": 1.0, "offload_granularity": "tile"}
    values |= {"offload_tiles": 2 * SECTIONS, "offload_slot_tiles": 2, "profile_cache": "off"}
    model, feed = make(tiny("llama-tiny", **{**values, **overrides}), 1)
    runtime, chosen = model.swap, model.chosen_swap
    assert isinstance(runtime, SweepRuntime) and chosen is not None and chosen.sweep is not None
    one_step_backward(model, feed)
    with runtime.recorded() as moves:
        one_step_backward(model, feed)
    return moves.spans(), simulate_sweep(chosen.plan, chosen.sweep, TIMES, LAYERS), runtime


def sequence(spans: list[SwapSpan], row: Row) -> list[tuple[str, str]]:
    return [(span.kind, str(span.step.op)) for span in spans if span.row == row]


CASES: dict[str, tuple[dict[str, Any], set[str]]] = {
    "sections": ({}, {"activations", "keys and values"}),
    "attention again": ({"recompute_attention_layers": 2}, {"activations", "keys and values", "layer inputs"}),
    "hidden states": (
        {"recompute_attention_layers": 1, "offload_hidden_states": True},
        {"activations", "keys and values", "layer inputs", "hidden states"},
    ),
    "one microbatch": ({"global_batch_size": 1}, {"activations", "keys and values"}),
}


@pytest.mark.parametrize("name", CASES)
def test_a_run_copies_what_its_plans_say_in_their_order(tmp_path: Path, name: str) -> None:
    overrides, kinds = CASES[name]
    backend = "threads" if name == "hidden states" else "virtual"
    ran, planned, runtime = swept_step(**overrides, offload_backend=backend)
    for row in ("compute", "offload", "prefetch"):
        assert sequence(ran, row) == sequence(planned, row), row
    assert {span.kind for span in ran} == {span.kind for span in planned} == kinds
    copies = [span for span in ran if span.row in ("offload", "prefetch")]
    assert all(span.num_bytes > 0 for span in copies)
    assert len(tenancies(ran)) == len(tenancies(planned)) > 0
    assert not any(swapper.listeners for swapper, _ in runtime._swappers())  # nobody is told any more
    draw_swaps(ran, tmp_path / "moves.svg", name)
    assert "<svg" in (tmp_path / "moves.svg").read_text()


def test_what_is_on_a_disk_is_written_and_read_with_its_name(tmp_path: Path) -> None:
    """Everything but hidden states is on the disk, so every copy beside them has a transfer, in its order."""
    limit_gib = 600 * 2**10 / 2**30
    disk = {"offload_nvme_path": str(tmp_path), "offload_host_memory_gib": limit_gib, "offload_backend": "threads"}
    ran, _, runtime = swept_step(**disk, recompute_attention_layers=1)
    assert runtime.disk_bytes > 0
    writes, reads = sequence(ran, "write"), sequence(ran, "read")
    assert len(writes) == len(reads) > 0
    assert set(writes) <= set(sequence(ran, "offload")) and set(reads) <= set(sequence(ran, "prefetch"))
    assert len(set(writes)) == len(writes) and len(set(reads)) == len(reads)
    assert {(kind, op[1:]) for kind, op in writes} == {(kind, op[1:]) for kind, op in reads}
