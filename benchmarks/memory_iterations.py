"""Memory plans of whole iterations of real configurations: their peaks against the bound and PyTorch's allocators.

    python benchmarks/memory_iterations.py

The requests of an iteration are traced without running it (memo.train.paper). A row is the first rank of a layout, with
all phases of one step. Times are those of this machine, separate for tracing and planning.
"""

import dataclasses
import json
import time

import rows

from memo.config import RunConfig, preset
from memo.planner.caching import simulate_caching
from memo.planner.memory.trace_plan import solve_trace
from memo.train.paper import trace_on_paper
from memo.units import GIB

K = 1024
CASES: tuple[tuple[str, str, int, dict[str, object]], ...] = (
    # model, what, GPUs, flags
    ("gpt-7b", "64K, tp 8, plain", 8, {"seq_length": 64 * K, "tp": 8, "offload_alpha": "off"}),
    ("gpt-7b", "64K, tp 8, full recomputation", 8, {"seq_length": 64 * K, "tp": 8, "recompute_granularity": "full"}),
    ("gpt-7b", "64K, tp 8, alpha 0", 8, {"seq_length": 64 * K, "tp": 8, "offload_alpha": 0.0}),
    ("gpt-7b", "64K, tp 8, alpha 1/4", 8, {"seq_length": 64 * K, "tp": 8, "offload_alpha": 0.25}),
    ("gpt-7b", "64K, tp 8, alpha 1", 8, {"seq_length": 64 * K, "tp": 8, "offload_alpha": 1.0}),
    ("gpt-7b", "256K, tp 8, alpha 1/4", 8, {"seq_length": 256 * K, "tp": 8, "offload_alpha": 0.25}),
    ("gpt-7b", "1M, tp 8, alpha 1/4", 8, {"seq_length": 1024 * K, "tp": 8, "offload_alpha": 0.25}),
    ("llama-3.1-8b", "64K, tp 4 cp 2, plain", 8, {"seq_length": 64 * K, "tp": 4, "cp": 2, "offload_alpha": "off"}),
    (
        "llama-3.1-8b",
        "64K, tp 4 pp 2 1F1B x 4, plain",
        8,
        {"seq_length": 64 * K, "tp": 4, "pp": 2, "offload_alpha": "off", "global_batch_size": 4},
    ),
    (
        "llama-3.1-8b",
        "128K, tp 4 cp 2 pp 2 1F1B x 4, alpha 1/2",
        16,
        {"seq_length": 128 * K, "tp": 4, "cp": 2, "pp": 2, "offload_alpha": 0.5, "global_batch_size": 4},
    ),
)


def measure(model: str, what: str, gpus: int, flags: dict[str, object]) -> dict[str, object]:
    defaults = {"mock_data": True, "device": "cpu", "params_dtype": "bf16", "global_batch_size": 1}
    shape = dataclasses.replace(RunConfig(), model=preset(model))
    config = shape.override({**defaults, "vocab_size": 50304, "loss_chunk_size": 8192, **flags})
    start_s = time.perf_counter()
    trace = trace_on_paper(config, gpus)
    traced_s = time.perf_counter() - start_s
    start_s = time.perf_counter()
    planning = solve_trace(trace)
    plan, planned_s = planning.plan, time.perf_counter() - start_s
    layers = [part for part in planning.parts if part.name.startswith("layer_")]
    return {
        "model": model,
        "what": what,
        "requests": sum(len(phase.requests) for phase in plan.phases),
        "bound_gib": plan.lower_bound_bytes / GIB,
        "planned_gib": plan.arena_bytes / GIB,
        "over_bound": plan.arena_bytes / plan.lower_bound_bytes - 1,
        "proof": plan.proof,
        "planner": plan.planner,
        "layer_problems": len(layers),
        "layer_problems_optimal": sum(part.solution.proof == "optimal" for part in layers),
        "default_gib": simulate_caching(trace).reserved_bytes / GIB,
        "expandable_gib": simulate_caching(trace, "expandable").reserved_bytes / GIB,
        "trace_s": traced_s,
        "plan_s": planned_s,
    }


def main() -> None:
    results = []
    for case in CASES:
        results.append(measure(*case))
        print(json.dumps(results[-1]), flush=True)
    print(f"kept in {rows.write('memory_iterations', results)}")


if __name__ == "__main__":
    main()
