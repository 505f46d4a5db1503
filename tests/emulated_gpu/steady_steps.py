"""Where the host waits for the device in a training step that is neither the first nor the last (memo.rehearsal.text).

As a program, one rank of several: python steady_steps.py FLOW prints what `steady_waits` found there.
"""

import gc
import json
import sys
from collections import Counter
from typing import Any

import numpy as np

import memo
from memo.data.sample import Sample, cut_sample
from memo.emulated_gpu.face import EmulatedGpu
from memo.rehearsal.text import REASONS, reasoned

READ, ARRIVED, UPLOADED, EARLY = REASONS

BASE: dict[str, Any] = {
    "mock_data": True,
    "num_layers": 3,
    "seq_length": 64,
    "micro_batch_size": 1,
    "global_batch_size": 4,
    "train_iters": 6,
    "lr": 1e-3,
    "num_threads": 1,
    "device": "cuda",
    "progress": False,
    "offload_alpha": "off",
    "attention_backend": "flash",
    "memory_planner": "off",
}
"""Each step is logged, which is the default: timestamps around layers and copies must not wait either."""

CLIPPED, UNCLIPPED = {"clip_grad": 1e-3}, {"clip_grad": 0.0}
PLANNED = {"memory_planner": "auto", "memory_planner_min_bytes": 4096}
FLOWS: dict[str, dict[str, Any]] = {
    "plain": {},
    "clipped": CLIPPED,
    "planned memory": PLANNED,
    "packed documents": {},
    "packed documents, planned memory": PLANNED,
    "alpha 0": {"offload_alpha": 0.0},
    "alpha 1/2": {"offload_alpha": 0.5},
    "alpha 1": {"offload_alpha": 1.0},
    "optimizer in host memory": {"offload_states": "optimizer", **CLIPPED},
    "all states in host memory": {"offload_states": "all", **CLIPPED},
    "all states in host memory, unclipped": {"offload_states": "all", **UNCLIPPED},
    "alpha 1/2 and all states in host memory": {"offload_states": "all", "offload_alpha": 0.5, **PLANNED},
    "dp 2": {"offload_states": "all", **CLIPPED},
    "pp 2": {"pp": 2, "num_layers": 4, **CLIPPED},
    "pp 2, planned memory": {"pp": 2, "num_layers": 4, **CLIPPED, **PLANNED},
}
WARM_UP, MEASURED = 2, 2


class Documents:
    """Samples of three documents, cut elsewhere in each: boundaries that no step before has brought to the device."""

    seq_length = BASE["seq_length"]

    def sample(self, index: int) -> Sample:
        random = np.random.default_rng(index)
        ends = np.sort(random.choice(np.arange(1, self.seq_length), 2, replace=False))
        return cut_sample(random.integers(0, 100, self.seq_length + 1), ends)


def trainer(flow: str) -> memo.Trainer:
    is_packed = flow.startswith("packed documents")
    data = {"train_data": Documents()} if is_packed else {}
    return memo.Trainer("llama-tiny", **data, **{**BASE, "mock_data": not is_packed, **FLOWS[flow]})


def steady_waits(training: memo.Trainer, gpu: EmulatedGpu) -> list[dict[str, int]]:
    """Of each of two steps after two others: how often the host waited, by the entry of REASONS or what it was."""
    gc.collect()  # pinned memory of a trainer of before is waited for when it is unpinned
    found = []
    for step in range(WARM_UP + MEASURED):
        with gpu.host_waits() as waits:
            training.step()
        if step >= WARM_UP:
            counts: Counter[str] = Counter()
            for wait, count in waits.items():
                named = reasoned(wait.what, wait.functions)
                counts[named or f"{wait.what} in {' < '.join(wait.functions)}"] += count
            found.append(dict(counts))
    return found


def budget(training: memo.Trainer) -> dict[str, int]:
    """What a step of this rank may wait for, exactly."""
    parts = training.parts
    on_host = [bucket for bucket in parts.data_parallel.buckets if bucket.places.optimizer_on_host]
    waits = {READ: 1}
    if parts.states is not None:
        waits[ARRIVED] = 2
        if uploaded := sum(bucket.weights is not None for bucket in on_host):
            waits[UPLOADED] = uploaded
        if training.config.training.clip_grad == 0:
            waits[EARLY] = sum(unit.places.optimizer_on_host for unit in parts.data_parallel.layer_units.values())
    return waits


if __name__ == "__main__":
    with trainer(sys.argv[1]) as made:
        emulated = EmulatedGpu()
        told = {"found": steady_waits(made, emulated), "budget": budget(made), "races": emulated.races()}
        print(json.dumps(told), flush=True)
