"""Watching a run: what its log and its traces hold, and what it says when memory does not suffice."""

import dataclasses
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from processes import alone
from ranks import run_ranks
from trainers import SMALL_RUN

import memo
from memo.artifacts.run_log import RunLog, StepRecord
from memo.config import RunConfig
from memo.errors import EXIT_FAILED, OutOfMemory
from memo.estimate.program.memory import program_memory
from memo.mesh import Mesh, RankGrid
from memo.parallel import collectives
from memo.train.oom import Shortage, advice, asked_bytes, is_out_of_memory
from memo.train.trainer import Trainer
from memo.train.watching import memory_forecast
from memo.units import GIB, MIB

ROOT = Path(__file__).parents[2]
RUN: dict[str, Any] = {**SMALL_RUN, "num_layers": 3, "num_attention_heads": 4, "vocab_size": 61, "global_batch_size": 2}
RUN |= {"train_iters": 3, "mock_data": True, "offload_alpha": "off"}


def small(**overrides: Any) -> Trainer:
    return memo.Trainer("gpt-tiny", **{**RUN, **overrides})


def records_of(trainer: Trainer) -> list[StepRecord]:
    found: list[StepRecord] = []
    trainer.callbacks.append(found.append)
    trainer.train()
    return found


# The log.


def test_memory_by_component_is_what_lies_in_memory() -> None:
    trainer = small(offload_alpha=0.5)
    records = records_of(trainer)
    parts, chosen = trainer.parts, trainer.parts.chosen_swap
    assert chosen is not None and parts.swap is not None
    weights = sum(parameter.nbytes for parameter in parts.data_parallel.parameters.values())
    for record in records:
        assert record.weights_bytes is not None and record.optimizer_bytes is not None
        assert weights <= record.weights_bytes < 1.02 * weights  # buckets are padded; fp32, so gradients are as wide
        assert record.gradients_bytes == record.weights_bytes
        assert 2 * weights <= record.optimizer_bytes < 2.02 * weights  # two moments and no masters
        assert record.rounding_buffers_bytes == chosen.solution.device_bytes
        assert record.host_records_bytes == chosen.solution.host_bytes > 0
        assert record.transient_peak_bytes is not None and record.transient_peak_bytes >= 0


def test_narrow_weights_have_masters() -> None:
    record = small(params_dtype="bf16").step()
    assert record.weights_bytes is not None and record.gradients_bytes == 2 * record.weights_bytes
    assert record.optimizer_bytes is not None and record.optimizer_bytes > 2.95 * record.gradients_bytes
    assert (record.rounding_buffers_bytes, record.host_records_bytes) == (0, 0)


def test_copies_are_timed_every_log_interval_and_change_no_bit() -> None:
    timed = records_of(small(offload_alpha=0.5, log_interval=2, train_iters=4))
    never = records_of(small(offload_alpha=0.5, log_interval=100, train_iters=4))
    assert [record.lm_loss for record in timed] == [record.lm_loss for record in never]
    names = ("layers_s", "copy_wait_s", "copies_s", "hidden_share")
    for record in [*never, timed[0], timed[2]]:
        assert [getattr(record, name) for name in names] == [None] * 4
    for record in (timed[1], timed[3]):
        assert record.copies_s is not None and record.layers_s is not None and record.copy_wait_s is not None
        assert 0 < record.copies_s < record.step_time_s and 0 < record.layers_s < record.step_time_s
        assert 0 <= record.copy_wait_s < record.step_time_s
        assert record.hidden_share == 0.0  # the computing thread copies


def test_without_swapping_nothing_is_timed() -> None:
    assert {record.hidden_share for record in records_of(small())} == {None}


