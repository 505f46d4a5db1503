"""The time of a custom layer: memo's own layer, written as one, costs little more on long sequences."""

from typing import Any

import pytest
from custom_layers import PLAIN

from memo.config import RunConfig, preset
from memo.estimate.hardware_files import HARDWARE
from memo.simulate.kernels import Kernels
from memo.simulate.layer import plain_layer, swapped_layer

KERNELS = Kernels(HARDWARE["h100-80"], "bf16")


@pytest.mark.parametrize("tp", [1, 8])
@pytest.mark.parametrize(
    ("memory", "more"),
    [
        ({"offload_alpha": "off"}, 0.04),
        ({"offload_alpha": 0.5}, 0.1),  # both halves run again, but for what moves
        ({"offload_alpha": 0.5, "offload_granularity": "tile"}, 0.1),
    ],
    ids=str,
)
def test_memos_own_layer_as_a_custom_one(tp: int, memory: dict[str, Any], more: float) -> None:
    own = RunConfig(model=preset("llama-3.1-8b")).override({"seq_length": 524288, "tp": tp, **memory})
    of = plain_layer if memory["offload_alpha"] == "off" else swapped_layer
    expected, found = (of(run, KERNELS) for run in (own, own.override({"custom_layer": PLAIN})))
    for ours, theirs in ((expected.forward, found.forward), (expected.backward, found.backward)):
        # Without a swap plan memo's own layer makes norms and activations again, which autograd keeps of a custom one.
        least = 0.97 if memory["offload_alpha"] == "off" else 1.0
        assert least <= theirs.total_s / ours.total_s <= 1.0 + more
    if memory["offload_alpha"] != "off":
        assert found.recompute.keys() == {"qkv", "fc1"}
        assert found.recompute["fc1"].matmul == pytest.approx(expected.recompute["fc1"].matmul)
