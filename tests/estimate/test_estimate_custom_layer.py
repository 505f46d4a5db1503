"""Memory of a custom layer: what is counted from its two halves, against the measured peak of a step on the CPU."""

from typing import Any

import pytest
from custom_layers import PARALLEL, SANDWICH
from memory_peaks import peak_of_training, run_config
from ranks import run_ranks

MOST_ABOVE, MOST_BELOW = 0.05, 0.015
SIZES: dict[str, Any] = {"seq_length": 1024, "hidden_size": 64, "num_attention_heads": 4, "ffn_hidden_size": 192}
SIZES |= {"num_query_groups": 2, "global_batch_size": 1, "loss_chunk_size": 128, "vocab_size": 256}
SWEPT: dict[str, Any] = {"offload_granularity": "tile", "offload_slot_tiles": 1, "offload_tiles": 4}
CASES: list[tuple[str, int, dict[str, Any]]] = [
    (PARALLEL, 1, {}),
    (PARALLEL, 1, {"offload_alpha": 0.5}),
]
MORE: list[tuple[str, int, dict[str, Any]]] = [
    (PARALLEL, 2, {"tp": 2}),
    (SANDWICH, 1, {}),
    (PARALLEL, 1, {"params_dtype": "bf16"}),
    (PARALLEL, 1, {"recompute_granularity": "full"}),
    (SANDWICH, 1, {"offload_alpha": 0.0}),
    (PARALLEL, 1, {"offload_alpha": 0.0, **SWEPT}),
    (PARALLEL, 2, {"tp": 2, "offload_alpha": 1.0}),
    (PARALLEL, 2, {"cp": 2}),
    (SANDWICH, 2, {"pp": 2, "global_batch_size": 2}),
]


@pytest.mark.parametrize(
    ("layer", "world_size", "run"),
    [*CASES, *(pytest.param(*case, marks=pytest.mark.full) for case in MORE)],
    ids=lambda value: value.rpartition(":")[2] if isinstance(value, str) else str(value),
)
def test_counted_is_measured(layer: str, world_size: int, run: dict[str, Any]) -> None:
    config = run_config("llama-tiny", **{**SIZES, **run, "custom_layer": layer})
    for peak in run_ranks(world_size, peak_of_training, config):
        assert -MOST_BELOW <= peak.foreseen / peak.measured - 1 <= MOST_ABOVE, peak
