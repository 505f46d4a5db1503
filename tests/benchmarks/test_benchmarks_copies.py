"""Records of copies.py are those of a run, and its rates come from the streams that copied."""

import argparse

import copies
import page_gpu
import pytest
import torch
from measure import case_of
from scales import SMOKE, Arguments

CPU = torch.device("cpu")
ARGS = Arguments(SMOKE, float("inf"))


def test_a_record_is_what_one_layer_moves() -> None:
    """gpt-tiny on one of two tensor-parallel ranks, fp32, h = 128: half of the tokens of all that may move in part."""
    case = case_of(ARGS, "memo", SMOKE.rank, 512, world=SMOKE.world)
    tokens, element, hidden, heads = 512, 4, 128, 4
    always = tokens * hidden * element // 2 * 2 + tokens * heads // 2 * element  # input, attention's output; lse
    split = (3 + 4 + 4) * tokens * hidden * element // 2  # qkv, fc1, activation
    sharded = 3 * tokens // 2 * hidden * element  # two norms, residual
    assert copies.record_bytes_of(case, 0.0) == always
    assert copies.record_bytes_of(case, 1.0) == always + split + sharded
    assert copies.record_bytes_of(case, 0.5) == always + (split + sharded) // 2
    assert copies.sizes(ARGS) == {always + (split + sharded) // 2: (512, 0.5), 2367488: (1024, 0.5)}


def test_rates_of_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fed by a clock: an offload of 1 s, a prefetch of 2 s, products of 1 ms, one after the other."""

    class Clock:
        now_s = 0.0

        def copy(self, stream: copies.Stream, *rest: object) -> None:
            Clock.now_s += 1.0 if stream is copies.Stream.OFFLOAD else 2.0

        def timestamp(self, stream: copies.Stream) -> "Time":
            return Time(Clock.now_s)

        def synchronize(self) -> None:
            pass

    class Time:
        def __init__(self, at_s: float) -> None:
            self.at_s = at_s

        def seconds_since(self, earlier: "Time") -> float:
            return self.at_s - earlier.at_s

    def product(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
        Clock.now_s += 1e-3

    monkeypatch.setattr(copies, "make_backend", lambda name, device: Clock())
    monkeypatch.setattr(torch, "mm", product)
    row = copies.rates(10**6, CPU)
    assert row["status"] == "ok" and row["products"] == 4500  # 1.5 times as long as both copies in turn take
    assert row["offload_alone_gb_per_s"] == pytest.approx(1e-3)
    assert row["prefetch_alone_gb_per_s"] == row["prefetch_compute_gb_per_s"] == pytest.approx(5e-4)
    assert row["prefetch_alone_both_gb_per_s"] == pytest.approx(1e-3 / 3)  # it waits for the offload
    slowed = [row[f"compute_slowed_by_{name}"] for name in ("offload", "prefetch", "both")]
    assert slowed == [pytest.approx((4.5 + copied) / 4.5) for copied in (1, 2, 3)]


def test_every_rate_has_its_column() -> None:
    row = {"status": "ok", "seq_length": 512, "alpha": 0.5, "record_bytes": 1 << 30}
    found = copies.rates(1 << 16, CPU)
    cells = {head: cell({**row, **found}) for head, cell in page_gpu.TABLES["copies"][1].items()}
    assert "-" not in cells.values() and cells["record, GiB"] == "1.00"
    assert all(value > 0 for value in found.values() if not isinstance(value, str))


def test_a_record_that_the_host_does_not_hold_is_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copies, "available_host_bytes", lambda: 1 << 10)
    row = copies.rates(1 << 20, CPU)
    assert row["status"] == "oom" and "2 records x 1.00 MiB" in row["message"]


def test_the_script_measures_each_size_in_a_process_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    commands: list[list[str]] = []
    added: list[dict[str, object]] = []

    def run(command: list[str], timeout_s: float) -> dict[str, object]:
        commands.append(command[-3:])
        return {"status": "ok"}

    monkeypatch.setattr(copies, "in_fresh_process", run)
    monkeypatch.setattr(copies.Journal, "add", lambda self, row: added.append(row))
    given = argparse.Namespace(scale="smoke", minutes=None, one=None)
    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", lambda self: given)
    copies.main()
    assert commands == [["--one", "1183744", "cpu"], ["--one", "2367488", "cpu"]]
    assert [(row["seq_length"], row["record_bytes"]) for row in added] == [(512, 1183744), (1024, 2367488)]
