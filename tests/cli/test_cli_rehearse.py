"""`memo rehearse` as far as no CUDA build of torch is needed: what it refuses, what it asks for, what it prints."""

import dataclasses
import importlib.util
import json
from collections.abc import Callable, Mapping
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest
import refusals

from memo.cli import rehearse
from memo.cli.main import main
from memo.config import RunConfig
from memo.config.run import CheckpointConfig
from memo.emulated_gpu.launch import Device
from memo.errors import EXIT_FAILED, EXIT_REFUSED, EmulatorError
from memo.estimate.hardware import visible_gib
from memo.estimate.memory_account import memory_account, reserved_under_plan
from memo.estimate.unseen_memory import CONTEXT
from memo.rehearsal import start
from memo.rehearsal.rehearsed import Planned, RehearsalShortage, Rehearsed, Steady, Times, Waits
from memo.rehearsal.request import RehearsalRequest
from memo.units import GIB, format_bytes

MACHINE = "--gpu h100-80 --gpus 8"
SMALL = f"{MACHINE} --model llama-tiny"
READ = Waits(1, "cudaEventSynchronize", ("memo.executor.cuda_streams.wait", "memo.train.agreement.read_numbers"))
STEADY = Steady(
    allocated_bytes=40 * GIB,
    reserved_bytes=44 * GIB,
    pinned_bytes=30 * GIB,
    num_device_mallocs=0,
    num_alloc_retries=0,
    waits=(READ,),
    times=Times(step_time_s=12.345, tgs=4321.0, mfu_percent=41.26, hidden_share=0.999),
)


class Stage:
    """In the place of the processes: keeps what was asked, and answers."""

    def __init__(self) -> None:
        self.asked: list[tuple[RehearsalRequest, Device]] = []
        self.answer: Callable[[Rehearsed], Rehearsed] = lambda found: found

    def start(self, request: RehearsalRequest, device: Device, variables: Mapping[str, str] | None = None) -> Rehearsed:
        self.asked.append((request, device))
        config = request.config.override({"params_dtype": "bf16", "vocab_size": 512, "offload_alpha": "off"})
        found = Rehearsed(
            rank=config.parallel.simulate_rank,
            stage=0,
            device_bytes=79 * GIB,
            host_bytes=256 * GIB,
            foreseen=memory_account(config, 8, 0),
            parameters=1_000_000,
            attention="cudnn",
            took_s=3.0,
            steady=STEADY,
        )
        return self.answer(found)


@pytest.fixture
def stage(monkeypatch: pytest.MonkeyPatch) -> Stage:
    made = Stage()
    monkeypatch.setattr(rehearse, "find_torch", Path)
    monkeypatch.setattr(rehearse, "start", made.start)
    return made


def refusal(flags: str, capsys: pytest.CaptureFixture[str]) -> str:
    return refusals.refusal(["rehearse", *flags.split()], capsys)


def test_a_trace_without_a_folder_is_refused_before_anything_starts(
    stage: Stage, capsys: pytest.CaptureFixture[str]
) -> None:
    says = refusal(f"{SMALL} --trace-out nowhere/step.json", capsys)
    assert "--trace-out nowhere/step.json: nowhere is no folder" in says and not stage.asked


def test_a_cpu_build_of_torch_is_refused_with_the_command_that_installs_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "lib").mkdir()
    (tmp_path / "version.py").write_text("__version__ = '2.13.0+cpu'\n")
    real, spec = importlib.util.find_spec, ModuleSpec("torch", None, origin=str(tmp_path / "__init__.py"))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: spec if name == "torch" else real(name, *rest))
    message = refusal(SMALL, capsys)
    assert message.startswith("the emulated GPU needs a CUDA build of torch, and 2.13.0+cpu is none: pip install ")


def test_one_rank_of_each_stage_that_differs(stage: Stage) -> None:
    assert main(["rehearse", *f"{SMALL} --pp 4 --tp 2 --global-batch-size 4".split()]) == 0
    assert [request.config.parallel.simulate_rank for request, _ in stage.asked] == [0, 2, 6]
    assert {request.config.parallel.simulate_world for request, _ in stage.asked} == {"tp=2,cp=1,pp=4,dp=1"}
    stage.asked.clear()
    assert main(["rehearse", *f"{SMALL} --pp 4 --tp 2 --global-batch-size 4 --rank 5".split()]) == 0
    assert [request.config.parallel.simulate_rank for request, _ in stage.asked] == [5]


