"""Admission: what is refused, what the message says, and how much host memory there is."""

import re
from pathlib import Path

import psutil
import pytest
import torch
from control_groups import control_groups

from memo.config import RunConfig, preset
from memo.errors import ResourceError
from memo.estimate.admission import Room, admit, estimate_step_s
from memo.estimate.host_memory import available_host_bytes, total_host_bytes
from memo.estimate.memory_account import memory_account
from memo.estimate.unseen_memory import CONTEXT
from memo.train.device import PeakFlops
from memo.train.setup import _admit, prepare
from memo.units import GIB, format_bytes

LAPTOP_FLOPS = 1e11


def run(**values: object) -> RunConfig:
    return RunConfig().override({"vocab_size": 257, "device": "cpu", "offload_alpha": "off", **values})


def advice(message: str) -> int:
    found = re.search(r"use --seq-length (\d+) or less", message)
    assert found, message
    return int(found[1])


def test_a_small_run_is_admitted_with_its_estimate() -> None:
    config = run()
    admission = admit(config, 1, Room(8 * GIB, 8 * GIB), LAPTOP_FLOPS)
    assert admission.worst_rank == memory_account(config, 1, 0)
    assert admission.shared_bytes == admission.worst_rank.total
    assert admission.step_s == estimate_step_s(config, 1, LAPTOP_FLOPS)


def test_a_million_tokens_on_a_laptop() -> None:
    config = run(seq_length=1 << 20)
    with pytest.raises(ResourceError) as refused:
        admit(config, 1, Room(16 * GIB, 16 * GIB), LAPTOP_FLOPS)
    message = str(refused.value)
    memory = memory_account(config, 1, 0)
    assert "--seq-length 1048576 is too large" in message
    assert f"a rank needs {format_bytes(memory.total)}" in message
    assert f"skeletal {format_bytes(memory.skeletal)}" in message
    assert "available are 16.00 GiB" in message
    assert "above --max-step-minutes 60" in message


@pytest.mark.parametrize("values", [{}, {"tp": 2, "cp": 2}, {"pp": 2}])
def test_the_advised_length_is_the_longest_that_fits(values: dict[str, object]) -> None:
    config, ranks = run(seq_length=1 << 20, **values), 4
    with pytest.raises(ResourceError) as refused:
        admit(config, ranks, Room(16 * GIB, 16 * GIB, ranks), 1e15)
    length, step = advice(str(refused.value)), 8 if values.get("cp") else 1
    assert length % step == 0
    admit(config.override({"seq_length": length}), ranks, Room(16 * GIB, 16 * GIB, ranks), 1e15)
    with pytest.raises(ResourceError):
        admit(config.override({"seq_length": length + step}), ranks, Room(16 * GIB, 16 * GIB, ranks), 1e15)


def test_a_full_machine_is_told_who_holds_its_memory() -> None:
    """56 tokens are not the cause, and no shorter sequence is the remedy."""
    config = run(seq_length=56)
    needed = memory_account(config, 1, 0).total
    with pytest.raises(ResourceError) as refused:
        admit(config, 1, Room(needed - 1, 64 * GIB), LAPTOP_FLOPS)
    message = str(refused.value)
    assert "this run does not fit in the memory that is free" in message and "--seq-length" not in message
    assert f"other processes hold {format_bytes(64 * GIB - needed + 1)} of 64.00 GiB: end some of them" in message
    assert f"wait until {format_bytes(needed)} are free" in message
    admit(config, 1, Room(needed, 64 * GIB), LAPTOP_FLOPS)
    with pytest.raises(ResourceError, match="--seq-length 56 is too large"):  # for this machine even when it is empty
        admit(config, 1, Room(needed - 2, needed - 1), LAPTOP_FLOPS)