def test_a_saved_run_tells_what_ran_and_goes_on_in_the_same_log(tmp_path: Path) -> None:
    trainer = small(save=str(tmp_path), offload_alpha=0.5, train_iters=2)
    first = records_of(trainer)
    log = RunLog.load(tmp_path)
    assert list(log.steps) == first and log.header is not None and log.header.swap is not None
    assert log.header.config == json.loads(json.dumps(dataclasses.asdict(trainer.config)))
    assert log.header.layout == {"tp": 1, "cp": 1, "pp": 1, "dp": 1, "world_size": 1, "microbatches": 2}
    chosen = trainer.parts.chosen_swap
    assert chosen is not None and log.header.swap.moves
    assert log.header.swap.shares == dict.fromkeys(chosen.solution.tiles, 0.5)
    forecast, found = log.header.memory_forecast, dataclasses.asdict(first[-1])
    lasting = ("weights", "gradients", "rounding_buffers", "host_records")
    assert {name: forecast[name] for name in lasting} == {name: found[f"{name}_bytes"] for name in lasting}
    assert forecast["optimizer"] == found["optimizer_bytes"] - step_counter_bytes(trainer)
    counted = program_memory(trainer.config, 1, 0, chosen.solution.tiles)
    assert forecast["transient"] == counted.moment.num_bytes > 0
    # The forecast of a step: (forward, backward, recomputation) of 3 layers and 2 microbatches.
    swap = log.header.swap
    assert swap.layers_s == pytest.approx(6 * (swap.forward_s + swap.backward_s + swap.recompute_s), rel=1e-12)
    trainer.close()
    second = records_of(small(save=str(tmp_path), load=str(tmp_path), offload_alpha=0.5, train_iters=3))
    assert list(RunLog.load(tmp_path).steps) == [*first, *second]


def step_counter_bytes(trainer: Trainer) -> int:
    """Of AdamW: one fp32 number for each tensor that it updates, which no estimate counts."""
    return 4 * len(trainer.parts.optimizer.segments)


@pytest.mark.parametrize("dtype", ["fp64", "fp32", "bf16"])
def test_what_keeps_everything_is_foreseen_as_it_is(dtype: str) -> None:
    """Alpha auto has nothing to move here; states to the byte, the moment of the peak as counted."""
    trainer = small(offload_alpha="auto", params_dtype=dtype)
    forecast = memory_forecast(trainer.parts)
    last = dataclasses.asdict(records_of(trainer)[-1])
    assert (forecast["weights"], forecast["gradients"]) == (last["weights_bytes"], last["gradients_bytes"])
    assert forecast["optimizer"] == last["optimizer_bytes"] - step_counter_bytes(trainer)
    assert forecast["rounding_buffers"] == forecast["host_records"] == 0
    assert forecast["transient"] == program_memory(small(params_dtype=dtype).config, 1, 0).moment.num_bytes > 0


def test_planned_memory_stands_in_the_log(tmp_path: Path) -> None:
    trainer = small(save=str(tmp_path), memory_planner="auto", memory_planner_min_bytes=4096, train_iters=4)
    trainer.train()
    log, transients = RunLog.load(tmp_path), trainer.parts.transients
    assert log.header is not None and transients is not None
    if transients.planned is None:
        pytest.skip(f"no planned memory here: {transients.reason}")
    plan = transients.planned.plan
    assert log.header.memory_plan is not None
    assert log.header.memory_plan["arena_bytes"] == plan.arena_bytes
    last = log.steps[-1]
    assert last.planned_peak_bytes is not None and 0 < last.planned_peak_bytes <= plan.arena_bytes
    assert last.fallbacks == trainer.parts.transients.statistics().num_fallbacks  # type: ignore[union-attr]


# Traces.


def rows_of(path: Path) -> dict[str, list[dict[str, Any]]]:
    """Complete events by the name of their row; those of a row lie beside or within each other."""
    events = json.loads(path.read_text())["traceEvents"]
    names = {e["tid"]: e["args"]["name"] for e in events if e["ph"] == "M" and e["name"] == "thread_name"}
    rows: dict[str, list[dict[str, Any]]] = {name: [] for name in names.values()}
    for event in events:
        if event["ph"] == "X":
            rows[names[event["tid"]]].append(event)
    for row in rows.values():
        ends: list[float] = []
        for event in sorted(row, key=lambda e: (e["ts"], -e["dur"])):
            while ends and ends[-1] <= event["ts"] + 1e-3:
                ends.pop()
            ends.append(event["ts"] + event["dur"])
            assert ends == sorted(ends, reverse=True) or ends[-1] - ends[-2] < 1e-3, event
    return rows


