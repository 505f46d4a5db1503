"""What is frozen has no byte of gradient, master or moment: bytes of a built model after two steps, by hand.

The table of parameters (memo.spec.shapes) gives A, all elements, and T, those that are trained; every tensor has a
multiple of 128, so that nothing is padded. An element of the weights has n bytes, and there are N ranks.

    layers        weights      gradients    masters, moments    slots and stages, of the largest    host memory
    resident      n A          4 T          12 T/N [1]          0                                   0
    ZeRO-3        n A/N [2]    4 T/N        12 T/N              2 n A + 2 (4 T + 4 T/N)             0
    all           0            0            0                   2 n A + 2 4 T                       18 T [1] + n (A - T)

    Embedding and head have n A and 4 T on the device; under `all` 16 T in host memory, and else 12 T/N [1].
    [1] 4 and 2 T less in fp32, which needs no master or copy beside the weights; bf16 has two stages for the largest
        tensor of the ends, too
    [2] in fp32 these shards are the masters, and count as such
"""

import gc
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import pytest
import torch
from layouts import make, tiny
from memory_peaks import counted
from ranks import run_ranks

from memo.config import RunConfig
from memo.estimate.state_memory import state_bytes
from memo.spec.parameters import shape_of_run
from memo.spec.weights import Weight
from memo.train.watching import MemoryUse

torch.set_num_threads(1)

LAYERS = 4
OTHER_BYTES = 64 * 8 + 16 * 8
"""Of tensors that are no states: positions of 64 tokens, and RoPE's 16 frequencies."""
TRAINED: dict[str, dict[str, Any]] = {
    "adapters": {"lora_rank": 4},
    "adapters of queries, and norms": {"lora_rank": 4, "lora_target_modules": "q_proj", "train_only": "*norm.weight"},
    "layers": {"freeze": "embedding.weight,layers.[02].*"},
}
STATES: dict[str, tuple[int, dict[str, Any]]] = {
    "resident": (1, {}),
    "resident, 2 ranks": (2, {}),
    "ZeRO-3": (2, {"data_parallel_sharding_strategy": "optim_grads_params"}),
    "all": (1, {"offload_states": "all"}),
}


def is_trained(case: str, layer: int | None, weight: Weight) -> bool:
    """Said again by hand, without patterns."""
    if case == "adapters":
        return ".adapter." in weight.name
    if case == "adapters of queries, and norms":
        return ".adapter." in weight.name or weight.name.endswith("norm.weight")
    return layer in (1, 3) or (layer is None and weight.name != "embedding.weight")


def config_of(case: str, states: str, dtype: str) -> RunConfig:
    sizes = {"num_layers": LAYERS, "hidden_size": 128, "kv_channels": 32, "ffn_hidden_size": 128, "vocab_size": 256}
    return tiny("llama-tiny", dtype, **{**sizes, **TRAINED[case], **STATES[states][1]})


@dataclass(frozen=True)
class Elements:
    """Of a layer or an end: all, those that are trained, and the largest tensor of these."""

    all: int
    trained: int
    largest: int


def elements_of(case: str, config: RunConfig) -> tuple[list[Elements], list[Elements]]:
    """Of layers, and of the ends."""
    shape = shape_of_run(config)

    def count(layer: int | None, weights: tuple[Weight, ...]) -> Elements:
        assert all(weight.numel % 128 == 0 for weight in weights)
        trained = [weight.numel for weight in weights if is_trained(case, layer, weight)]
        return Elements(sum(weight.numel for weight in weights), sum(trained), max(trained, default=0))

    layers = [count(index, layer.layer_weights) for index, layer in enumerate(shape.of_layers)]
    return layers, [count(None, shape.embedding_weights), count(None, shape.head_weights)]


def expected(case: str, states: str, dtype: str) -> MemoryUse:
    """By the table above, without the counts of steps."""
    layers, ends = elements_of(case, config_of(case, states, dtype))
    n, shards, is_bf16 = (2 if dtype == "bf16" else 4), STATES[states][0], dtype == "bf16"
    all_layers, trained_layers = sum(x.all for x in layers), sum(x.trained for x in layers)
    all_ends, trained_ends = sum(x.all for x in ends), sum(x.trained for x in ends)
    slot_of_gradients = 4 * max(x.trained for x in layers)
    optimizer = (8 + 4 * is_bf16) * (trained_layers + trained_ends) // shards
    slots = 2 * n * max(x.all for x in layers) + 2 * slot_of_gradients
    if states == "ZeRO-3":
        masters = 0 if is_bf16 else 4 * trained_layers // shards
        weights, gradients = n * (all_layers // shards + all_ends), 4 * (trained_layers // shards + trained_ends)
        weights, optimizer = weights - masters, optimizer + masters
        return MemoryUse(weights, gradients, optimizer, slots + 2 * slot_of_gradients // shards, 0)
    if states == "all":
        host = (16 + 2 * is_bf16) * trained_layers + n * (all_layers - trained_layers) + 16 * trained_ends
        host += 2 * 2 * max(x.largest for x in ends) * is_bf16
        return MemoryUse(n * all_ends, 4 * trained_ends, 0, slots, host)
    return MemoryUse(n * (all_layers + all_ends), 4 * (trained_layers + trained_ends), optimizer, 0, 0)


def told_and_held(config: RunConfig, world_size: int) -> tuple[MemoryUse, int]:
    """After two steps what a run tells, less the counts of steps, and bytes that torch's allocator holds beyond both.

    gloo's threads let go of a message's memory when they next run, which is waited for.
    """
    counter = counted()
    gc.collect()
    before = counter.live_bytes
    model, feed = make(config, world_size)
    for _ in range(2):
        model.train_step(feed.next_global_batch(), lr=1e-2)
    model.data_parallel.main_gradients.begin_step(1)  # forgets the norms of the last step
    gc.collect()
    told = MemoryUse.of(model)
    counts = [state["step"].nbytes for part in model.optimizer.parts if part.adam for state in part.adam.state.values()]
    for _ in range(100):
        beyond = int(counter.live_bytes - before) - told.device_bytes
        if beyond <= OTHER_BYTES + 4:
            break
        time.sleep(0.05)
    return replace(told, optimizer_bytes=told.optimizer_bytes - sum(counts)), beyond


def _rows() -> Iterator[Any]:
    """Short tests have all pairs of states and dtypes, each with adapters or with layers; the third kind has few."""
    for case, states, dtype in product(TRAINED, STATES, ("fp32", "bf16")):
        is_twin = (dtype == "bf16") == (case == "layers")
        if case == "adapters of queries, and norms":
            is_twin = (states, dtype) not in (("ZeRO-3", "bf16"), ("all", "fp32"))
        yield pytest.param(case, states, dtype, marks=[pytest.mark.full] * is_twin)


@pytest.mark.parametrize(("case", "states", "dtype"), _rows())
def test_what_is_frozen_has_its_weights_and_nothing_else(case: str, states: str, dtype: str) -> None:
    """To the byte, as the run tells it, as torch's allocator counts it and as it is foreseen; one NaN stands for
    weights in slots."""
    (world_size, _), config = STATES[states], config_of(case, states, dtype)
    foreseen = state_bytes(config, world_size, 0)
    for told, beyond in run_ranks(world_size, told_and_held, config, world_size):
        assert told == expected(case, states, dtype)
        assert (told.device_bytes, told.host_records_bytes) == (foreseen.device, foreseen.host)
        assert beyond == OTHER_BYTES + (2 if dtype == "bf16" else 4)
