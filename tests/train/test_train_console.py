"""What a run says: a header of a few lines, log lines of 120 columns, and at the end what came of it."""

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest

import memo
from memo.spec.flops import model_flops_per_token
from memo.train.console import Console, log_line
from memo.train.metrics import speed

SHAPE: dict[str, Any] = {"num_layers": 3, "hidden_size": 32, "num_attention_heads": 4, "vocab_size": 61}
RUN: dict[str, Any] = {"seq_length": 64, "mock_data": True, "device": "cpu", "num_threads": 1, "peak_tflops": 1.0}


def trainer(**flags: Any) -> memo.Trainer:
    return memo.Trainer(**{**SHAPE, **RUN, "profile_cache": "off", "progress": False, "train_iters": 2, **flags})


RECORD = memo.StepRecord(
    iteration=99_999,
    consumed_samples=800,
    lm_loss=10.83123,
    grad_norm=12.3456,
    lr=2.981588e-05,
    step_time_s=2171.0,
    tgs=123_456.7,
    mfu_percent=45.678,
    tflops_per_gpu=451.2,
    global_batch_size=8,
    skipped_iterations=0,
    nan_iterations=0,
    device_peak_bytes=1 << 30,
    host_peak_bytes=2 << 30,
)


def test_a_line_of_the_log_has_at_most_120_columns() -> None:
    line = log_line(RECORD, 99_999)
    assert len(line) <= 120
    assert re.fullmatch(
        r"\d\d-\d\d \d\d:\d\d:\d\d iteration 99999/99999 \| loss 10\.8312 \| grad norm 12\.35 \| lr 2\.98e-05 \| "
        r"36\.2 min \| TGS 123,457 \| MFU 45\.7%",
        line,
    )
    quick = dataclasses.replace(RECORD, iteration=7, step_time_s=0.2898, skipped_iterations=3)
    unknown = dataclasses.replace(RECORD, mfu_percent=None)
    assert log_line(unknown, 99_999).endswith(" | TGS 123,457")
    assert "MFU" not in log_line(unknown, 99_999, "megatron") and "MFU: 45.68%" in log_line(RECORD, 9, "megatron")
    assert "iteration     7/99999 | " in log_line(quick, 99_999) and " | 290 ms | " in log_line(quick, 99_999)
    assert log_line(quick, 99_999).endswith(" | 3 skipped")
    experts = dataclasses.replace(RECORD, load_imbalance=1.2345)
    assert log_line(experts, 99_999).endswith(" | MFU 45.7% | imbalance 1.23")
    both = dataclasses.replace(experts, load_balancing_loss=1.02, z_loss=13.5)
    assert log_line(both, 99_999).endswith(" | MFU 45.7% | balance 1.02 | z 13.5 | imbalance 1.23")
    megatron = "load_balancing_loss: 1.020000E+00 | z_loss: 1.350000E+01 | load imbalance: 1.234500E+00 | grad norm"
    assert megatron in log_line(both, 99_999, "megatron")


@pytest.mark.parametrize(
    ("device", "peak_flops", "percent"), [("cuda", 4e9, 50.0), ("cuda", 1.9e9, None), ("cpu", 4e9, None)]
)
def test_mfu_is_a_share_of_a_peak_that_is_one(device: str, peak_flops: float, percent: float | None) -> None:
    """Not of a CPU's, which is a measurement, nor of one that a step exceeds."""
    config = memo.RunConfig().override({**SHAPE, "seq_length": 64, "device": device})
    samples_per_s = 2e9 / (64 * model_flops_per_token(config.model, 64))
    found = speed(config, samples_per_s, peak_flops)
    assert found["tflops_per_gpu"] == pytest.approx(2e-3)
    assert found["mfu_percent"] == (None if percent is None else pytest.approx(percent))


@pytest.mark.parametrize(
    ("flags", "names"),
    [
        ({}, set()),
        ({"num_experts": 4}, {"load_imbalance"}),
        ({"num_experts": 4, "moe_z_loss_coeff": 1e-3}, {"load_imbalance", "z_loss"}),
    ],
    ids=["no experts", "experts", "z-loss"],
)
def test_a_record_tells_of_routers_where_there_are_any(flags: dict[str, Any], names: set[str]) -> None:
    with trainer(**flags) as made:
        record = made.step()
    fields = ("load_imbalance", "load_balancing_loss", "z_loss")
    assert {name for name in fields if getattr(record, name) is not None} == names
    assert not names or 1.0 < record.load_imbalance < 4 / 2  # type: ignore[operator]  # of 4 experts each token has 2


