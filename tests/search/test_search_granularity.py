"""What --offload-granularity auto takes at full size, without a device: the way that memo plan would take first."""

from dataclasses import replace
from typing import Any

import pytest

from memo.config import RunConfig, preset
from memo.config.checks import check
from memo.errors import ResourceError
from memo.estimate.machines import find_hardware
from memo.estimate.node_memory import node_host_bytes
from memo.estimate.verdict import MemoryLimits
from memo.search.candidates import Layout
from memo.search.granularity import Machine, resolve_granularity
from memo.search.question import ask
from memo.search.sweeping import sweeps
from memo.spec.sweep import WHOLE, Sweep, sweep_of, with_sweep
from memo.units import GIB

H100 = find_hardware("h100-80")


def run(seq_length: int, **overrides: Any) -> RunConfig:
    values = {"seq_length": seq_length, "tp": 8, "device": "cuda", "params_dtype": "bf16", "mock_data": True}
    config = RunConfig(model=preset("llama-3.1-8b")).override({**values, "offload_granularity": "auto", **overrides})
    check(config, config.parallel.model_ranks, needs_data=False)
    return config


def resolved(config: RunConfig, gpu_gib: float = 77, host_gib: float = 1843, **values: Any) -> RunConfig:
    """On as few GPUs as one copy of the model takes; checked as flags of a user would be."""
    gpus = config.parallel.model_ranks
    machine = Machine(gpus, H100, MemoryLimits(gpu_gib * GIB, host_gib * GIB, gpus))
    found = resolve_granularity(config, machine, **values)
    assert found.memory.offload_granularity != "auto"
    check(found, gpus, needs_data=False)
    return found


@pytest.mark.parametrize("tokens", [1 << 16, 1 << 20, 1 << 22])
def test_a_way_to_sweep_is_one_of_the_plans_own(tokens: int) -> None:
    question = ask("llama-3.1-8b", 8, seq_len=tokens, hardware="h100-80", host_memory_gib=2048)
    limits = question.limits
    found = resolve_granularity(run(tokens), Machine(8, question.hardware, limits))
    ways = [strategy.sweep for strategy in sweeps(question, Layout(tp=8))]
    assert sweep_of(found) in [WHOLE, *ways] and (sweep_of(found) == WHOLE) == (tokens < 1 << 22)


def test_as_few_layers_as_host_memory_asks_for_recompute_attention() -> None:
    at = 1 << 22
    found = sweep_of(resolved(run(at)))
    assert 0 < found.recompute_attention_layers < 32 and not found.hidden_on_host
    needed = [
        node_host_bytes(
            with_sweep(run(at), replace(found, recompute_attention_layers=found.recompute_attention_layers - less)),
            8,
            8,
            moved={},
        )
        / GIB
        for less in (0, 1)
    ]
    assert needed[0] <= 1843 < needed[1]
    assert sweep_of(resolved(run(at), host_gib=4 * 1843)).recompute_attention_layers == 0


def test_hidden_states_leave_only_where_the_device_lacks_room() -> None:
    at = 1 << 25
    assert not sweep_of(resolved(run(at), host_gib=20_000, gpu_gib=192)).hidden_on_host
    assert sweep_of(resolved(run(at), host_gib=20_000)).hidden_on_host
    stages = run(at, tp=4, pp=2)  # which send each other hidden states whole
    with pytest.raises(ResourceError):
        resolved(stages, host_gib=20_000)


def test_states_are_placed_for_the_layers_that_were_chosen() -> None:
    found = resolved(run(1 << 20, tp=1, offload_states="auto"), host_gib=921)
    assert sweep_of(found).tiles == 32 and found.memory.offload_states == "all"
    with pytest.raises(ResourceError, match="use --offload-states auto, a smaller --seq-length"):
        resolved(run(1 << 20, tp=1), host_gib=921)


def test_the_tiles_of_a_checkpoint_come_first_where_they_fit() -> None:
    at, before = 1 << 20, Sweep(64, 2, recompute_attention_layers=3, hidden_on_host=True)
    assert sweep_of(resolved(run(at), before=before)) == Sweep(64, 2)  # what does not round is chosen anew
    assert sweep_of(resolved(run(at), before=WHOLE)) == WHOLE
    assert sweep_of(resolved(run(1 << 22), before=WHOLE)).tiles == 128
    assert sweep_of(resolved(run(at), before=Sweep(48, 2))) == WHOLE  # 1M tokens do not divide by 48


def test_rings_keep_whole_layers_or_say_why_they_cannot() -> None:
    assert sweep_of(resolved(run(1 << 19, tp=1, cp=8))) == WHOLE
    with pytest.raises(ResourceError, match="layers cannot be swept: --cp-comm-type p2p would pass all keys"):
        resolved(run(1 << 22, tp=1, cp=8))


def test_any_other_configuration_stays_as_it_is() -> None:
    config = run(1 << 23, offload_granularity="layer")
    assert resolve_granularity(config, Machine(8, H100, MemoryLimits(1, 1, 8))) is config


def test_what_must_not_fit_is_what_needs_least() -> None:
    found = sweep_of(resolved(run(1 << 24), must_fit=False))
    assert found.recompute_attention_layers == 32
