"""The cost of swapping if no copy overlaps with compute: step time and memory at alpha = 1, on a CPU.

    python benchmarks/swap_overhead.py                    # s = 16K, h = 256, 8 layers; quiet machine: half an hour
    python benchmarks/swap_overhead.py --seq-length 2048  # minutes

Three ways to run the same model are timed in turn, step by step, in one process:

    plain     no swapping: autograd keeps every activation
    resident  token-wise layers with a slot for every layer: the arithmetic of swap without copies
    swap      token-wise layers and two slots; everything that may move moves

The ratio of swap to resident is the overhead of swapping: copies (which a CPU makes with the computing cores), events,
and the order of the plan. Its bound is 10 % of a step. The ratio of swap to plain also has the cost or gain of tiles
and recomputation. Memory is measured in a fresh process for each way. Held: bytes of slots, workspace and host records,
counted on their storages, with the bytes that the planner promised. Transient: the allocator's peak within a step,
above the begin of the step.
"""

import argparse
import dataclasses
import json
import statistics
import subprocess
import sys
import time
from typing import Any

import rows
from resident import keep_everything
from torch.profiler import ProfilerActivity, profile

from memo import Trainer
from memo.config import preset
from memo.report.timeline import copied_s

WAYS = ("plain", "resident", "swap")
BOUND = 0.10
"""Largest overhead of swap over resident, as a share of a step."""


def make_trainer(way: str, args: argparse.Namespace) -> Trainer:
    shape = dataclasses.replace(
        preset("gpt-tiny"), num_layers=args.layers, hidden_size=args.hidden_size, num_attention_heads=4
    )
    trainer = Trainer(
        shape,
        plan="off" if way == "plain" else 1.0,
        offload_policy=args.policy,
        mock_data=True,
        seq_length=args.seq_length,
        vocab_size=257,
        train_iters=1000,
        device="cpu",
    )
    if way == "resident":
        keep_everything(trainer)
    return trainer


def step_times(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Time steps in turn. A ratio is the median over turns of the ratio within a turn, so slow drifts cancel."""
    trainers = {way: make_trainer(way, args) for way in WAYS}
    times: dict[str, list[float]] = {way: [] for way in WAYS}
    for repetition in range(args.steps + 1):
        for way in WAYS if repetition % 2 else reversed(WAYS):
            start_s = time.perf_counter()
            trainers[way].step()
            if repetition:  # the first one warms up
                times[way].append(time.perf_counter() - start_s)
    swap = trainers["swap"].parts.swap
    assert swap is not None
    with swap.swapper.recorded() as recorder:
        trainers["swap"].step()
    copies_s = {"plain": 0.0, "resident": 0.0, "swap": copied_s(recorder.spans())}

    def over(way: str, base: str) -> float:
        return statistics.median(a / b for a, b in zip(times[way], times[base], strict=True)) - 1

    return [
        {
            "way": way,
            "step_s": statistics.median(times[way]),
            "fastest_step_s": min(times[way]),
            "copies_s": copies_s[way],
            "over_resident": over(way, "resident"),
            "over_plain": over(way, "plain"),
        }
        for way in WAYS
    ]


def memory(way: str, args: argparse.Namespace) -> dict[str, int]:
    """Return the bytes of this process; call it in a fresh process."""
    trainer = make_trainer(way, args)
    trainer.step()
    peak_rss = trainer.step().host_peak_bytes
    found = {"peak_rss_bytes": peak_rss, "transient_peak_bytes": transient_peak_bytes(trainer)}
    swap, chosen = trainer.parts.swap, trainer.parts.chosen_swap
    if swap is not None and chosen is not None:
        buffers = [*swap.swapper.slots, swap._workspace]
        found["device_held_bytes"] = sum(buffer.untyped_storage().nbytes() for buffer in buffers)
        found["host_held_bytes"] = swap.swapper.records.pool._arena.untyped_storage().nbytes()
        if way == "swap":
            found["device_planned_bytes"] = chosen.solution.device_bytes
            found["host_planned_bytes"] = chosen.solution.host_bytes
            found["alignment_bytes"] = found["device_held_bytes"] - found["device_planned_bytes"]
    return found


def transient_peak_bytes(trainer: Trainer) -> int:
    """Return the peak of torch's CPU allocator within a step, above its bytes at the begin of the step."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        trainer.step()
    results = profiler.profiler.kineto_results
    requests = [event for event in results.events() if event.name() == "[memory]"]
    live = peak = 0
    for request in sorted(requests, key=lambda event: event.start_ns()):
        live += request.nbytes()
        peak = max(peak, live)
    return peak


def in_a_fresh_process(*flags: str) -> Any:
    """Run this script with these flags in a fresh process; return the JSON that it prints last."""
    command = [sys.executable, *sys.argv, *flags]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seq-length", type=int, default=16384)
    parser.add_argument("--hidden-size", type=int, default=256)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--policy", default="auto", choices=["auto", "paper"])
    parser.add_argument("--steps", type=int, default=5, help="measured steps of each way")
    parser.add_argument("--times", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--memory-of", choices=WAYS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.times or args.memory_of:
        print(json.dumps(step_times(args) if args.times else memory(args.memory_of, args)))
        return
    shape = {name: getattr(args, name) for name in ("seq_length", "hidden_size", "layers", "policy", "steps")}
    times = in_a_fresh_process("--times")
    print(json.dumps(times), flush=True)
    results = [{**row, **in_a_fresh_process("--memory-of", row["way"]), **shape} for row in times]
    for row in results:
        print(json.dumps(row))
    print(f"kept in {rows.write('swap_overhead', results)}")
    over = results[-1]["over_resident"]
    print(f"swap costs {over:+.1%} of a step over resident: {'within' if over <= BOUND else 'beyond'} {BOUND:.0%}")


if __name__ == "__main__":
    main()