def names_of(events: list[dict[str, Any]]) -> Counter[str]:
    return Counter(event["name"] for event in events)


def test_a_trace_without_swapping_shows_every_part_of_every_microbatch(tmp_path: Path) -> None:
    trainer, untraced = small(), small()
    trainer.step()
    trainer.trace(tmp_path / "trace.json", steps=2)
    rows = rows_of(tmp_path / "trace.json")
    assert list(rows) == ["compute", "offload", "prefetch", "tp", "cp", "pp", "dp"]
    parts = [" embedding", ":0", ":1", ":2", " loss"]
    expected = Counter({f"{kind}{m}{part}": 2 for kind in "FB" for m in range(2) for part in parts})
    expected += Counter({"step 2": 1, "step 3": 1, "optimizer": 2, "reduction": 2})
    assert names_of(rows["compute"]) == expected
    order = [event["name"] for event in sorted(rows["compute"], key=lambda e: e["ts"])][1:11]
    assert order == [f"F0{part}" for part in parts] + [f"B0{part}" for part in reversed(parts)]
    assert trainer.mesh.watch.listener is None
    assert all(not m._forward_hooks and not m._forward_pre_hooks for m in trainer.parts.chunks[0].modules())
    # The recorded steps were steps like any other.
    for _ in range(3):
        untraced.step()
    assert trainer.step().lm_loss == untraced.step().lm_loss


def test_a_trace_with_swapping_has_layers_copies_and_slots(tmp_path: Path) -> None:
    trainer = small(offload_alpha=0.5)
    trainer.trace(tmp_path / "trace.json")
    rows = rows_of(tmp_path / "trace.json")
    assert list(rows) == ["compute", "offload", "prefetch", "tp", "cp", "pp", "dp", "slot 0", "slot 1"]
    compute = names_of(rows["compute"])
    assert {compute[f"{kind}{m}:{layer}"] for kind in "FB" for m in range(2) for layer in range(3)} == {1}
    assert compute["F0 embedding"] == compute["B1 loss"] == 1
    assert names_of(rows["offload"]) == names_of(rows["prefetch"]) == {"0:0": 1, "1:0": 1}


LAYOUTS: list[tuple[dict[str, Any], dict[str, set[str]]]] = [
    (
        {"tp": 2, "pp": 2},
        {"tp": {"all_gather", "reduce_scatter", "all_reduce"}, "pp": {"send", "receive", "all_reduce"}},
    ),
    ({"cp": 2}, {"cp": {"exchange"}, "dp": {"reduce_scatter", "all_gather", "all_reduce"}}),
    (
        {"cp": 2, "cp_comm_type": "a2a", "offload_alpha": 0.5, "offload_tiles": 2},
        {"cp": {"all_to_all"}, "dp": {"reduce_scatter"}},
    ),
]


def _traced(folder: str, layout: dict[str, Any]) -> None:
    trainer = small(num_layers=2, global_batch_size=4, **layout)
    trainer.trace(Path(folder) / "trace.json")


@pytest.mark.parametrize(("layout", "expected"), LAYOUTS, ids=["tp pp", "cp dp", "a2a dp swapping"])
def test_messages_stand_in_the_row_of_their_axis(
    tmp_path: Path, layout: dict[str, Any], expected: dict[str, set[str]]
) -> None:
    run_ranks(4, _traced, str(tmp_path), layout)
    for rank in range(4):
        rows = rows_of(tmp_path / f"trace.rank{rank}.json")
        for axis in ("tp", "cp", "pp", "dp"):
            messages = [event for name, row in rows.items() if name.split()[0] == axis for event in row]
            names = set(names_of(messages))
            assert names >= expected.get(axis, set()) and bool(names) == (axis in expected), (rank, axis)
            assert all(event["args"]["bytes"] > 0 for event in messages)
            waits = [event for event in rows["compute"] if event["name"].startswith(f"wait {axis} ")]
            assert len(waits) == len(messages)  # each is waited for, however short


