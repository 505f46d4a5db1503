"""A timed device: CUDA's rules of overlap and order in virtual time, the same under every schedule.

Without numbers, so that large products and copies cost these tests nothing; launches take a round time.
"""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest
import virtual_time
from own_process import run, start
from virtual_time import MANY, NUM_BYTES, ROWS, SIZE, SLEEP_S

from memo.emulated_gpu.launch import Device
from memo.emulated_gpu.timing import Model
from memo.estimate.machines import find_hardware

SCHEDULES = (("eager", 0), ("lazy", 0), ("random", 0))
LAUNCH_S = 4e-6
TIMED = Device(timed="h100-80", host_launch_s=LAUNCH_S, without_numbers=True, memory_gib=180, host_memory_gib=600)
MODEL = Model(find_hardware(TIMED.timed))
QUESTION_S = 1e-6

PRODUCT_S = MODEL.seconds("product", "BFloat16", SIZE, SIZE, SIZE)
UP_S = MODEL.seconds("prefetch", "", NUM_BYTES)
ROWS_BYTES, INDICES_BYTES = 2 * ROWS * SIZE, 8 * ROWS
ADD_S = MODEL.seconds("memory", "", 2 * 8 * 4)


@pytest.fixture(scope="module")
def by_schedule(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, float]]:
    found = {}
    for policy, seed in SCHEDULES:
        device = dataclasses.replace(TIMED, schedule=policy, seed=seed)
        done = run(tmp_path_factory.mktemp("timed"), Path(virtual_time.__file__), device)
        assert done.returncode == 0, done.stderr
        found[f"{policy}{seed}"] = json.loads(done.stdout)
    return found


def test_a_schedule_changes_no_time(by_schedule) -> None:
    first, *others = by_schedule.values()
    for other in others:
        assert other == first


EXPECTED = {
    "sleeps of two streams": 2 * LAUNCH_S + SLEEP_S,
    "sleeps of one stream": LAUNCH_S + 2 * SLEEP_S,
    "one product": LAUNCH_S + PRODUCT_S,
    "products of two streams": LAUNCH_S + 2 * PRODUCT_S,
    "one copy up": LAUNCH_S + UP_S,
    "copies up of two streams": LAUNCH_S + 2 * UP_S,
    "copies up and down": 2 * LAUNCH_S + UP_S,
    "copy under a product": LAUNCH_S + max(UP_S, PRODUCT_S + LAUNCH_S),
    "copy within the device": LAUNCH_S + MODEL.seconds("memory", "", 2 * NUM_BYTES),
    "rows of a table": LAUNCH_S + MODEL.seconds("memory", "", 2 * ROWS_BYTES + INDICES_BYTES),
    "added to rows of a table": LAUNCH_S + MODEL.seconds("memory", "", 3 * ROWS_BYTES + 3 * INDICES_BYTES),
    "a stream that waits": LAUNCH_S + 2 * SLEEP_S,
    "the legacy stream and a blocking one": LAUNCH_S + 2 * SLEEP_S,
    "many kernels": MANY * LAUNCH_S + ADD_S,
    "many kernels, each waited for": MANY * (LAUNCH_S + ADD_S),
    "queued, not waited for": LAUNCH_S,
    "between events": SLEEP_S,
}


@pytest.mark.parametrize("what", EXPECTED)
def test_time_is_what_the_model_and_the_order_of_work_give(by_schedule, what: str) -> None:
    assert ADD_S < LAUNCH_S < PRODUCT_S < UP_S
    assert by_schedule["lazy0"][what] == pytest.approx(EXPECTED[what], rel=1e-6)


def test_questions_are_answered_by_the_hosts_clock(by_schedule) -> None:
    """Whether work has run already does not matter: eager work has, and is not over."""
    assert by_schedule["eager0"]["answers"] == [False, False, False, False, True, True]


def test_a_loop_of_questions_takes_as_long_as_what_it_waits_for(by_schedule) -> None:
    asked_s = by_schedule["lazy0"]["a loop of questions"]
    assert LAUNCH_S + SLEEP_S <= asked_s < LAUNCH_S + SLEEP_S + 2 * QUESTION_S


TRAINING = """
    import dataclasses, json, memo
    options = dict(mock_data=True, num_layers=4, seq_length=4096, micro_batch_size=1, global_batch_size=2,
                   train_iters=3, num_threads=1, progress=False, attention_backend="flash", device="cuda",
                   offload_alpha=1.0, profile_cache="off")
    with memo.Trainer("llama-tiny", **options) as trainer:
        record = [trainer.step() for _ in range(3)][-1]
    print(json.dumps(dataclasses.asdict(record)))
"""


