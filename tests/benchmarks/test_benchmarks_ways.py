"""Every way to fit activations trains the same model, and a measured row tells of it."""

from pathlib import Path

import pytest
import reach
import table3_end_to_end
import table4_ablation
from measure import Case, in_fresh_process, take
from ways import WAYS

RUN = {"num_threads": 1, "peak_tflops": 1.0, "max_step_minutes": 600.0}
LAYERS, SEQ_LENGTH = 4, 64
SHAPE = {"num_layers": LAYERS, "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 101}
BY_HAND = ("none", "full-recompute", "selective-recompute", "layer-input-offload", "move-everything")
"""Ways without the planned allocator, which belongs to a process of its own."""


def case(way: str, **more: object) -> Case:
    found = {"shape": SHAPE, "warmup": 1, "steps": 2, "flags": RUN, **more}
    return Case(way, "gpt-tiny", SEQ_LENGTH, "cpu", **found)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def rows() -> dict[str, dict[str, object]]:
    return {way: take(case(way)) for way in BY_HAND}


@pytest.mark.parametrize("way", BY_HAND)
def test_ways_give_the_same_losses(way: str, rows: dict[str, dict[str, object]]) -> None:
    """fp32, to the last bit: what is computed again or moved is what was there."""
    assert rows[way]["status"] == "ok", rows[way]
    assert rows[way]["losses"] == rows["none"]["losses"]


def test_what_waits_on_the_host_is_counted(rows: dict[str, dict[str, object]]) -> None:
    input_bytes = SEQ_LENGTH * SHAPE["hidden_size"] * 4
    stay = 2  # the last two inputs are read before their buffers are needed again
    assert rows["layer-input-offload"]["host_records_bytes"] == (LAYERS - stay) * input_bytes
    assert rows["none"]["host_records_bytes"] == rows["full-recompute"]["host_records_bytes"] == 0
    assert rows["move-everything"]["host_records_bytes"] > 5 * LAYERS * input_bytes  # type: ignore[operator]


def test_both_conventions_of_mfu(rows: dict[str, dict[str, object]]) -> None:
    """Attention is 6 n h s of the causal FLOPs a token, and 12 n h s of the full ones."""
    width, vocabulary = SHAPE["hidden_size"], SHAPE["vocab_size"]
    matrices = 6 * (LAYERS * 12 * width * width + vocabulary * width)
    attention = 6 * LAYERS * width * SEQ_LENGTH
    row = rows["none"]
    ratio = row["mfu_full_percent"] / row["mfu_causal_percent"]  # type: ignore[operator]
    assert ratio == pytest.approx((matrices + 2 * attention) / (matrices + attention), rel=1e-12)


def test_refusals_and_shortages_become_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    refused = take(case("none", flags={**RUN, "offload_tiles": 0}))
    assert refused["status"] == "refused" and "offload-tiles" in refused["message"].replace("_", "-")

    def no_memory(self: object) -> None:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes")

    monkeypatch.setattr("memo.Trainer.step", no_memory)
    assert take(case("none"))["status"] == "oom"
    monkeypatch.setattr("memo.Trainer.step", lambda self: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        take(case("none"))


def test_the_parent_tells_what_became_of_a_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`sh` in the place of python: quick to start."""

    def run(script: str, timeout_s: float = 60.0) -> dict[str, object]:
        return in_fresh_process(["sh", "-c", script], timeout_s)

    assert run('echo noise; echo \'{"status": "ok"}\'') == {"status": "ok"}
    assert run("echo bad >&2; exit 3") == {"status": "failed", "message": "status 3: bad"}
    assert run("sleep 60", timeout_s=0.3)["status"] == "timeout"
    assert run("exit 1", timeout_s=0.0)["status"] == "skipped"
    monkeypatch.setattr("measure.available_host_bytes", lambda: 1 << 20)
    assert run("sleep 60")["status"] == "oom"


def test_every_way_of_the_tables_exists() -> None:
    assert set(table3_end_to_end.WAYS) | set(table4_ablation.WAYS) | set(reach.WAYS) <= WAYS.keys()
