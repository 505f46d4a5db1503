"""The simulator's engine and the executor obey the same plans: every copy of a step is the same, in the same order."""

import random
from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest
import torch.distributed as dist
from engine_runs import modelled, on_engine, on_streams
from layouts import tiny

from memo.config import RunConfig
from memo.mesh.simulated import init_simulated

SCHEDULES: dict[str, dict[str, Any]] = {
    "1 stage, 1 microbatch": {"pp": 1, "microbatches": 1, "num_layers": 5},
    "pp 3": {"pp": 3, "microbatches": 5, "num_layers": 9},
    "pp 2 vpp 2": {"pp": 2, "vpp": 2, "microbatches": 4, "num_layers": 8},
    "breadth first, 5 microbatches": {"pp": 1, "microbatches": 5, "num_layers": 4, "breadth_first": True},
}
SHARES = ("none", "1 0 0", "1 1 0", "1 1 1", "0.75 0.5 0.25", "0.25 0.25 0.25")
"""Of the layers: whose optimizers, gradients and weights are in host memory."""
SHARDINGS = ("optim", "optim_grads", "optim_grads_params")


@pytest.fixture(scope="module", autouse=True)
def two_ranks() -> Iterator[None]:
    """Of which this process is one; groups of one rank send no messages."""
    init_simulated(0, 2)
    yield
    dist.destroy_process_group()


def cases_of(schedule: str) -> list[dict[str, Any]]:
    """Each pair of a placement with dp, sharding and swapping; what else there is by chance."""
    chance = random.Random(schedule)
    cases = []
    for shares, (shards, sharding), swaps in product(SHARES, [(1, "optim"), *((2, s) for s in SHARDINGS)], (0, 1)):
        if shares == "none" and sharding == "optim" and not swaps:
            continue  # nothing moves
        case = {**SCHEDULES[schedule], "shares": shares, "shards": shards, "sharding": sharding, "swaps": swaps}
        cases.append(case | {"clip": chance.choice([0.0, 1.0]), "copy": chance.random() < 0.5})
    return cases


def config_of(case: dict[str, Any]) -> RunConfig:
    values: dict[str, Any] = {name: case[name] for name in ("pp", "num_layers")}
    values |= {"device": "cuda", "seq_length": 16, "hidden_size": 16, "vocab_size": 16, "kv_channels": 4}
    values |= {"ffn_hidden_size": 62}  # a layer has 24 x 128 elements: two ranks share them without padding
    values |= {"global_batch_size": case["microbatches"] * case["shards"], "clip_grad": case["clip"]}
    values |= {"vpp": case.get("vpp", 1), "data_parallel_sharding_strategy": case["sharding"]}
    values |= {"offload_alpha": 0.5 if case["swaps"] else "off", "offload_tiles": 4, "ddp_bucket_size": 1 << 20}
    if case.get("breadth_first"):
        values["gradient_accumulation_order"] = "breadth_first"
    if case["shares"] != "none":
        names = ("optimizer", "gradient", "weight")
        values |= {f"{n}_offload_fraction": float(s) for n, s in zip(names, case["shares"].split(), strict=True)}
        values |= {"offload_states": "all", "offload_weight_copy": case["copy"]}
    return tiny("gpt-tiny", "bf16", **values)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_engine_issues_every_copy_that_the_executor_issues(schedule: str) -> None:
    cases = cases_of(schedule)
    assert len(cases) == 46
    num_copies = 0
    for case in cases:
        config, world_size = config_of(case), case["pp"] * case["shards"]
        model = modelled(config, world_size)
        for stage, expected in enumerate(on_engine(model)):
            found = on_streams(config, world_size, stage, model)
            for stream, copies in found.items():
                assert copies == expected[stream], (case, stage, stream)
                num_copies += len(copies)
    assert num_copies > 500