def _pending_work() -> list[str]:
    """Kinds of work that a gather over tp and one over a bare group return, watched or not."""
    mesh = Mesh(RankGrid(tp=2), dist.get_rank())
    x, found = torch.ones(2), []

    class Listener:
        def begin(self, row: str, name: str, num_bytes: int) -> "Listener":
            found.append(f"{row} {name} {num_bytes}")
            return self

        def waits(self) -> None:
            found.append("waits")

        def end(self) -> None:
            found.append("end")

    for group in (mesh.tp, dist.group.WORLD):
        for listener in (None, Listener()):
            mesh.watch.listener = listener
            _, work = collectives.all_gather_async(x, group)
            assert work is not None
            found.append(type(work).__name__)
            work.wait()
    try:
        dist.all_reduce(x, group=mesh.tp)
    except ValueError:
        found.append("refused")
    return found


def test_who_does_not_watch_pays_nothing_and_the_wrapper_is_no_group_of_torch() -> None:
    expected = ["Work", "tp all_gather 16", "_WatchedWork", "waits", "end", "Work", "Work", "refused"]
    assert run_ranks(2, _pending_work) == [expected, expected]


# Out of memory.

REFUSED = "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to "
REFUSED += "allocate 5000000000 bytes. Error code 12 (Cannot allocate memory)"

LIMITED = """
import resource, sys
from memo.train.entry import main
from memo.train.trainer import Trainer
from memo.train.watching import memory_forecast
train = Trainer.train
def limited(self):
    used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + 200 * 2**20, resource.RLIM_INFINITY))
    return train(self)
Trainer.train = limited
sys.exit(main(sys.argv[1:]))
"""


def test_a_process_whose_memory_ends_says_where_and_what_helps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """200 MiB more than the model are not enough for logits of 8192 tokens x 8000 words in fp32: 250 MiB."""
    flags = "--num-layers 1 --hidden-size 32 --num-attention-heads 4 --vocab-size 8000 --mock-data --seq-len 8192 "
    flags += "--train-iters 2 --loss-chunk-size 8192 --device cpu --num-threads 1 --peak-tflops 1 --no-progress "
    flags += "--offload-alpha off --numa-binding off"
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setenv("RANK", "0")
    with alone(tmp_path, ("program", LIMITED), flags.split()) as process:
        done = process.ended(0)
    assert done.status == EXIT_FAILED, done.errors
    (message,) = (line for line in done.errors.splitlines() if line.startswith("error: "))
    assert "Traceback" not in done.errors
    assert "out of memory on rank 0 in iteration 1, in the loss, which asked for 250.00 MiB: weights" in message
    assert "; no component is above what was foreseen, so the memory itself is smaller" in message
    assert "--loss-chunk-size 4096 (now 8192: tokens whose logits exist at once)" in message


