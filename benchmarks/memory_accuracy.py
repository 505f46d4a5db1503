"""Compares the predicted and the measured peak of allocated memory in a training step on a CPU.

    python benchmarks/memory_accuracy.py [--only NAME ...]

Each configuration is trained for three steps in fresh processes, one a rank; the first step makes the moments and does
not count. A row is one pipeline stage, measured on its worst rank. Exits with 1 if a prediction is more than 3 % above
or 0.5 % below.
"""

import argparse
import dataclasses
import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import rows

from memo.config import RunConfig, preset
from memo.config.checks import check
from memo.estimate.program.memory import program_memory

MOST_ABOVE, MOST_BELOW = 0.03, 0.005
TIMEOUT_S = 1800
_STEPS = 2  # that count

_BASE: dict[str, object] = {
    "num_layers": 4,
    "hidden_size": 256,
    "num_attention_heads": 8,
    "vocab_size": 4096,
    "seq_length": 4096,
    "loss_chunk_size": 512,
    "params_dtype": "fp32",
    "offload_alpha": "off",
    "device": "cpu",
    "mock_data": True,
    "profile_cache": "off",
    "peak_tflops": 1.0,
    "num_threads": 1,
    "progress": False,
}
# Smaller, because CPUs that only emulate bf16 multiply slowly.
_BF16 = {"params_dtype": "bf16", "seq_length": 2048, "hidden_size": 128, "num_attention_heads": 4, "vocab_size": 1024}
_FOUR = {"global_batch_size": 4}

_SWEEP = {"offload_granularity": "tile", "offload_slot_tiles": 1, "offload_tiles": 16}
_STREAMED = {"num_layers": 12, "seq_length": 512}
# gloo's thread drops its copy of a chunk of the loss's gradient at a random time, and the account assumes the latest.
# With chunks of half the size, this copy is smaller than the excess that a prediction may have.
_TP = {"tp": 2, "loss_chunk_size": 256}
CASES: dict[str, tuple[str, int, dict[str, object]]] = {
    # name: model, ranks, flags; llama has grouped heads, RMSNorm and SwiGLU, gpt2 biases and learned positions
    "plain gpt": ("gpt-tiny", 1, {}),
    "plain llama bf16, two sequences": ("llama-tiny", 1, {**_BF16, "micro_batch_size": 2}),
    "plain gpt2": ("gpt2-tiny", 1, {}),
    "plain qwen3 bf16": ("qwen3-tiny", 1, _BF16),
    "full recomputation gpt": ("gpt-tiny", 1, {"recompute_granularity": "full", "num_layers": 8}),
    "selective recomputation llama": ("llama-tiny", 1, {"recompute_granularity": "selective"}),
    "alpha 0 llama": ("llama-tiny", 1, {"offload_alpha": 0.0, "num_layers": 8}),
    "alpha 1/2 llama bf16": ("llama-tiny", 1, {**_BF16, "offload_alpha": 0.5}),
    "alpha 1 gpt": ("gpt-tiny", 1, {"offload_alpha": 1.0, "num_layers": 8}),
    "swept llama": ("llama-tiny", 1, {**_SWEEP, "offload_alpha": 0.0, "num_layers": 8}),
    "swept llama bf16, slots of 4 tiles": (
        "llama-tiny",
        1,
        {**_BF16, **_SWEEP, "offload_alpha": 0.5, "offload_slot_tiles": 4},
    ),
    "swept llama, half of attention again": (
        "llama-tiny",
        1,
        {**_SWEEP, "offload_alpha": 0.0, "num_layers": 8, "recompute_attention_layers": 4},
    ),
    "swept gpt, alpha 1": ("gpt-tiny", 1, {**_SWEEP, "offload_alpha": 1.0}),
    "tp 2 swept llama": ("llama-tiny", 2, {**_SWEEP, **_TP, "offload_alpha": 0.5}),
    "pp 2 swept gpt": ("gpt-tiny", 2, {**_FOUR, **_SWEEP, "pp": 2, "offload_alpha": 0.0, "seq_length": 2048}),
    "tp 2 gpt": ("gpt-tiny", 2, _TP),
    "cp 2 ring llama bf16": ("llama-tiny", 2, {**_BF16, "cp": 2}),
    "cp 2 all_gather llama": ("llama-tiny", 2, {"cp": 2, "cp_comm_type": "all_gather"}),
    "cp 2 a2a llama": ("llama-tiny", 2, {"cp": 2, "cp_comm_type": "a2a"}),
    "pp 2 1F1B gpt": ("gpt-tiny", 2, {**_FOUR, "pp": 2, "seq_length": 2048}),
    "pp 2 interleaved llama": ("llama-tiny", 2, {**_FOUR, "pp": 2, "vpp": 2, "seq_length": 2048}),
    "dp 2 llama bf16": ("llama-tiny", 2, {**_BF16, "global_batch_size": 2}),
    "tp 2 alpha 1/2 llama": ("llama-tiny", 2, {**_TP, "offload_alpha": 0.5, "num_layers": 8}),
    "tp 2 cp 2 llama": ("llama-tiny", 4, {**_TP, "cp": 2}),
    "states all gpt": ("gpt-tiny", 1, {**_STREAMED, "offload_states": "all"}),
    "breadth first, 4 microbatches": (
        "gpt-tiny",
        1,
        {**_FOUR, "seq_length": 512, "gradient_accumulation_order": "breadth_first"},
    ),
    "breadth first, alpha 1/2, states all": (
        "llama-tiny",
        1,
        {
            **_FOUR,
            **_STREAMED,
            "offload_alpha": 0.5,
            "offload_states": "all",
            "gradient_accumulation_order": "breadth_first",
        },
    ),
    "states all bf16": ("llama-tiny", 1, {**_BF16, **_STREAMED, "offload_states": "all", "offload_alpha": 0.5}),
    "states optimizer llama bf16": ("llama-tiny", 1, {**_BF16, **_STREAMED, "offload_states": "optimizer"}),
    "states all dp 2": ("gpt-tiny", 2, {**_STREAMED, "offload_states": "all", "global_batch_size": 2}),
    "ZeRO-3 dp 2 llama bf16": (
        "llama-tiny",
        2,
        {**_BF16, **_STREAMED, "global_batch_size": 2, "data_parallel_sharding_strategy": "optim_grads_params"},
    ),
    "tp 2 pp 2 gpt": ("gpt-tiny", 4, {**_FOUR, **_TP, "pp": 2, "seq_length": 2048}),
}


