"""memo's CUDA code in training, adversarially: every schedule gives the same losses, and nothing is unordered."""

from typing import Any

import pytest

import memo
from memo.emulated_gpu.face import EmulatedGpu
from memo.executor.streams import CudaStreams

STEPS = 3
BASE: dict[str, Any] = {
    "mock_data": True,
    "num_layers": 3,
    "seq_length": 64,
    "micro_batch_size": 1,
    "global_batch_size": 2,
    "train_iters": STEPS,
    "lr": 1e-3,
    "num_threads": 1,
    "progress": False,
    "offload_alpha": "off",
    "log_interval": 100,  # reading numbers each step would hide races between steps
    "attention_backend": "flash",
}
PLANNED = {"memory_planner": "auto", "memory_planner_min_bytes": 4096}
UNSWAPPED: dict[str, dict[str, Any]] = {
    "plain": {},
    "states": {"offload_states": "all"},
    "planned": PLANNED,
    "planned, states": {"offload_states": "optimizer", **PLANNED},
}
SWAPPED: dict[str, dict[str, Any]] = {
    "alpha 0": {"offload_alpha": 0.0},
    "alpha 1/2": {"offload_alpha": 0.5},
    "alpha 1": {"offload_alpha": 1.0},
    "cudnn": {"offload_alpha": 0.5, "attention_backend": "cudnn"},  # one CPU kernel stands for it and for flash
    "states": {"offload_alpha": 0.5, "offload_states": "all"},
    "planned, states": {"offload_alpha": 0.5, "offload_states": "all", **PLANNED},
}
"""Layers that run tile by tile add up in another order than whole ones, on a CPU as here."""

UNCLIPPED = {"offload_states": "all", "clip_grad": 0.0}
FIRST_STEP, LATER_STEPS = 1e-4, 2.0**-8
"""Relative distance from the CPU: attention there rounds otherwise, and weights in bf16 may then be neighbours."""

Curve = list[tuple[float, float]]


def curve(device: str, flow: dict[str, Any]) -> Curve:
    """Loss and gradient norm of each step."""
    attention = {"attention_backend": "auto"} if device == "cpu" else {}
    options = {**BASE, **flow, "device": device, **attention}
    with memo.Trainer("llama-tiny", **options) as trainer:
        steps = [trainer.step() for _ in range(STEPS)]
        return [(step.lm_loss, step.grad_norm) for step in steps]


@pytest.fixture(scope="module")
def plain() -> Curve:
    EmulatedGpu().set_schedule("eager")
    return curve("cuda", UNSWAPPED["plain"])


@pytest.fixture(scope="module")
def swapped() -> Curve:
    EmulatedGpu().set_schedule("eager")
    return curve("cuda", SWAPPED["alpha 1"])


@pytest.fixture(scope="module")
def unclipped() -> Curve:
    EmulatedGpu().set_schedule("eager")
    return curve("cuda", UNCLIPPED)


def test_losses_are_the_cpus(gpu: EmulatedGpu, plain: Curve, swapped: Curve) -> None:
    for found, flow in ((plain, UNSWAPPED["plain"]), (swapped, SWAPPED["alpha 1"])):
        expected = curve("cpu", flow)
        assert found[0] == pytest.approx(expected[0], rel=FIRST_STEP)
        for step, on_cpu in zip(found, expected, strict=True):
            assert step == pytest.approx(on_cpu, rel=LATER_STEPS)


# `any_schedule` fails a test for every race that was seen in it.


@pytest.mark.parametrize("flow", UNSWAPPED)
def test_streaming_and_planning_change_no_bit(any_schedule: EmulatedGpu, plain: Curve, flow: str) -> None:
    assert curve("cuda", UNSWAPPED[flow]) == plain


@pytest.mark.parametrize("flow", SWAPPED)
def test_swapping_changes_no_bit(any_schedule: EmulatedGpu, swapped: Curve, flow: str) -> None:
    assert curve("cuda", SWAPPED[flow]) == swapped


def test_streamed_states_without_clipping(any_schedule: EmulatedGpu, unclipped: Curve) -> None:
    """Each layer's update then follows its own gradient at once, with no wait for a norm."""
    assert curve("cuda", UNCLIPPED) == unclipped


@pytest.mark.parametrize("flow", ["alpha 1/2", "planned, states"])
def test_twenty_random_schedules_change_no_bit(gpu: EmulatedGpu, swapped: Curve, flow: str) -> None:
    for seed in range(20):
        gpu.set_schedule("random", seed)
        assert curve("cuda", SWAPPED[flow]) == swapped, f"seed {seed}"


def test_a_wait_that_is_left_out_is_seen(gpu: EmulatedGpu, monkeypatch: pytest.MonkeyPatch, swapped: Curve) -> None:
    """Else the tests above could not fail. Eager work, whose numbers are right by luck."""
    gpu.set_schedule("eager")
    gpu.clear()
    monkeypatch.setattr(CudaStreams, "wait", lambda *_: None)
    assert curve("cuda", SWAPPED["alpha 1/2"]) == swapped
    assert gpu.races()
    gpu.clear()
