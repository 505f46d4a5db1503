"""Memory of steps of one rank of eight whose documents are packed in three ways, for test_packed_plan.py.

    packed_steps.py MODEL SEQ_LENGTH BACKEND ALPHA NUM_LAYERS WORLD COMM_TYPE ROWS PLANNER

ROWS of a micro-batch are packed alike, and then, where there are several, each in another way. Prints as JSON: bytes
allocated and reserved at most in the steps after the first two, from which memory is planned; the bytes that memo
foresees to be reserved under a plan; and of a plan its requests and fallbacks in these steps.
"""

import itertools
import json
import sys
from pathlib import Path

import numpy as np
import torch

sys.path.append(str(Path(__file__).parents[1] / "support"))
from packed_samples import PackedSamples

import memo
from memo.estimate.memory_account import memory_account, reserved_under_plan

VOCABULARY = 1000
NUM_PACKINGS = 3
FIRST_STEPS = 2


def packings(seq_length: int) -> tuple[list[int], ...]:
    """One document; a long one and short ones behind it; documents of about 4,096 tokens, every second step others."""
    long = seq_length - seq_length // 16
    random = np.random.default_rng(7)
    several = [np.sort(random.choice(np.arange(1, seq_length), seq_length // 4096, replace=False)) for _ in range(2)]
    behind = list(range(long, seq_length, 300))
    return ([], behind, several[0].tolist(), [], behind, several[1].tolist())


def main() -> None:
    model, length, backend, alpha, num_layers, world, comm_type, rows, planner = sys.argv[1:]
    of_steps = [[packing] * int(rows) for packing in packings(int(length))]
    if int(rows) > 1:
        of_steps += map(list, itertools.permutations(packings(int(length))[:NUM_PACKINGS], int(rows)))
    samples = PackedSamples(list(itertools.chain(*of_steps)), VOCABULARY, int(length))
    options = {
        "num_layers": int(num_layers),
        "seq_length": int(length),
        "attention_backend": backend,
        "offload_alpha": alpha if alpha == "off" else float(alpha),
        "memory_planner": None if planner == "default" else planner,
        "micro_batch_size": int(rows),
        "global_batch_size": int(rows),
        "vocab_size": VOCABULARY,
        "train_iters": FIRST_STEPS + len(of_steps),
        "simulate_world": world,
        "cp_comm_type": comm_type,
        "device": "cuda",
        "num_threads": 1,
        "profile_cache": "off",
        "progress": False,
        "admission": False,
    }
    options = {name: value for name, value in options.items() if value is not None}
    with memo.Trainer(model, train_data=samples, **options) as trainer:
        transients = trainer.parts.transients
        for _ in range(FIRST_STEPS):
            trainer.step()
        before = transients.statistics() if transients is not None else None
        torch.cuda.reset_peak_memory_stats()
        for _ in of_steps:
            trainer.step()
        stats, found = torch.cuda.memory_stats(), transients.statistics() if transients is not None else None
        told = {name: stats[f"{name}_bytes.all.peak"] for name in ("allocated", "reserved")}
        memory = memory_account(
            trainer.config.override({"data_path": ("of the program",)}), trainer.mesh.grid.world_size, 0
        )
        told["foreseen"] = reserved_under_plan(memory)
        if before is not None and found is not None:
            told |= {
                "requests": found.requests - before.requests,
                "fallbacks": found.num_fallbacks - before.num_fallbacks,
                "unasked": found.unasked - before.unasked,
            }
        print(json.dumps(told))


main()