def test_the_rank_keeps_nothing_and_has_its_part_of_the_node(stage: Stage) -> None:
    flags = f"{SMALL} --tp 2 --save runs/a --save-interval 5 --log-jsonl a.jsonl --offload-host-memory-gib 64"
    flags += " --eval-interval 5 --eval-data-path data/e --data-path data/d --gpu-memory-gib 40 --host-memory-gib 100"
    flags += " --kernels triton --attention-backend te --max-step-minutes 7"
    assert main(["rehearse", *flags.split()]) == 0
    ((request, device),) = stage.asked
    config, plain = request.config, RunConfig()
    assert config.checkpoint == CheckpointConfig() and config.logging == dataclasses.replace(
        plain.logging, progress=False
    )
    assert (config.training.eval_interval, config.data.eval_data_path, config.data.data_path) == (0, None, ("data/d",))
    assert (config.memory.offload_host_memory_gib, config.memory.profile_cache) == (8, "off")
    assert (config.hardware.kernels, config.hardware.attention_backend) == ("torch", "flash")
    assert config.parallel.simulate_world == "tp=2,cp=1,pp=1,dp=4" and config.training.max_step_minutes == 7
    assert (device.memory_gib, device.host_memory_gib) == (pytest.approx(visible_gib(40)), 12.5)
    assert (device.name, device.capability) == ("NVIDIA H100 80GB HBM3", 90)
    assert device.context_gib == CONTEXT.foreseen / GIB
    assert device.without_numbers and device.num_devices == 1 and device.timed == "h100-80"


def test_a_machine_of_a_file_is_named_by_its_whole_path(
    stage: Stage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rehearsed process may be elsewhere."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ours.toml").write_text('like = "a100-40"\nmemory_gib = 48\n')
    assert main(["rehearse", *["--gpu", "ours.toml", "--gpus", "8", "--model", "llama-tiny"]]) == 0
    ((_, device),) = stage.asked
    assert (device.timed, device.capability) == (str(tmp_path / "ours.toml"), 80)
    assert (device.name, device.memory_gib) == ("NVIDIA A100-SXM4-40GB", pytest.approx(visible_gib(48)))


def test_a_stage_alone_has_no_bubbles(stage: Stage, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["rehearse", *f"{SMALL} --pp 2 --tp 2 --rank 0".split()]) == 0
    assert "% of the copies hidden, without the pipeline's bubbles\n" in capsys.readouterr().out


def test_what_is_asked_and_found_come_back_from_their_files(stage: Stage, tmp_path: Path) -> None:
    planned = Planned(hits=3, arena_bytes=5, reason="none")
    stage.answer = lambda found: dataclasses.replace(found, tiles={"qkv": 3}, planned=planned)
    assert main(["rehearse", *f"{SMALL} --offload-alpha 0.5 --mock-data".split()]) == 0
    request = stage.asked[0][0]
    request.save(str(tmp_path / "request.json"))
    assert RehearsalRequest.load(str(tmp_path / "request.json")) == request
    found = stage.start(*stage.asked[0])
    found.save(str(tmp_path / "found.json"))
    assert Rehearsed.load(str(tmp_path / "found.json")) == found


def test_what_is_reserved_is_foreseen_under_a_plan(stage: Stage, capsys: pytest.CaptureFixture[str]) -> None:
    planned = Planned(hits=3, arena_bytes=5)
    stage.answer = lambda found: dataclasses.replace(found, planned=planned)
    assert main(["rehearse", *SMALL.split()]) == 0
    expected = format_bytes(reserved_under_plan(stage.start(*stage.asked[0]).foreseen))
    assert f"device, reserved    44.00 GiB, foreseen {expected}, of 76.84 GiB\n" in capsys.readouterr().out


def test_lines_for_people(stage: Stage, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["rehearse", *f"{SMALL} --tp 8 --num-query-groups 8 --num-attention-heads 8".split()]) == 0
    captured = capsys.readouterr()
    assert captured.err == "rehearsing rank 0 of 8, without a GPU ...\n"
    rows = {line[2:22].strip(): line[22:] for line in captured.out.splitlines() if line.startswith("  ")}
    assert rows["device, allocated"].startswith("40.00 GiB, foreseen ")
    assert rows["device, reserved"] == "44.00 GiB of 76.84 GiB"
    assert rows["host, pinned"].endswith(", of 256.00 GiB that are this rank's")
    assert rows["device mallocs"] == "0 in the last 2 steps"
    assert rows["host waits"] == "1 in a step"
    assert "1 x loss, gradient norm, stop and failure come to the host together" in captured.out
    assert rows["verdict"] == "fits: 32.84 GiB of the device are left"
    assert "NCCL's buffers" in captured.out and "2.16 GiB foreseen for them, from published figures" in captured.out
    assert rows["step, modelled"] == "12.3 s, 4,321 tokens/GPU/s, MFU 41.3 %, 99 % of the copies hidden"
    assert captured.out.count("\n") < 20