@pytest.mark.parametrize(
    ("target", "place"),
    [
        ("memo.parallel.loss._reduce", "the loss"),
        ("memo.parallel.main_gradients.MainGradients.norm", "the optimizer's step"),
        ("memo.executor.tile_machine.column_forward", "a layer"),
        ("memo.train.feed.Feed.next_global_batch", "the step"),
    ],
)
def test_the_place_and_the_numbers(target: str, place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise RuntimeError(REFUSED)

    trainer = small()
    monkeypatch.setattr(target, refuse)
    with pytest.raises(OutOfMemory, match=f"on rank 0 in iteration 1, in {place}, which asked for 4.66 GiB") as error:
        trainer.train()
    text = str(error.value)
    assert "transient 4." in text and "foreseen" in text and "GiB above that" in text
    assert "--offload-alpha 0.5 (now off" in text and isinstance(error.value.__cause__, RuntimeError)


def test_another_error_of_a_step_stays_what_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("shapes do not match")

    monkeypatch.setattr("memo.parallel.loss._reduce", fail)
    with pytest.raises(RuntimeError, match="shapes do not match"):
        small().train()


def test_what_counts_as_out_of_memory() -> None:
    for error in (torch.OutOfMemoryError("CUDA out of memory."), MemoryError(), RuntimeError(REFUSED)):
        assert is_out_of_memory(error)
    assert is_out_of_memory(RuntimeError("std::bad_alloc"))
    assert not is_out_of_memory(RuntimeError("out of range")) and not is_out_of_memory(ValueError(REFUSED))
    assert asked_bytes(REFUSED) == 5_000_000_000
    assert asked_bytes("CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity") == 2.5 * GIB
    assert asked_bytes("std::bad_alloc") is None


def shortage(place: str = "a layer", scattered_bytes: int = 0, **used: int) -> Shortage:
    return Shortage(place, MIB, {"weights": MIB, "transient": MIB, **used}, {"weights": MIB}, "", scattered_bytes)


def test_the_component_that_grew_most_is_named() -> None:
    assert shortage().grown == "transient"
    assert shortage(host_records=9 * MIB).grown == "host_records"
    assert shortage(transient=0).grown is None
    hundredth = MIB // 100  # of what was foreseen, rounded down
    assert shortage(weights=MIB + hundredth, transient=0).grown is None
    assert shortage(weights=MIB + hundredth + 1, transient=0).grown == "weights"
    noisy = dataclasses.replace(shortage(host_records=9 * MIB), noise_bytes=9 * MIB)
    assert noisy.grown is None and dataclasses.replace(noisy, noise_bytes=9 * MIB - 1).grown == "host_records"
    assert "host_records is 9.00 MiB above that" in shortage(host_records=9 * MIB).describe()
    assert "no component is above" in shortage(transient=0).describe()


@pytest.mark.parametrize(
    ("overrides", "found", "moves", "first"),
    [
        ({}, shortage("the loss"), False, "--loss-chunk-size 512 (now 1024"),
        ({}, shortage(), False, "--offload-alpha 0.5 (now auto"),
        (
            {"recompute_granularity": "full"},
            shortage(),
            False,
            "--recompute-granularity none with --offload-alpha auto",
        ),
        ({"offload_alpha": 0.5}, shortage(), True, "--offload-alpha 0.25 (now 0.5"),
        ({"offload_alpha": 0.0}, shortage(), True, "--offload-granularity tile (now layer"),
        ({"offload_alpha": 0.0, "cp": 1, "cp_comm_type": "a2a"}, shortage(), True, "--offload-granularity tile (now"),
        ({"offload_alpha": 0.0, "offload_granularity": "tile"}, shortage(), True, "--offload-tiles 16 (now 8"),
        ({"offload_alpha": 0.0, "offload_granularity": "tile", "pp": 2}, shortage(), True, "--offload-tiles 16 (now 8"),
        ({}, shortage(host_records=2 * MIB), True, "--offload-host-memory-gib below what is free"),
        ({}, shortage(scattered_bytes=3 * GIB), False, "--memory-planner auto (3.00 GiB are free, but in pieces)"),
    ],
)
def test_advice_names_flags_and_values(overrides: dict[str, Any], found: Shortage, moves: bool, first: str) -> None:
    config = RunConfig().override({"micro_batch_size": 4, "tp": 2, **overrides})
    lines = advice(config, found, moves)
    assert lines[0].startswith(first)
    assert "--micro-batch-size 2 (now 4)" in lines
    assert "--tensor-model-parallel-size 4 (now 2)" in lines[-1]
    sweeps = "offload_granularity" in overrides  # which rings refuse
    assert "--context-parallel-size 2 (now 1)" in lines[-1]
    assert ("--cp-comm-type all_gather" in lines[-1]) is sweeps
    assert any(line.startswith("--offload-hidden-states (now off") for line in lines) is sweeps