@pytest.mark.parametrize(
    ("taken_bytes", "says"),
    [
        (CONTEXT.foreseen, None),
        (CONTEXT.foreseen + 1, "other processes hold 1 B of "),
        (CONTEXT.foreseen + 9 * GIB, "other processes hold 9.00 GiB of "),
    ],
)
def test_the_context_of_this_process_is_no_other_process(
    taken_bytes: int, says: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a run needs has the context in it, which lies on the device already when the run asks what is free."""
    config = run(device="cuda", params_dtype="bf16", seq_length=1 << 16, offload_alpha="off")
    total = memory_account(config, 1, 0).total
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda _: (total - taken_bytes, total))
    monkeypatch.setattr("torch.cuda.get_device_name", lambda _: "NVIDIA H100 80GB HBM3")
    asked = (config, 1, torch.device("cuda"), PeakFlops(1e15, "assumed"))
    if says is None:
        _admit(*asked)
        return
    with pytest.raises(ResourceError, match=says):
        _admit(*asked)


def test_no_admission_warns_and_starts(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("memo.train.memory_choice.available_host_bytes", lambda: 1000)
    asked = run(seq_length=64, mock_data=True, offload_alpha="off", peak_tflops=1.0, num_threads=1)
    with pytest.raises(ResourceError, match=r"other processes hold .*; .* estimate: --no-admission starts the run"):
        prepare(asked)
    assert capsys.readouterr().err == ""
    assert prepare(asked.override({"admission": False})).world_size == 1
    assert "warning: --no-admission overrules an estimate: this run does not fit" in capsys.readouterr().err


def test_too_slow() -> None:
    config = run(seq_length=65536, max_step_minutes=0.5)
    with pytest.raises(ResourceError) as refused:
        admit(config, 1, Room(1000 * GIB, 1000 * GIB), LAPTOP_FLOPS)
    message = str(refused.value)
    assert "too slow" in message and "above --max-step-minutes 0.5" in message
    assert "raise --max-step-minutes" in message
    admit(config.override({"seq_length": advice(message)}), 1, Room(1000 * GIB, 1000 * GIB), LAPTOP_FLOPS)
    admit(config.override({"max_step_minutes": 60.0}), 1, Room(1000 * GIB, 1000 * GIB), LAPTOP_FLOPS)


def test_too_large_at_any_length() -> None:
    config = RunConfig(model=preset("gpt-65b"))
    with pytest.raises(ResourceError, match=r"no sequence length fits.*--tp, --cp and --pp.*smaller --model"):
        admit(config, 1, Room(16 * GIB, 16 * GIB), 1e15)


def test_ranks_of_one_node_share_its_memory() -> None:
    """Both stages fit a node of their own, and one memory of the size of both, but no smaller one."""
    config = run(seq_length=16384, pp=2, gbs=4)
    stages = [memory_account(config, 2, stage).total for stage in (0, 1)]
    assert stages[0] > stages[1]
    assert admit(config, 2, Room(sum(stages), sum(stages), 2), LAPTOP_FLOPS).shared_bytes == sum(stages)
    assert admit(config, 2, Room(stages[0], stages[0]), LAPTOP_FLOPS).shared_bytes == stages[0]
    with pytest.raises(ResourceError):
        admit(config, 2, Room(sum(stages) - 1, sum(stages) - 1, 2), LAPTOP_FLOPS)


V2 = {"memory.current": 300, "memory.stat": "anon 200\ninactive_file 50"}
V1 = {"memory.usage_in_bytes": 300, "memory.stat": "inactive_file 7\ntotal_inactive_file 50"}


@pytest.mark.parametrize(("own", "name"), [("0::/a/b\n", "memory.max"), ("5:memory:/a/b\n", "memory.limit_in_bytes")])
def test_the_total_is_the_least_limit_above_us(
    tmp_path: Path, own: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = "" if name == "memory.max" else "memory/"
    groups = {f"{base}a/b": {name: 9 << 20}, f"{base}a": {name: 8 << 20}}
    control_groups(tmp_path, own, groups, monkeypatch)
    assert total_host_bytes() == 8 << 20
    control_groups(tmp_path, None, {}, monkeypatch)
    assert total_host_bytes() > 8 << 20


@pytest.mark.parametrize(
    ("own", "groups", "available"),
    [
        ("0::/a/b\n", {"a/b": {"memory.max": 1000, **V2}}, 750),
        (
            "0::/a/b\n",
            {"a/b": {"memory.max": "max", **V2}, "a": {"memory.max": 400, **V2}, "": {"memory.max": 900, **V2}},
            150,
        ),
        ("0::/only/on/the/host\n", {"": {"memory.max": 1000, **V2}}, 750),
        ("9:name=systemd:/\n4:cpu,memory:/job\n0::/\n", {"memory/job": {"memory.limit_in_bytes": 1000, **V1}}, 750),
        ("0::/\n", {"": {"memory.max": 100, **V2}}, 0),
    ],
    ids=["droppable cache is free", "tightest parent", "container that is the root", "version 1", "exhausted"],
)
def test_a_group_leaves_what_its_limit_leaves(
    own: str, groups: dict[str, dict[str, object]], available: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    control_groups(tmp_path, own, groups, monkeypatch)
    assert available_host_bytes() == available


@pytest.mark.parametrize("own", ["0::/a\n", ""])
def test_without_a_limit_the_machine_decides(own: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    control_groups(tmp_path, own, {"a": {"memory.max": "max", **V2}}, monkeypatch)
    assert available_host_bytes() == pytest.approx(psutil.virtual_memory().available, rel=0.2)
    control_groups(tmp_path, None, {}, monkeypatch)
    assert available_host_bytes() > 0