def test_what_stands_for_other_kernels_and_what_memo_train_would_refuse_is_told(
    stage: Stage, capsys: pytest.CaptureFixture[str]
) -> None:
    stage.answer = lambda found: dataclasses.replace(found, refusal="it is too slow")
    assert main(["rehearse", *f"{SMALL} --kernels triton".split()]) == 0
    printed = capsys.readouterr().out
    assert "--kernels triton: kernels of torch (torch) ran in its place" in printed
    assert "  memo train          would refuse to start it: it is too slow\n" in printed


def test_kernels_that_a_run_may_replace_are_told(stage: Stage, capsys: pytest.CaptureFixture[str]) -> None:
    told = {}
    models = ("qwen3.5-tiny", "qwen3.5-tiny --delta-backend torch", "gemma-2-tiny")
    for flags in (SMALL, *(f"{MACHINE} --model {model}" for model in (*models, "gemma-4-tiny --full-kv-channels 288"))):
        assert main(["rehearse", *flags.split()]) == 0
        told[flags] = "torch's operations are foreseen" in capsys.readouterr().out
        assert main(["rehearse", "--json", *flags.split()]) == 0
        found = json.loads(capsys.readouterr().out)
        assert [each["foreseen_kernels"] is not None for each in found] == [told[flags]] * len(found)
    assert list(told.values()) == [False, True, False, True, True]


@pytest.mark.parametrize(
    ("shortage", "verdict"),
    [
        (
            RehearsalShortage("device", "in step 1", "out of memory on rank 0", 3 * GIB),
            "oom: out of device memory in step 1, at least 3.00 GiB short",
        ),
        (
            RehearsalShortage("host", "before the first step", "states need more"),
            "oohm: out of host memory before the first step\n",
        ),
    ],
)
def test_memory_that_runs_out_is_an_answer(
    shortage: RehearsalShortage, verdict: str, stage: Stage, capsys: pytest.CaptureFixture[str]
) -> None:
    stage.answer = lambda found: dataclasses.replace(found, steady=None, shortage=shortage)
    assert main(["rehearse", *SMALL.split()]) == 0
    printed = capsys.readouterr().out
    assert f"  verdict             {verdict}" in printed and f"  why                 {shortage.message}\n" in printed
    assert "allocated" not in printed


def test_near_the_end_of_the_device_is_unsure(stage: Stage, capsys: pytest.CaptureFixture[str]) -> None:
    near = dataclasses.replace(STEADY, reserved_bytes=int(76.7 * GIB), num_alloc_retries=2)
    stage.answer = lambda found: dataclasses.replace(found, steady=near)
    assert main(["rehearse", *SMALL.split()]) == 0
    printed = capsys.readouterr().out
    assert (
        "MiB of the device are left, and what is not seen may take more" in printed
        and "  verdict             unsure: " in printed
    )
    assert "2 times nothing was free and all that lay unused was given back" in printed


def test_the_same_for_programs(stage: Stage, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["rehearse", *f"{SMALL} --json".split()]) == 0
    (found,) = json.loads(capsys.readouterr().out)
    assert found["verdict"] == "fits" and found["steady"]["reserved_bytes"] == 44 * GIB
    assert found["foreseen"]["context"] > 2 * GIB


@pytest.mark.parametrize(
    ("status", "said", "message", "exit_status"),
    [
        (2, "a warning\nerror: --x is 3: give 4\n", "--x is 3: give 4", EXIT_REFUSED),
        (3, "error: a disk is full", "a disk is full", EXIT_FAILED),
        (1, "Traceback\nerror", "the rehearsed process ended with status 1:\nTraceback\nerror", EXIT_FAILED),
        (-9, "", "the rehearsed process ended with status -9:\n", EXIT_FAILED),
    ],
)
def test_how_a_process_ends_is_how_the_command_ends(status: int, said: str, message: str, exit_status: int) -> None:
    error = start._failure(status, said)
    assert (str(error), error.exit_status) == (message, exit_status)
    assert isinstance(error, EmulatorError) is (status not in (EXIT_REFUSED, EXIT_FAILED))
