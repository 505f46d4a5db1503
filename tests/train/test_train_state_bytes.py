"""The account of placed states, which needs no torch, against what a built model holds: equal to the byte."""

from typing import Any

import pytest
from layouts import make, tiny
from ranks import run_ranks

from memo.config import RunConfig
from memo.estimate.state_memory import StateBytes, state_bytes

ALL: dict[str, Any] = {"offload_states": "all"}
SOME = {
    **ALL,
    "optimizer_offload_fraction": 0.75,
    "gradient_offload_fraction": 0.5,
    "weight_offload_fraction": 0.25,
}
ZERO2 = {"data_parallel_sharding_strategy": "optim_grads"}
ZERO3 = {"data_parallel_sharding_strategy": "optim_grads_params"}
NARROW = {"exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "bf16"}
ONE_LAYER = {
    **ALL,
    "optimizer_offload_fraction": 0.25,
    "gradient_offload_fraction": 0.25,
    "weight_offload_fraction": 0.25,
}
"""One of the four layers: where two slots or stages serve several layers, one serves this one."""
PLACEMENTS: dict[str, dict[str, Any]] = {
    "resident": {},
    "optimizer": {"offload_states": "optimizer"},
    "all": ALL,
    "some": SOME,
    "one layer": ONE_LAYER,
    "one layer, without clipping, one microbatch": {**ONE_LAYER, "clip_grad": 0.0, "global_batch_size": 2},
    "no copy of weights": {**ALL, "offload_weight_copy": False},
    "without clipping": {**ALL, "clip_grad": 0.0},
    "without clipping, one microbatch": {**ALL, "clip_grad": 0.0, "global_batch_size": 2},
    "resident, moments in bf16": NARROW,
    "resident, one moment in bf16": {"exp_avg_sq_dtype": "bf16"},
    "some, moments in bf16": {**SOME, **NARROW},
    "all, one moment in bf16": {**ALL, "exp_avg_dtype": "bf16"},
    "without clipping, one microbatch, moments in bf16": {**ALL, **NARROW, "clip_grad": 0.0, "global_batch_size": 2},
    "ZeRO-2": ZERO2,
    "ZeRO-3": ZERO3,
    "ZeRO-2, some": {**SOME, **ZERO2},
    "ZeRO-3, some": {**SOME, **ZERO3},
}
PADDING_BYTES = 1024


def held(config: RunConfig, world_size: int) -> tuple[StateBytes, int, int]:
    """(what is foreseen, bytes on the device, bytes on the host) after a step, which makes the moments."""
    model, feed = make(config, world_size)
    model.train_step(feed.next_global_batch(), lr=1e-3)
    on_device = 0 if model.states is None else model.states.device_bytes
    for bucket in model.data_parallel.buckets:
        own = [bucket.weights, bucket.gradients]
        if not bucket.places.optimizer_on_host:
            own.append(bucket.master if bucket.has_own_master else None)
            own.append(bucket.source if bucket.source is not bucket.master else None)
            own.append(bucket.gradient_shard if bucket.gradients is None else None)
        on_device += sum(x.nbytes for x in own if x is not None)
    for segment, kinds in model.optimizer.segment_states():
        if segment.moments is None:
            on_device += kinds["exp_avg"].nbytes + kinds["exp_avg_sq"].nbytes
    on_host = 0 if model.states is None else model.states.host_bytes
    return state_bytes(config, world_size, 0), on_device, on_host


def held_by_all(configs: list[RunConfig], world_size: int) -> list[tuple[StateBytes, int, int]]:
    return [held(config, world_size) for config in configs]


@pytest.mark.parametrize(
    ("dtype", "world_size"),
    [
        ("bf16", 2),
        ("fp32", 1),
        pytest.param("bf16", 1, marks=pytest.mark.full),
        pytest.param("fp32", 2, marks=pytest.mark.full),
    ],
)
def test_bytes_are_those_of_the_built_model(dtype: str, world_size: int) -> None:
    configs = [tiny("llama-tiny", dtype, num_layers=4, seq_length=16, **placement) for placement in PLACEMENTS.values()]
    ranks = run_ranks(world_size, held_by_all, configs, world_size)
    for found in ranks:
        for name, (foreseen, on_device, on_host) in zip(PLACEMENTS, found, strict=True):
            assert on_host == foreseen.host, name
            # Buckets end with padding, for which the last rank has no moments and the first ones have more.
            assert abs(on_device - foreseen.device) <= PADDING_BYTES * (world_size > 1), name
