"""The choice of experts is made once: a backward that rebuilds everything takes the forward's, to the last token."""

from typing import Any

import pytest
import torch
from layouts import make, one_step_backward, tiny
from torch import Tensor

from memo.model.layer import Experts

torch.set_num_threads(1)
LAYERS, TILES, BATCH, STEPS = 2, 4, 2, 200


def bits(routing: Tensor) -> bytes:
    return routing.contiguous().flatten().view(torch.uint8).numpy().tobytes()


@pytest.mark.full
@pytest.mark.parametrize("model", ["qwen3-moe-tiny", "glm-4.5-tiny"])
def test_nothing_is_routed_again_in_200_steps_of_bf16(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """At alpha 0 all that may be rebuilt is; the bits of each routing in backward are those of one in forward."""
    routed: list[bytes] = []
    taken: list[bytes] = []
    route, rows = Experts.route, Experts.rows

    def watched_route(self: Experts, x: Tensor) -> Tensor:
        routing = route(self, x)
        routed.append(bits(routing))
        return routing

    def watched_rows(self: Experts, routing: Tensor) -> Any:
        taken.append(bits(routing))
        return rows(self, routing)

    monkeypatch.setattr(Experts, "route", watched_route)
    monkeypatch.setattr(Experts, "rows", watched_rows)
    values = {"offload_alpha": 0.0, "offload_tiles": TILES, "global_batch_size": BATCH, "profile_cache": "off"}
    config = tiny(model, "bf16", num_layers=LAYERS, moe_layer_freq="", moe_aux_loss_coeff=0.01, **values)
    parallel_model, feed = make(config, 1)
    choices = set()
    for _ in range(STEPS):
        routed.clear()  # also what a profile of the layer ran
        taken.clear()
        one_step_backward(parallel_model, feed)
        parallel_model.optimizer.step(1e-2)
        assert len(routed) == LAYERS * TILES * BATCH
        assert set(taken) == set(routed) and len(taken) >= 2 * len(routed)
        choices.update(routed)
    assert len(choices) > STEPS  # they do change from step to step