def test_the_meters_of_a_training_step_tell_virtual_time(tmp_path: Path) -> None:
    meters = []
    for policy, seed in SCHEDULES:
        done = run(tmp_path, TRAINING, dataclasses.replace(TIMED, schedule=policy, seed=seed))
        assert done.returncode == 0, done.stderr
        meters.append(json.loads(done.stdout.splitlines()[-1]))
    names = ("step_time_s", "layers_s", "copy_wait_s", "copies_s", "hidden_share", "mfu_percent")
    for other in meters[1:]:
        assert {name: other[name] for name in names} == {name: meters[0][name] for name in names}
    found = meters[0]
    assert 0 < found["layers_s"] < found["step_time_s"] < 1
    assert found["copies_s"] > 0 and 0.9 < found["hidden_share"] < 1  # the last layer's copy has nothing to hide under


RANKS = """
    import json, os, sys, time, torch, torch.distributed as dist
    rank, size, folder = int(os.environ["RANK"]), 2, sys.argv[1]
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=size)
    x = torch.ones(1 << 20, device="cuda")
    dist.all_reduce(x)
    torch.cuda.synchronize()
    print(time.perf_counter())
    if rank == 1:
        torch.cuda._sleep(int(1e-3 * 2e9))
    dist.all_reduce(x)
    torch.cuda.synchronize()
    print(time.perf_counter())
    if rank == 0:
        torch.cuda._sleep(int(2e-3 * 2e9))
        dist.send(x, 1)
    else:
        dist.recv(x, 0)
    torch.cuda.synchronize()
    print(time.perf_counter())
    dist.destroy_process_group()
"""


@pytest.mark.parametrize("schedule", ["eager", "lazy"])
def test_collectives_begin_when_the_last_rank_comes(tmp_path: Path, schedule: str) -> None:
    device = dataclasses.replace(TIMED, schedule=schedule)
    ranks = [start(tmp_path, RANKS, device, [str(tmp_path)], RANK=str(rank)) for rank in range(2)]
    assert [rank.wait() for rank in ranks] == [0, 0], [rank.err for rank in ranks]
    clocks = [[float(line) for line in rank.out.splitlines()] for rank in ranks]
    assert clocks[0] == pytest.approx(clocks[1], abs=2e-5)  # the watchdog's questions take the host some time
    begin_s, reduced_s, received_s = clocks[0]
    num_bytes = 4 << 20
    assert reduced_s - begin_s == pytest.approx(1e-3 + MODEL.seconds("all_reduce", "", num_bytes, 2, 1), rel=0.05)
    assert received_s - reduced_s == pytest.approx(2e-3 + MODEL.seconds("message", "", num_bytes, 2, 1), rel=0.05)


SIMULATED = """
    import json, memo
    options = dict(mock_data=True, num_layers=4, seq_length=65536, global_batch_size=1, train_iters=3, num_threads=1,
                   progress=False, device="cuda", simulate_world="tp=8", profile_cache="off", admission=False,
                   offload_alpha=1.0, attention_backend="flash")
    with memo.Trainer("gpt-7b", **options) as trainer:
        steps = [trainer.step() for _ in range(3)]
        from memo.emulated_gpu.face import EmulatedGpu
        print(json.dumps([steps[-1].step_time_s, steps[-1].hidden_share, EmulatedGpu().taken_s()]))
"""


def test_a_rank_of_eight_takes_what_memo_foresees(tmp_path: Path) -> None:
    """Messages of ranks that do not exist take their time. benchmarks/timed_accuracy.py explains the difference."""
    from memo.config import RunConfig, preset
    from memo.simulate import predict_step

    done = run(tmp_path, SIMULATED, TIMED)
    assert done.returncode == 0, done.stderr
    step_s, hidden_share, taken_s = json.loads(done.stdout.splitlines()[-1])
    config = dataclasses.replace(RunConfig(), model=preset("gpt-7b"))
    config = config.override({"num_layers": 4, "seq_length": 65536, "global_batch_size": 1, "tp": 8})
    expected = predict_step(config, 8, find_hardware(TIMED.timed), alpha=1.0)
    assert step_s == pytest.approx(expected.step_time_s, rel=0.1)
    assert hidden_share == pytest.approx(expected.hidden_share, abs=0.1)
    assert taken_s["simulated message"] > 0


def test_hardware_that_nobody_knows_is_refused() -> None:
    command = [sys.executable, "-m", "memo.emulated_gpu", "--timed", "h100-8", "--", "true"]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode != 0
    assert "no such machine: did you mean 'h100-80'?" in done.stderr
