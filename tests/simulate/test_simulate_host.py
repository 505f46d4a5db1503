"""Small layers wait for the host to start their kernels; long sequences never do."""

from dataclasses import replace

import pytest
from frameworks import MEGATRON_LM

from memo.config import RunConfig, preset
from memo.estimate.hardware_files import HARDWARE
from memo.simulate import predict_step
from memo.simulate.framework import MEMO
from memo.simulate.host import kernels_of_layer
from memo.simulate.kernels import Kernels
from memo.simulate.layer import plain_layer, swapped_layer

H100 = HARDWARE["h100-80"]
HOST_S = H100.efficiency.host_kernel_s


def run(**values: object) -> RunConfig:
    base = {"seq_length": 1024, "offload_alpha": "off", "device": "cuda"}
    return RunConfig(model=preset("llama-3.1-8b")).override({**base, **values})


def test_a_small_layer_takes_what_its_host_takes() -> None:
    kernels = Kernels(H100, "bf16")
    small = run(tp=8, recompute_granularity="full")
    layer = plain_layer(small, kernels)
    assert layer.forward.total_s == pytest.approx((9 + 19) * HOST_S) and layer.forward.host > 0
    assert layer.backward.total_s == pytest.approx((25 + 39 + 19) * HOST_S)
    swapped = swapped_layer(run(tp=8, offload_alpha=0.5, offload_tiles=8), kernels)
    assert swapped.forward.total_s == pytest.approx((17 + 15 * 8) * HOST_S)
    free = Kernels(replace(H100, efficiency=replace(H100.efficiency, host_kernel_s=0.0)), "bf16")
    assert plain_layer(small, free).forward.host == 0 < plain_layer(small, free).forward.total_s < 28 * HOST_S


def test_long_sequences_never_wait_for_the_host() -> None:
    for values in ({"seq_length": 65536, "tp": 8}, {"seq_length": 65536, "tp": 8, "offload_alpha": "auto"}):
        assert predict_step(run(**values), 8, H100).seconds["host"] == 0.0


def test_a_step_says_how_long_it_waits_for_the_host() -> None:
    """In memo's own program, whose kernels are counted; Megatron-LM's are not known."""
    step = predict_step(run(tp=8, gbs=4), 8, H100)
    assert 0.1 < step.seconds["host"] / step.step_time_s < 0.9
    assert sum(step.seconds.values()) == pytest.approx(step.step_time_s)
    assert predict_step(run(tp=8, gbs=4), 8, H100, framework=MEGATRON_LM).seconds["host"] == 0.0
    assert MEMO.host_starts_kernels


def test_more_tiles_are_more_kernels() -> None:
    counts = [sum(kernels_of_layer(run(offload_alpha=0.5), tiles, swaps=True)) for tiles in (2, 4, 8)]
    assert counts == [148, 252, 460]
    swept = run(offload_alpha=0.5, offload_tiles=8, offload_granularity="tile")
    assert sum(kernels_of_layer(swept, 8, swaps=True)) == 9 + 17 + (38 + 75) * 8
