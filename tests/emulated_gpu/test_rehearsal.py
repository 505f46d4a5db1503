"""`memo rehearse` of small runs: what it tells is what the same program takes; memory that runs out is an answer."""

import json
from pathlib import Path
from typing import Any

import pytest
from custom_layers import PARALLEL
from own_process import run
from pairs import some_pairs, write_pairs

from memo.cli.main import main
from memo.estimate.machines import find_hardware
from memo.rehearsal.request import emulated_device
from memo.rehearsal.text import REASONS
from memo.units import MIB

SMALL = "--gpu h100-80 --gpus 2 --model llama-tiny --seq-len 16384 --tp 2 --global-batch-size 2 --clip-grad 1e6"
"""Two microbatches of one sequence."""
MOST_OFF = 0.005
"""Share by which the foreseen memory of two layers may be off: where the backward of the embedding needs most, its sums
of segments are counted for more different tokens than mock data has."""


def rehearsed(flags: str, capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    assert main(["rehearse", "--json", *SMALL.split(), *flags.split()]) == 0
    found: list[dict[str, Any]] = json.loads(capsys.readouterr().out)
    return found


def in_torch(foreseen: dict[str, int]) -> int:
    """The bytes of the device that torch allocates."""
    return sum(foreseen[name] for name in foreseen if name not in ("host", "context", "communication"))


THE_SAME_RUN = """
    import json, torch, memo
    from memo.emulated_gpu.face import EmulatedGpu
    options = dict(mock_data=True, seq_length=16384, simulate_world="tp=2", global_batch_size=2, clip_grad=1e6,
                   num_threads=1, profile_cache="off", device="cuda", progress=False, admission=False, FLOW)
    with memo.Trainer("llama-tiny", **options) as trainer:
        while trainer.parts.transients and trainer.parts.transients.is_learning:
            trainer.step()
        trainer.step()
        EmulatedGpu().clear()
        torch.cuda.reset_peak_memory_stats()
        for _ in range(2):
            step_time_s = trainer.step().step_time_s
        stats, planned = torch.cuda.memory_stats(), trainer.parts.transients
        print(json.dumps({
            "allocated_bytes": stats["allocated_bytes.all.peak"],
            "reserved_bytes": stats["reserved_bytes.all.peak"],
            "pinned_bytes": EmulatedGpu().taken_bytes().get("pinned", 0),
            "step_time_s": step_time_s,
            "hits": planned and planned.statistics().hits,
        }))
"""
DEVICE = emulated_device(2, find_hardware("h100-80"), "h100-80")
FLOWS = {
    "plain": ("--offload-alpha off --memory-planner off", "offload_alpha='off', memory_planner='off'"),
    "swapped": ("--offload-alpha 0.5 --offload-policy paper", "offload_alpha=0.5, offload_policy='paper'"),
    "streamed and planned": (
        "--offload-alpha 1 --offload-states all --memory-planner auto --memory-planner-min-bytes 4096",
        "offload_alpha=1.0, offload_states='all', memory_planner='auto', memory_planner_min_bytes=4096",
    ),
}


@pytest.mark.parametrize(
    "flags",
    [
        "--tp 8 --window-size 4096",
        "--tp 2 --cp 4 --window-size 1000 --layer-types sliding,full --offload-alpha 0.5 --attention-sinks",
        "--tp 2 --cp 4 --cp-comm-type a2a --window-size 128 --offload-alpha 0.5 --offload-granularity tile",
        "--tp 2 --cp 4 --cp-comm-type all_gather --recompute-granularity full --window-size 4096 "
        "--layer-types full,sliding",
        "--tp 2 --cp 4 --lora-rank 16 --offload-alpha 0.5",
        "--tp 8 --lora-rank 64 --recompute-granularity full",
        "--tp 2 --cp 4 --cp-comm-type a2a --lora-rank 16 --offload-alpha 0.5 --offload-granularity tile",
        "--cp 8 --lora-rank 16 --data-parallel-sharding-strategy optim_grads_params --offload-states all",
        "--tp 4 --freeze *embedding.weight,layers.0.* --offload-alpha off",
        "--tp 8 --lora-rank 16 --quantize nf4 --offload-alpha 0.5",
        "--tp 2 --cp 4 --lora-rank 16 --quantize int8 --recompute-granularity full",
        "--tp 8 --gbs 2 --gradient-accumulation-order breadth_first --recompute-granularity full",
    ],
)
def test_windows_adapters_and_frozen_layers_are_foreseen(flags: str, capsys: pytest.CaptureFixture[str]) -> None:
    """64K tokens of two layers of Llama 8B, with cuDNN: bytes that torch allocates. With windows over a ring the
    last rank needs most. With a window and nothing that moves, the account has up to 40 MiB that no run needs."""
    run = "--gpus 8 --hardware h100-80 --model llama-3.1-8b --num-layers 2 --seq-length 64K"
    assert main(["rehearse", "--json", *run.split(), *flags.split()]) == 0
    (found,) = json.loads(capsys.readouterr().out)
    taken, foreseen = found["steady"]["allocated_bytes"], in_torch(found["foreseen"])
    spare = (40 << 20) if flags == "--tp 8 --window-size 4096" else 0
    assert (1 - MOST_OFF) * taken <= foreseen <= (1 + MOST_OFF) * taken + spare
    assert found["planned"]["fallbacks"] == 0 and found["attention"] == "cudnn"


def test_halves_of_a_custom_layer_are_counted_as_gpus_run_them(capsys: pytest.CaptureFixture[str]) -> None:
    """Under autograd, with the bounds of CPUs (docs/custom_model.md); with norms composed as on CPUs the account would
    be 15 % larger."""
    run = "--gpus 8 --hardware h100-80 --model llama-3.1-8b --num-layers 2 --seq-length 64K --tp 8 --offload-alpha off"
    assert main(["rehearse", "--json", *run.split(), "--custom-layer", PARALLEL]) == 0
    (found,) = json.loads(capsys.readouterr().out)
    assert -0.015 <= in_torch(found["foreseen"]) / found["steady"]["allocated_bytes"] - 1 <= 0.05


def test_forwards_before_a_step_take_the_memory_of_its_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Those of training on preferences, which no plan has: beside it, torch would allocate 10 % more."""
    pairs = write_pairs(tmp_path / "pairs", some_pairs(8, 256, 2000), 257)
    run = "--gpus 8 --hardware h100-80 --model llama-3.1-8b --num-layers 2 --seq-length 64K --gbs 2 --lora-rank 16"
    how = f"--tp 8 --offload-alpha 1 --preference dpo --tokenizer byte --data-path {pairs}"
    assert main(["rehearse", "--json", *run.split(), *how.split()]) == 0
    (found,) = json.loads(capsys.readouterr().out)
    assert found["steady"]["allocated_bytes"] == pytest.approx(in_torch(found["foreseen"]), rel=MOST_OFF)
    assert found["planned"]["fallbacks"] == 0


@pytest.mark.parametrize("flow", FLOWS)
def test_what_is_told_is_what_the_run_takes(flow: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags, fields = FLOWS[flow]
    (found,) = rehearsed(flags, capsys)
    done = run(tmp_path, THE_SAME_RUN.replace("FLOW", fields), DEVICE)
    assert done.returncode == 0, done.stderr
    expected = json.loads(done.stdout.splitlines()[-1])
    steady = found["steady"]
    assert steady["allocated_bytes"] == expected["allocated_bytes"] > 8 * MIB
    # A rehearsal does not measure a layer. Measuring leaves up to one more of the blocks of 20 MiB that torch takes for
    # tensors of 1 to 10 MiB, and, by the time at which Python collects garbage (3 runs of 32, none with it disabled),
    # one more of the blocks of 2 MiB for smaller tensors.
    assert steady["reserved_bytes"] == pytest.approx(expected["reserved_bytes"], abs=(20 + 2) * MIB)
    assert steady["reserved_bytes"] >= steady["allocated_bytes"]
    assert expected["pinned_bytes"] == steady["pinned_bytes"]
    assert steady["times"]["step_time_s"] == pytest.approx(expected["step_time_s"], rel=1e-3)
    assert in_torch(found["foreseen"]) == pytest.approx(steady["allocated_bytes"], rel=0.1)
    assert found["verdict"] == "fits" and found["shortage"] is None and found["refusal"] is None
    assert any(set(wait["where"]) & set(REASONS) for wait in steady["waits"])
    if expected["hits"] is not None:
        assert found["planned"]["hits"] == expected["hits"] > 0 == found["planned"]["fallbacks"]
        assert steady["num_device_mallocs"] == 0


@pytest.mark.parametrize(
    ("flags", "verdict", "says"),
    [
        ("--offload-alpha off --gpu-memory-gib 3", "fits", ""),
        ("--offload-alpha off --gpu-memory-gib 2.45", "oom", "What helps: "),
        ("--offload-alpha off --gpu-memory-gib 2", "oom", "out of memory before the first step"),
        ("--offload-alpha 1 --host-memory-gib 2", "fits", ""),
        ("--offload-alpha 1 --host-memory-gib 0.002", "oohm", "available are "),
    ],
)
def test_it_fits_or_not_by_the_memory_there_is(
    flags: str, verdict: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (found,) = rehearsed(flags, capsys)
    assert found["verdict"] == verdict
    assert (found["steady"] is None) == (verdict != "fits")
    assert "other processes" not in (found["refusal"] or "")
    if found["shortage"] is not None:
        assert says in found["shortage"]["message"] and "--save" not in found["shortage"]["message"]
        assert found["shortage"]["memory"] == {"oom": "device", "oohm": "host"}[verdict]


def test_a_single_gpu_has_the_link_to_the_host_for_itself(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The clock copies at `alone_gb_per_s`, as `memo plan` foresees."""
    flags = "--gpus 1 --model llama-tiny --seq-len 16384 --global-batch-size 2 --offload-alpha 1 --gpu"
    hidden = []
    for alone_gb_per_s in (50, 5):
        machine = tmp_path / f"{alone_gb_per_s}.toml"
        machine.write_text(f'like = "h100-80"\nalone_gb_per_s = {alone_gb_per_s}\n')
        assert main(["rehearse", "--json", *flags.split(), str(machine)]) == 0
        (found,) = json.loads(capsys.readouterr().out)
        hidden.append(found["steady"]["times"]["hidden_share"])
    assert hidden[0] > 2 * hidden[1] > 0


def test_auto_takes_no_memory_of_states_that_are_made_after_the_plan(capsys: pytest.CaptureFixture[str]) -> None:
    """On 43 GiB a smaller share moves than the link could take; moments, 14 GiB, exist from the first step on."""
    run = "--gpus 1 --gpu h100-80 --gpu-memory-gib 43 --model llama-3.1-8b --num-layers 4 --seq-length 64K"
    assert main(["rehearse", "--json", *run.split(), "--offload-alpha", "auto"]) == 0
    (found,) = json.loads(capsys.readouterr().out)
    assert found["verdict"] == "fits" and found["planned"]["fallbacks"] == 0
    assert 0 < sum(found["tiles"].values()) < 24


ONE_AFTER_THE_OTHER = """
    import gc, torch, memo
    options = dict(mock_data=True, seq_length=16384, simulate_world="tp=2", global_batch_size=2, num_threads=1,
                   profile_cache="off", device="cuda", progress=False, offload_alpha="auto", memory_planner="off")
    for _ in range(2):
        with memo.Trainer("llama-tiny", **options) as trainer:
            print(trainer.parts.chosen_swap.problem.device_bytes)
            trainer.step()
        del trainer
        gc.collect()
        print(torch.cuda.memory_allocated(), torch.cuda.memory_reserved())
"""


def test_a_second_run_of_a_process_takes_what_the_first_has_left_in_torchs_cache(tmp_path: Path) -> None:
    done = run(tmp_path, ONE_AFTER_THE_OTHER, DEVICE)
    assert done.returncode == 0, done.stderr
    first, allocated, reserved, second, *_ = map(int, done.stdout.split())
    assert reserved - allocated > 100 * MIB, "what is cached"
    assert second == pytest.approx(first - allocated, abs=MIB), "cuBLAS keeps its workspace"


def test_stages_that_differ_and_a_trace_of_each(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = f"--num-layers 8 --pp 2 --tp 1 --offload-alpha 0.5 --trace-out {tmp_path}/step.json"
    first, last = rehearsed(flags, capsys)
    assert [(found["rank"], found["stage"]) for found in (first, last)] == [(0, 0), (1, 1)]
    assert first["steady"]["allocated_bytes"] != last["steady"]["allocated_bytes"]
    for found in (first, last):
        assert found["trace"] == f"{tmp_path}/step.rank{found['rank']}.json"
        events = json.loads(Path(found["trace"]).read_text())["traceEvents"]
        rows = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
        at_work = {rows[event["tid"]] for event in events if event["ph"] == "X"}
        assert {"compute", "offload", "prefetch", "pp"} <= at_work
        took_s = max(event["ts"] + event["dur"] for event in events if event["ph"] == "X") / 1e6
        assert took_s == pytest.approx(found["steady"]["times"]["step_time_s"], rel=0.2)


def test_a_run_that_memo_train_refuses_in_its_own_process(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as refused:
        main(["rehearse", *SMALL.split(), "--data-path", "/nowhere/data", "--vocab-size", "300"])
    assert refused.value.code == 2
    message = capsys.readouterr().err.splitlines()[-1]
    assert message.startswith("error: ") and "/nowhere/data" in message


def test_a_layer_that_was_measured_elsewhere_serves(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of the same layer; the number of threads, torch and the GPU are those of the machine that it was measured on."""
    profile = tmp_path / "profile.json"
    program = f"""
        import memo.cli.main as cli
        cli.main("profile --model llama-tiny --seq-len 16384 --simulate-world tp=2 --device cuda --num-threads 2"
                 " --profile-cache off --out {profile}".split())
    """
    assert run(tmp_path, program).returncode == 0
    (found,) = rehearsed(f"--layer-profile {profile} --offload-alpha 0.5", capsys)
    assert found["layer_times"] == f"{profile}, measured" and found["verdict"] == "fits"
    with pytest.raises(SystemExit) as refused:
        main(["rehearse", *SMALL.split(), "--layer-profile", str(profile), "--seq-len", "8192"])
    assert refused.value.code == 2
    assert "was not measured for this run: seq_length is 16384 there and 8192 here" in capsys.readouterr().err
