"""scaled_node.py: the link stands to the core as the node's does to its GPU, copies take the link's time, and what is
foreseen follows from the pieces that were measured."""

import gc
from pathlib import Path
from typing import Any

import page_scaled
import pytest
import scaled_node as benchmark
from measure import Case
from scaled_foresight import foresee
from scaled_pieces import Pieces, piece_turns
from scaled_steps import SCALED_WAYS, Work, way_turns

from memo.artifacts.layer_profile import LayerProfile
from memo.estimate.machines import find_hardware

RATE = 1e9
TOKENS, HIDDEN = 512, 64
SHAPE = {**benchmark.SHAPE, "hidden_size": HIDDEN, "num_attention_heads": 1}
INPUT_BYTES = TOKENS * HIDDEN * benchmark.DTYPE_BYTES


def work_of(way: str, profile: Path | None = None, device_bytes: int | None = None) -> Work:
    case = Case(way, "gpt-tiny", TOKENS, "cpu", SHAPE, warmup=1, steps=1)
    return Work(case, RATE, "" if profile is None else str(profile), device_bytes)


def test_the_link_is_the_nodes_where_all_else_is(monkeypatch: pytest.MonkeyPatch) -> None:
    assert benchmark.link_bytes_per_s(2.0) == 2 * benchmark.link_bytes_per_s(1.0)
    monkeypatch.setattr(benchmark, "DTYPE_BYTES", benchmark.NODE_DTYPE_BYTES)
    for name in benchmark.NODES:
        node = find_hardware(name)
        rate = benchmark.link_bytes_per_s(node.peak_flops("bf16"), benchmark.NODE_HIDDEN, node)
        assert rate == pytest.approx(node.offload_gb_per_s * 1e9)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--hidden-size", "96"], "--hidden-size 96 is not a multiple of 64, the size of a head: give 64, 128, ..."),
        (["--turns", "1"], "--turns 1 leaves no quartiles to tell of: give 2 or more"),
    ],
)
def test_what_cannot_be_measured_is_refused(flags: list[str], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["scaled_node.py", *flags])
    with pytest.raises(SystemExit) as ended:
        benchmark.main()
    assert ended.value.code == message


def test_all_ways_train_the_same_and_are_foreseen(tmp_path: Path) -> None:
    """Losses are equal in fp32, all bits: what is kept, moved and computed again is what was there. Device memory is as
    foreseen within what an optimizer counts its steps in; bytes on the host exactly."""
    profile = tmp_path / "layer.json"
    found = _pieces(work_of("ideal", profile))
    assert found.forward_s > found.last_product_s > 0 and found.backward_s > 0
    assert found.on_tiles_forward_s > 0 and found.recompute_s.keys() == {"qkv", "residual", "fc1"}
    layer = LayerProfile.load(profile)
    assert layer.offload_bytes_per_s == layer.prefetch_bytes_per_s == RATE
    rows = {}
    for way in SCALED_WAYS:
        work = work_of(way, profile, 8 << 20 if way.startswith("memo") else None)
        rows[way] = row = _one_step(work)
        told = foresee(work, benchmark.NODE, found, row["moves"])
        assert told.host_bytes == row["host_bytes"] and told.step_s > 0
        assert told.device_peak_bytes == pytest.approx(row["device_peak_bytes"], rel=1e-4)
        assert (told.hidden_share is None) == (row["host_bytes"] == 0)
    assert len({row["loss"] for row in rows.values()}) == 1
    assert rows["ideal"]["moves"] is None and rows["memo"]["moves"] and rows["memo"]["host_bytes"] > 0
    stay = 2  # the last inputs are read before their buffers are needed again
    for way in ("layer-input-offload", "alst"):
        assert rows[way]["host_bytes"] == (benchmark.LAYERS - stay) * INPUT_BYTES
    sizes = [rows[way]["device_peak_bytes"] for way in ("alst", "layer-input-offload", "full-recompute", "ideal")]
    assert sizes == sorted(sizes) and len(set(sizes)) == len(sizes)


def _one_step(work: Work) -> dict[str, Any]:
    """After the models of earlier ways are gone, whose memory would be counted."""
    gc.collect()
    with way_turns(work) as turns:
        assert turns.turn()["step_s"] > 0
        return turns.end()


def _pieces(work: Work) -> Pieces:
    with piece_turns(work) as turns:
        return Pieces.median([Pieces(**turns.turn()) for _ in range(2)])


def test_the_page_compares_ways_of_one_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """memo's speed is a median of ratios within turns, and stands beside the paper's at the length in proportion."""
    about = {"node": "a800-80", "hidden_size": 64, "seq_length": 4096, "length_over_hidden": 64}
    memo = {**about, "way": "memo", "steps_s": [1.0, 2.0, 4.0]}
    other = {**about, "way": "full-recompute", "steps_s": [1.5, 2.0, 5.0]}
    (row,) = page_scaled.of_length([other, memo])
    assert row["full-recompute"] == 1.25 and row["quartiles"] == [1.0, 1.5]
    assert row["paper"] == pytest.approx(53.62 / 42.05) and page_scaled.stands_for(row) == "256K"
    assert page_scaled.papers_ratio(1024) is None, "did not fit there"
