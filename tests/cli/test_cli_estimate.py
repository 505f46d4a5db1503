"""`memo estimate`: tables of cases, and one case."""

import csv
import json
from pathlib import Path

import pytest
from refusals import refusal

from memo.cli.estimate import ADDED, TIMES
from memo.cli.main import main
from memo.config import RunConfig, preset
from memo.estimate.cases import COLUMNS
from memo.estimate.hardware_files import HARDWARE
from memo.search.candidates import Layout, Strategy
from memo.search.question import ask
from memo.search.sizing import size
from memo.simulate import predict_step
from memo.units import GIB

Capture = pytest.CaptureFixture[str]


def write(path: Path, rows: list[dict[str, str]]) -> Path:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return path


def table(tmp_path: Path, rows: list[dict[str, str]], *flags: str) -> list[dict[str, str]]:
    source, target = write(tmp_path / "in.csv", rows), tmp_path / "out.csv"
    assert main(["estimate", "--cases", str(source), "--out", str(target), *flags]) == 0
    with target.open(newline="") as file:
        return list(csv.DictReader(file))


def test_a_table_of_all_methods(tmp_path: Path, capsys: Capture) -> None:
    """Columns in any order, some absent; others pass through."""
    shared = {"note": "a, b", "seq_len": "8192", "tp": "", "model": "llama-3.1-8b"}
    rows = [
        {**shared, "method": "eq18", "tp": "2", "gpus": "4", "gpu_memory_gib": "94"},
        {**shared, "method": "memo", "tp": "2", "gpus": "4", "gpu_memory_gib": "94"},
        {**shared, "method": "llmem", "tp": "4", "gpus": "4", "gpu_memory_gib": "94"},
        {**shared, "method": "dnnmem", "gpus": "1", "gpu_memory_gib": "40"},
        {**shared, "method": "memo", "tp": "8", "gpus": "8", "gpu_memory_gib": "80"},
    ]
    found = table(tmp_path, rows)
    assert list(found[0]) == [*rows[0], *ADDED]
    assert [row["note"] for row in found] == ["a, b"] * 5
    assert (found[0]["states_gib"], found[0]["activations_gib"]) == ("44.874069", "22.644531")
    assert found[0]["total_gib"] == "67.518600"
    assert [row["verdict"] for row in found] == ["fits", "fits", "fits", "oom", "fits"]
    assert all(row["host_gib"] == "0.000000" for row in found)
    assert float(found[1]["total_gib"]) > float(found[1]["states_gib"]) + float(found[1]["activations_gib"])
    assert "passed through unread: note;" in capsys.readouterr().out


def test_host_memory_and_verdict_oohm(tmp_path: Path) -> None:
    base = {"model": "gpt-7b", "tp": "4", "cp": "2", "gpus": "8", "hardware": "a800-80"}
    rows = [
        {**base, "seq_len": str(k << 10), "alpha": alpha, "host_memory_gib": host}
        for k, alpha, host in ((256, "1", ""), (256, "1", "500"), (256, "0", "500"), (256, "off", "500"))
    ]
    found = table(tmp_path, rows)
    assert [row["verdict"] for row in found] == ["fits", "oohm", "fits", "oom"]
    # 8 ranks x 30 layers: ten units of b s h (norms and GELU's output stay) of 1/4 GiB, log-sum-exp of 4 MiB.
    assert float(found[0]["host_gib"]) == pytest.approx(8 * 30 * (10 / 4 + 4 / 1024), abs=1e-6)
    assert found[3]["host_gib"] == "0.000000"


def test_lengths_of_a_table_may_be_written_as_on_the_command_line(tmp_path: Path) -> None:
    base = {"model": "gpt-7b", "tp": "4"}
    short, long = table(tmp_path, [{**base, "seq_len": "64K"}, {**base, "seq_len": "65536"}])
    assert short.pop("seq_len") == "64K" and long.pop("seq_len") == "65536", "cells stay as they were written"
    assert short == long


def test_out_may_be_the_same_file(tmp_path: Path) -> None:
    source = write(tmp_path / "a.csv", [{"model": "gpt-7b", "verdict": "perhaps"}])
    assert main(["estimate", "--cases", str(source), "--out", str(source)]) == 0
    assert main(["estimate", "--cases", str(source), "--out", str(source)]) == 0
    with source.open() as file:
        (row,) = csv.DictReader(file)
    assert row["verdict"] == "oom" and list(row)[:2] == ["model", "verdict"]