def configuration(model: str, world_size: int, flags: dict[str, object]) -> RunConfig:
    config = dataclasses.replace(RunConfig(), model=preset(model)).override({**_BASE, **flags})
    check(config, world_size)
    return config


def measured_peak_bytes(config: RunConfig) -> int:
    """Return the peak of this rank after the first step; `memo.Trainer` finds rank and world as under torchrun."""
    from allocated_bytes import AllocatedBytes

    import memo

    counter = AllocatedBytes()
    with memo.Trainer(config=config) as trainer:
        trainer.step()
        counter.take_peak_bytes()
        for _ in range(_STEPS):
            trainer.step()
        return counter.take_peak_bytes()


def measure(name: str) -> list[int]:
    """Return the peak bytes of every rank, each measured in a process of its own."""
    world_size = CASES[name][1]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ranks = []
    for rank in range(world_size):
        environment = os.environ | {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(world_size),
            "LOCAL_WORLD_SIZE": str(world_size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "OMP_NUM_THREADS": "1",
        }
        command = [sys.executable, __file__, "--rank-of", name]
        ranks.append(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True))
    try:
        answers = [rank.communicate(timeout=TIMEOUT_S)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    if any(rank.returncode for rank in ranks):
        raise SystemExit(f"{name}: exit statuses {[rank.returncode for rank in ranks]}")
    return [int(answer.splitlines()[-1]) for answer in answers]


def compare(name: str) -> list[dict[str, Any]]:
    """Return a row for each pipeline stage."""
    model, world_size, flags = CASES[name]
    config = configuration(model, world_size, flags)
    peaks = measure(name)
    ranks = world_size // config.parallel.pp
    found = []
    for stage in range(config.parallel.pp):
        measured = max(peaks[stage * ranks : (stage + 1) * ranks])
        start_s = time.perf_counter()
        memory = program_memory(config, world_size, stage)
        predicted_s = time.perf_counter() - start_s
        found.append(
            {
                "name": name,
                "model": model,
                "ranks": world_size,
                "flags": flags,
                "stage": stage,
                "measured_bytes": measured,
                "predicted_bytes": memory.total,
                "error": memory.total / measured - 1,
                "states_bytes": memory.states.device,
                "at": memory.moment.at,
                "predicted_s": predicted_s,
            }
        )
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=CASES, metavar="NAME", help="these configurations; keeps no rows")
    parser.add_argument("--rank-of", choices=CASES, help=argparse.SUPPRESS)  # what this script starts for each rank
    options = parser.parse_args()
    if options.rank_of:
        print(measured_peak_bytes(configuration(*CASES[options.rank_of])))
        return 0
    results = []
    for name in options.only or CASES:
        for row in compare(name):
            results.append(row)
            print(json.dumps(row), flush=True)
    if not options.only:
        print(f"kept in {rows.write('memory_accuracy', results)}")
    wrong = [row for row in results if not -MOST_BELOW <= row["error"] <= MOST_ABOVE]
    for row in wrong:
        bound = f"-{MOST_BELOW:.1%} .. +{MOST_ABOVE:.1%}"
        print(f"outside of {bound}: {row['name']} stage {row['stage']}: {row['error']:+.2%}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    sys.exit(main())
