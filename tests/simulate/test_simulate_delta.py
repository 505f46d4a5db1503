"""What gated delta nets are foreseen to take by each of --delta-backend."""

from dataclasses import replace

import pytest

from memo.config import RunConfig, preset
from memo.estimate.hardware_files import HARDWARE
from memo.simulate.delta import FLA_GROUP_KERNELS, delta_cost, kernels_of_delta
from memo.simulate.kernels import Kernels
from memo.simulate.layer_shape import LayerShape
from memo.spec.stack import runs_of_kinds

TOKENS = 32768


def net(backend: str, **values: object) -> LayerShape:
    """Of qwen3.5-4b on an H200: 32 heads of values, and 16 of keys, of 128 each."""
    given = {"seq_length": TOKENS, "micro_batch_size": 1, "params_dtype": "bf16", "delta_backend": backend, **values}
    config = replace(RunConfig(), model=preset("qwen3.5-4b")).override(given)
    (run,) = (run for run in runs_of_kinds(config) if run.model.is_linear)
    return LayerShape(run, Kernels(HARDWARE["h200"], "bf16"))


@pytest.mark.parametrize(("is_backward", "rule_s", "convolutions"), [(False, 1.890e-3, 2), (True, 5.697e-3, 8)])
def test_the_rule_of_fla_takes_what_others_measured(is_backward: bool, rule_s: float, convolutions: int) -> None:
    """Beside the convolution of 8,192 channels and the beginnings of kernels; a backward runs two forwards as well."""
    shape = net("fla")
    found = delta_cost(shape, is_backward).total_s - shape.kernels.kernel_s * kernels_of_delta(
        shape.config, is_backward
    )
    if is_backward:
        forward = delta_cost(shape, backward=False).total_s
        found -= 2 * (forward - shape.kernels.kernel_s * kernels_of_delta(shape.config, backward=False))
    convolution_s = shape.kernels.memory_s(convolutions * 2 * TOKENS * 8192, 0)
    assert found - convolution_s == pytest.approx(rule_s, rel=0.02)


def test_fla_starts_few_kernels_and_takes_a_small_part() -> None:
    by_fla, by_torch = net("fla"), net("torch")
    assert kernels_of_delta(by_fla.config, backward=False) == 4 * FLA_GROUP_KERNELS[False]  # groups of 8,192 tokens
    for is_backward in (False, True):
        assert delta_cost(by_fla, is_backward).total_s < 0.1 * delta_cost(by_torch, is_backward).total_s


def test_what_is_not_decided_is_torchs() -> None:
    assert delta_cost(net("auto"), backward=True) == delta_cost(net("torch"), backward=True)
