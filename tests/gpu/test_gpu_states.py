"""States in host memory on a GPU: placements agree with each other to the bit, and with resident states to rounding."""

from functools import partial

import pytest
import torch
from gpu_sizes import SHORTER

from memo import Trainer

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

STEPS = 5
ROUNDING = 2e-2
"""Of losses in bf16 after five steps: AdamW rounds otherwise on a CPU, which now and then tips a bf16 weight over."""


def losses_of(**overrides: object) -> list[float]:
    with Trainer(
        "llama-tiny",
        mock_data=True,
        vocab_size=1024,
        seq_length=1024 // SHORTER,
        micro_batch_size=2,
        global_batch_size=4,
        train_iters=STEPS,
        lr=3e-3,
        device="cuda",
        deterministic=True,
        memory_planner="off",
        **overrides,
    ) as trainer:
        return [trainer.step().lm_loss for _ in range(STEPS)]


@pytest.mark.parametrize(("plan", "moments"), [("off", "fp32"), (0.5, "fp32"), ("off", "bf16")])
def test_placements_agree(plan: str | float, moments: str) -> None:
    losses = partial(losses_of, exp_avg_dtype=moments, exp_avg_sq_dtype=moments)
    resident = losses(plan=plan)
    on_host = losses(plan=plan, offload_states="optimizer")
    assert on_host == pytest.approx(resident, rel=ROUNDING)
    for placement in (
        {"offload_states": "all"},
        {"offload_states": "all", "offload_weight_copy": False},
        {"offload_states": "all", "gradient_accumulation_order": "breadth_first"},
    ):
        assert losses(plan=plan, **placement) == on_host, placement


def test_updates_beside_backward_change_no_bit() -> None:
    """Without clipping the CPU updates layers while the GPU computes; with a bound that never binds it does not."""
    beside = losses_of(plan="off", offload_states="all", clip_grad=0.0)
    assert losses_of(plan="off", offload_states="all", clip_grad=1e9) == beside


def test_states_are_not_on_the_device() -> None:
    """Slots for two of 24 layers are, and the copies are timed."""
    with Trainer(
        "llama-tiny", num_layers=24, mock_data=True, seq_length=256, device="cuda", plan="off", offload_states="all"
    ) as trainer:
        record = [trainer.step() for _ in range(2)][-1]
        assert trainer.parts.states is not None
        assert (record.optimizer_bytes or 0) < 1e6 < (record.host_records_bytes or 0)
        assert record.state_copies_s is not None and record.state_copies_s > 0