def test_the_corrected_llmem_is_an_option(tmp_path: Path) -> None:
    rows = [{"method": "llmem", "model": "llama-3.1-8b", "gpus": "4", "seq_len": "512"}]
    literal = float(table(tmp_path, rows)[0]["total_gib"])
    corrected = float(table(tmp_path, rows, "--llmem-corrected")[0]["total_gib"])
    assert corrected - literal == pytest.approx(8.03e9 * 2 / 2**30, rel=0.1)


def test_a_config_json_is_a_model(tmp_path: Path, capsys: Capture) -> None:
    config = tmp_path / "config.json"
    values = {
        "hidden_size": 2048,
        "num_hidden_layers": 24,
        "num_attention_heads": 32,
        "ffn_dim": 8192,
        "vocab_size": 50272,
    }
    config.write_text(json.dumps(dict(model_type="opt", **values)))
    for name in (config, tmp_path):
        assert main(["estimate", "--model", str(name), "--json", "--seq-len", "512"]) == 0
        assert json.loads(capsys.readouterr().out)["parameters"] == 1_315_758_080


def test_one_case_as_json_and_as_a_table(capsys: Capture) -> None:
    argv = ["estimate", "--model", "llama-3.1-8b", "--tp", "2", "--gpus", "4", "--hardware", "h100-94gb"]
    assert main([*argv, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    parts = {name: num_bytes for name, num_bytes in found["parts_bytes"].items() if name != "host"}
    assert sum(parts.values()) / 2**30 == pytest.approx(found["total_gib"])
    assert (found["verdict"], found["gpu_memory_gib"], found["seq_len"]) == ("fits", 95830 / 1024, 8192)
    assert set(ADDED) <= set(found) and set(COLUMNS) <= set(found)
    assert main(argv) == 0
    printed = capsys.readouterr().out
    assert f"{found['total_gib']:,.3f} GiB" in printed and "verdict: fits (" in printed
    for part in parts:
        assert f"\n  {part} " in printed
    assert main([*argv, "--alpha", "0.5"]) == 0
    assert "host, one node" in capsys.readouterr().out


def test_short_rows_and_a_byte_order_mark_are_fine(tmp_path: Path) -> None:
    source, target = tmp_path / "in.csv", tmp_path / "out.csv"
    source.write_text("\ufeff model ,tp,gpus\ngpt-7b\n\ngpt-7b,8,8\n", encoding="utf-8")
    assert main(["estimate", "--cases", str(source), "--out", str(target)]) == 0
    with target.open() as file:
        assert [row["verdict"] for row in csv.DictReader(file)] == ["oom", "fits"]


@pytest.mark.parametrize(
    ("name", "memory_gib", "found"),
    [
        ("a100-40gb", "", "a100-40"),
        ("A100-40", "", "a100-40"),
        ("H100-94GiB", "", "h100-94"),
        ("a100-80gb", "", "a100-80"),
        ("RTX 4090", "", "rtx-4090"),
        ("NVIDIA L40S", "", "l40s"),
        ("H100-80-PCIe", "", "h100-80-pcie"),
        ("h200-141gb", "", "h200"),
        ("h100", "80", "h100-80"),
        ("h100", "94", "h100-94"),
        ("", "", "a800-80"),
    ],
)
def test_machines_by_the_names_people_use(name: str, memory_gib: str, found: str, capsys: Capture) -> None:
    argv = [f"{flag}={text}" for flag, text in (("--hardware", name), ("--gpu-memory-gib", memory_gib)) if text]
    assert main(["estimate", "--model", "gpt-tiny", "--json", *argv]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["hardware"] == found
    assert result["gpu_memory_gib"] == float(memory_gib or HARDWARE[found].memory_gib)


def test_a_machine_of_ones_own(tmp_path: Path, capsys: Capture) -> None:
    file = tmp_path / "mine.toml"
    file.write_text('like = "h100-80"\nmemory_gib = 20\n')
    assert main(["estimate", "--model", "llama-3.1-8b", "--hardware", str(file), "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["hardware"], result["gpu_memory_gib"], result["verdict"]) == ("mine", 20, "oom")


def test_what_host_memory_does_not_hold_is_on_the_disks(tmp_path: Path, capsys: Capture) -> None:
    """Records are split as memo plan splits them: host memory first, as far as it surely fits."""
    base = {"model": "gpt-7b", "tp": "4", "cp": "2", "gpus": "8", "hardware": "a800-80", "seq_len": str(256 << 10)}
    rows = [
        {**base, "alpha": "1", "host_memory_gib": host, "nvme_gib": disk}
        for host, disk in (("", ""), ("", "1000"), ("500", "1000"), ("500", "100"))
    ]
    whole, room, split, short = table(tmp_path, rows)
    assert [row["verdict"] for row in (whole, room, split, short)] == ["fits", "fits", "fits", "oohm"]
    assert room["host_gib"] == whole["host_gib"] and room["disk_gib"] == whole["disk_gib"] == "0.000000"
    assert float(split["host_gib"]) == pytest.approx(0.9 * 500, rel=1e-6) and float(split["total_gib"]) > 0
    records = float(whole["host_gib"])
    staging = float(split["host_gib"]) + float(split["disk_gib"]) - records
    assert 0 < staging < 0.15 * records  # buffers through which records pass; all ranks have them
    assert float(short["host_gib"]) > 500 and float(split["tgs"]) > 0
    asked = ask("gpt-7b", 8, seq_len=256 << 10, hardware="a800-80", host_memory_gib=500, nvme_gib=1000)
    sized = size(asked, Layout(4, 2), Strategy(1.0))
    assert float(split["disk_gib"]) == pytest.approx(sized.disk_bytes / GIB, rel=0.01)
    argv = ["estimate", *(word for name, text in rows[2].items() for word in (f"--{name.replace('_', '-')}", text))]
    assert main(argv) == 0
    printed = capsys.readouterr().out
    assert "NVMe, one node" in printed and "of 1,000.0 GiB" in printed
    assert main([*argv, "--json", "--nvme-gb-per-s", "4"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["disk_gib"] == pytest.approx(float(split["disk_gib"]), abs=1e-5) and found["nvme_gb_per_s"] == 4


def test_alpha_auto(capsys: Capture) -> None:
    """Nothing moves where everything fits; else what limits allow, at no more memory than surely fits."""
    argv = ["estimate", "--model", "gpt-7b", "--tp", "4", "--cp", "2", "--alpha", "auto", "--json"]
    found = {}
    for k in (16, 512, 4096):
        assert main([*argv, "--seq-len", str(k << 10)]) == 0
        found[k] = json.loads(capsys.readouterr().out)
    assert found[16]["moved_tiles"] is None and found[16]["host_gib"] == 0 and found[16]["parts_bytes"]["skeletal"] > 0
    assert set(found[512]["moved_tiles"].values()) == {8} and found[512]["verdict"] == "fits"
    assert found[512]["parts_bytes"]["skeletal"] == 0 and found[512]["host_gib"] > 1000
    assert set(found[4096]["moved_tiles"].values()) == {0} and found[4096]["verdict"] == "oom"
    assert all(case["alpha"] == "auto" and case["tgs"] > 0 for case in found.values())
    assert main([*argv[:-1], "--seq-len", str(512 << 10)]) == 0
    assert "input, attention output, and tiles of qkv 8, residual 8, fc1 8" in capsys.readouterr().out
    assert main([*argv[:-1], "--seq-len", str(16 << 10)]) == 0
    assert "nothing moves: all activations fit on the GPU" in capsys.readouterr().out


def test_times_are_the_simulators_and_for_the_method_memo_alone(tmp_path: Path) -> None:
    rows = [
        {"model": "gpt-7b", "tp": "8", "method": method, "global_batch_size": "16", "alpha": alpha}
        for method, alpha in (("memo", ""), ("memo", "0.5"), ("eq18", ""))
    ]
    plain, swapped, paper = table(tmp_path, rows)
    assert all(paper[name] == "" for name in TIMES)
    for row, alpha in ((plain, "off"), (swapped, 0.5)):
        config = RunConfig(model=preset("gpt-7b")).override(
            {"tp": 8, "gbs": 16, "seq_length": 8192, "device": "cuda", "offload_alpha": alpha}
        )
        step = predict_step(config, 8, HARDWARE["a800-80"])
        for name in TIMES:
            assert float(row[name]) == pytest.approx(getattr(step, name), rel=1e-12)
    assert float(swapped["step_time_s"]) > float(plain["step_time_s"])


def test_a_row_without_a_model(tmp_path: Path, capsys: Capture) -> None:
    """Its message is longer than those of refusals.txt may be: it lists the presets."""
    source = write(tmp_path / "in.csv", [{"model": "gpt-7b"}, {"model": ""}])
    message = refusal(["estimate", "--cases", str(source), "--out", str(tmp_path / "out.csv")], capsys)
    assert message.startswith(f"{source}: line 3: model is '': no model is named: give a preset")
