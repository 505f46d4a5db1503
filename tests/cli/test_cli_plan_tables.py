"""`memo plan`: dollars, machines that are compared, and tables that fit the terminal."""

import json
import shlex
from itertools import takewhile

import pytest
from plan_answers import printed

from memo.cli import plan as plan_command
from memo.cli.main import main

Capture = pytest.CaptureFixture[str]
LONG = ["--model", "gpt-7b", "--gpus", "8", "--seq-len", "262144", "--gbs", "16"]
SMALL = ["--model", "llama-3.1-8b", "--gpus", "1", "--hardware", "a100-40", "--gpu-memory-gib", "24"]
DISKS = ["--seq-len", "128K", "--gbs", "1", "--host-memory-gib", "128", "--nvme-gib", "931", "--clip-grad", "0"]


def test_dollars_follow_the_price_that_is_given_or_known(capsys: Capture) -> None:
    argv = ["--model", "llama-3.1-8b", "--gpus", "8", "--seq-len", "131072", "--gbs", "16", "--top", "1"]
    found = json.loads(printed([*argv, "--price-per-gpu-hour", "2", "--json"], capsys))
    (best,) = found["choices"]
    hours = 1e9 / (131072 * 16) * best["step_time_s"] / 3600
    assert best["dollars_per_billion_tokens"] == pytest.approx(2 * 8 * hours)
    shown = printed([*argv, "--hardware", "h100-80"], capsys)
    heads, row = shown.splitlines()[2:4]
    assert heads.endswith("host GiB  $/B tokens  verdict")
    dollars = row.split()[-2]
    assert "at $4.76 a GPU and hour on demand a step costs $" in shown
    assert "price: $4.76 a GPU and hour on demand (RunPod, 10 March 2026, as deploybase.ai reported it; " in shown
    assert "; $2.69 spot, where a run may be cut off; the plan assumes 2,048 GiB of host memory and 25 GB/s" in shown
    assert f"a billion tokens ${dollars}\n" in shown
    unknown = printed(argv, capsys)  # a800-80 has no price
    assert "$" not in unknown


def test_machines_are_compared_for_one_job(capsys: Capture) -> None:
    argv = ["--model", "llama-3.1-8b", "--seq-len", "32768", "--gbs", "16"]
    machines = ["--compare", "h100-80x8,l4x1,a100-80x8"]
    found = json.loads(printed([*argv, *machines, "--place-states", "never", "--json"], capsys))
    assert [(each["hardware"], each["gpus"]) for each in found] == [("h100-80", 8), ("a100-80", 8), ("l4", 1)]
    dollars = [each["dollars_per_billion_tokens"] for each in found]
    assert dollars[0] < dollars[1] and dollars[2] is None and found[2]["layout"] is None
    alone = json.loads(printed([*argv, "--gpus", "8", "--hardware", "h100-80", "--json"], capsys))["choices"][0]
    assert found[0]["dollars_per_billion_tokens"] == alone["dollars_per_billion_tokens"]
    shown = printed([*argv, *machines, "--place-states", "never"], capsys)
    assert shown.startswith("llama-3.1-8b, 32,768 tokens x 16 sequences a step\n")
    assert "\n1  8 x h100-80 " in shown and "\n1 x l4: nothing fits: GPU memory: " in shown


def test_without_a_price_machines_are_compared_by_speed_and_come_last(capsys: Capture) -> None:
    job = ["--model", "llama-3.1-8b", "--seq-len", "32768", "--compare"]
    shown = printed([*job, "gb200x4,a100-40x8,rtx-4090x8"], capsys)
    assert "\n1  8 x rtx-4090 " in shown and "\n2  4 x gb200 " in shown and "\n3  8 x a100-40 " in shown
    assert "\n8 x a100-40: no price is known, so it comes after those with one: NAMExGPUS@DOLLARS gives one\n" in shown
    shown = printed([*job, "a100-40x8,gb200x4"], capsys)
    assert "\n1  4 x gb200 " in shown and "\n2  8 x a100-40 " in shown
    assert "\n8 x a100-40: no price is known, so machines are ranked by tokens a second: NAMExGPUS@" in shown