def test_megatrons_line_is_one_flag_away(capsys: pytest.CaptureFixture[str]) -> None:
    Console(memo.RunConfig().override({"log_format": "megatron", "progress": False}), 0).stepped(RECORD)
    line = capsys.readouterr().out
    assert "iteration    99999/" in line and "elapsed time per iteration (ms): 2171000.0 |" in line
    assert "lm loss: 1.083123E+01 |" in line and "number of nan iterations:   0 |" in line


@pytest.mark.parametrize(
    ("flags", "starts"),
    [
        ({"offload_alpha": "auto"}, ["activations: all "]),
        ({"offload_alpha": 0.5}, ["activations: input, attention_out", "  limit: --offload-alpha; copies "]),
        (
            {"offload_alpha": 0.5, "offload_states": "all", "memory_planner": "auto", "params_dtype": "bf16"},
            ["activations: input, ", "states of 3 layers ", "memory of a step: "],
        ),
    ],
    ids=["stays", "moves", "all of it"],
)
def test_the_header_has_at_most_15_lines(
    flags: dict[str, Any], starts: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with trainer(**flags) as made:
        made.print_header()
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 15
    for start in starts:
        assert any(line.startswith(start) for line in lines), start


def test_the_end_says_what_came_of_it_and_what_comes_next(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with trainer(save=str(tmp_path), eval_interval=2, eval_iters=1, gbs=2) as made:
        last = made.train()
        assert last is not None
    out = capsys.readouterr().out
    loss = f"loss {last.lm_loss:.4f}"
    assert re.search(
        rf"^trained 2 iterations, 256 tokens, in [\d.]+ s: {loss}, validation loss \d+\.\d{{4}}$", out, re.M
    )
    assert re.search(r"^peak memory of rank 0: [\d.]+ [MG]iB$", out, re.M)
    assert f"\ncheckpoint: {tmp_path / 'iter_0000002'}\n" in out
    assert f"\nnext: `memo report {tmp_path}` draws this run, `memo export {tmp_path} --out DIR` writes " in out


def test_the_log_to_draw_is_the_one_that_was_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    save, log = tmp_path / "all checkpoints", tmp_path / "log.jsonl"
    with trainer(save=str(save), log_jsonl=str(log)) as made:
        made.train()
    assert f"\nnext: `memo report {log}` draws this run, `memo export '{save}' --out DIR` " in capsys.readouterr().out
    monkeypatch.setattr("memo.train.console.find_spec", lambda _: None)
    with trainer(save=str(tmp_path / "without")) as made:
        made.train()
    assert "` draws this run (after pip install 'memo-train[report]'), `memo export" in capsys.readouterr().out


def test_a_run_on_a_cpu_that_saves_nothing_says_so_and_names_no_mfu(capsys: pytest.CaptureFixture[str]) -> None:
    with trainer() as made:
        made.print_header()
        made.train()
    out = capsys.readouterr().out
    assert out.endswith("\nnothing is saved: --save was not given\n") and "MFU" not in out


def test_a_finished_run_that_is_resumed_says_how_to_go_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with trainer(save=str(tmp_path)) as made:
        made.train()
        capsys.readouterr()
        assert not made.train()
        assert "nothing is left to train: this Trainer is at iteration 2, and" in capsys.readouterr().out
    with trainer(save=str(tmp_path), load=str(tmp_path)) as made:
        assert not made.train()
    assert (
        f"nothing is left to train: --load {tmp_path} is at iteration 2, and --train-iters is 2: give a larger one to "
        "go on\n" in capsys.readouterr().out
    )


def test_another_schedule_is_told_when_a_run_is_resumed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with trainer(save=str(tmp_path), lr=1e-3) as made:
        made.train()
    capsys.readouterr()
    with trainer(save=str(tmp_path), load=str(tmp_path), lr=1e-3, train_iters=2, lr_decay_iters=2):
        assert "another schedule" not in capsys.readouterr().out  # the same in other words
    with trainer(save=str(tmp_path), load=str(tmp_path), lr=2e-3, train_iters=4):
        told = "follows another schedule from here on: --lr 0.002 (was 0.001), --lr-decay-iters 4 (was 2)\n"
        assert told in capsys.readouterr().out