def test_machines_are_compared_by_prices_of_ones_own(capsys: Capture) -> None:
    job = ["--model", "llama-3.1-8b", "--seq-len", "32768", "--gbs", "2", "--json", "--compare"]
    known = json.loads(printed([*job, "h100-80x2,h200x2"], capsys))
    own = json.loads(printed([*job, "h100-80x2@0.5,h200x2@3.2"], capsys))
    assert [each["hardware"] for each in own] == ["h100-80", "h200"]
    assert [each["dollars_per_hour"] for each in own] == [pytest.approx(2 * 0.5), pytest.approx(2 * 3.2)]
    dear = json.loads(printed([*job, "h100-80x2@50,h200x2", "--price-per-gpu-hour", "2"], capsys))
    assert [(each["hardware"], each["dollars_per_hour"]) for each in dear] == [("h200", 4.0), ("h100-80", 100.0)]
    assert {each["hardware"]: each["tokens_per_s"] for each in known} == {
        each["hardware"]: each["tokens_per_s"] for each in own
    }


@pytest.mark.parametrize("columns", [80, 120])
@pytest.mark.parametrize(
    "argv",
    [
        [*LONG, "--top", "3"],
        [*LONG, "--explain", "tp1 cp8 pp1 mbs1 all_gather"],
        ["--model", "llama-3.1-8b", "--gpus", "8", "--hardware", "h100-80", "--seq-len", "1M", "--gbs", "8"],
        [*SMALL, *DISKS],
        ["--model", "llama-3.1-8b", "--seq-len", "32768", "--compare", "h100-80x8,a100-80-pciex16,h200x8"],
    ],
    ids=["plain", "explained", "swept", "disks", "machines"],
)
def test_tables_fit_the_terminal(
    argv: list[str], columns: int, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def table(*more: str) -> list[str]:
        """From its head to what is said below it."""
        lines = printed([*argv, *more], capsys).splitlines()
        first = next(at for at, line in enumerate(lines) if " layout " in line)
        return list(takewhile(lambda line: line and line[0] in " 123456789", lines[first:]))

    monkeypatch.setattr(plan_command, "terminal_columns", lambda: columns)
    fitted = table()
    assert max(map(len, fitted)) <= columns and len(table("--wide")[0]) > 80
    assert " activations " in fitted[0] and ("tok/GPU/s" in fitted[0] or "tokens/s" in fitted[0])


def test_a_narrow_table_says_what_it_leaves_out(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = [*LONG, "--top", "3"]
    whole = printed(asked, capsys)  # no terminal: everything
    assert "TFLOP/s" in whole and "--wide" not in whole
    monkeypatch.setattr(plan_command, "terminal_columns", lambda: 90)
    narrow = printed(asked, capsys)
    assert "\nnot shown for want of room: dp, " in narrow and "TFLOP/s" not in narrow.splitlines()[2]
    assert printed([*asked, "--wide"], capsys) == whole


@pytest.mark.parametrize(
    "command",
    [
        "plan --gpus 8 --hardware h100-80",
        "plan --gpus 8 --hardware h100-80 --json",
        "plan --gpus 8 --hardware h100-80 --explain 'tp1 cp1 pp1 mbs1'",
        "plan --compare h100-80x8,a100-80x8",
        "plan --compare h100-80x8 --json",
        "estimate --gpus 8 --hardware h100-80",
        "estimate --gpus 8 --hardware h100-80 --json",
    ],
)
def test_whose_kernels_of_delta_nets_are_foreseen_is_told(command: str, capsys: Capture) -> None:
    told = {}
    for model in ("qwen3.5-4b", "llama-3.1-8b"):
        assert main([*shlex.split(command), "--seq-len", "8192", "--model", model]) == 0
        told[model] = [line for line in capsys.readouterr().out.splitlines() if "gated delta nets: " in line]
    (line,) = told["qwen3.5-4b"]
    assert "torch's operations are foreseen" in line and "--delta-backend auto" in line
    assert told["llama-3.1-8b"] == []
