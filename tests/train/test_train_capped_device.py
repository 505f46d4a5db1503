"""A run that may use less of the device than it would take: its states are placed, its activations move, or it is
refused."""

from typing import Any

import pytest
from ranks import run_ranks

import memo
from memo.config import RunConfig, preset
from memo.errors import ResourceError
from memo.estimate.program.memory import program_memory
from memo.units import GIB, MIB

SCALARS_BYTES = 8192
"""AdamW's counts, norms of buckets and the like, which the account leaves out."""


def configuration(**changes: Any) -> RunConfig:
    values: dict[str, Any] = {"num_layers": 24, "seq_length": 128, "vocab_size": 257, "params_dtype": "fp32"}
    values |= {"device": "cpu", "mock_data": True, "peak_tflops": 1.0, "num_threads": 1, "progress": False}
    values |= {"offload_alpha": "off", "recompute_granularity": "full", "max_step_minutes": 1000.0}
    return RunConfig(model=preset("gpt-tiny")).override(values | changes)


CAP_BYTES = program_memory(configuration(), 1, 0).states.device // 5
CAPPED: dict[str, Any] = {"device_memory_gib": CAP_BYTES / GIB}


def train(**changes: Any) -> tuple[list[float], int, int, memo.RunConfig]:
    """Losses, the peak of what torch allocated after the first step, what was foreseen, and the run as resolved."""
    from allocated_bytes import AllocatedBytes

    counter = AllocatedBytes()
    with memo.Trainer(config=configuration(**changes)) as trainer:
        losses = [trainer.step().lm_loss]
        counter.take_peak_bytes()
        losses += [trainer.step().lm_loss for _ in range(2)]
        known = trainer.config.override({"offload_alpha": "off"})  # what auto moves is measured
        return losses, counter.take_peak_bytes(), program_memory(known, 1, 0).total, trainer.config


def test_it_is_refused_with_the_numbers() -> None:
    with pytest.raises(ResourceError) as refused:
        memo.Trainer(config=configuration(**CAPPED))
    message = str(refused.value)
    needed = program_memory(configuration(), 1, 0).total
    assert f"{needed} bytes" in message and f"{CAP_BYTES} bytes are allowed" in message
    assert "use --offload-states auto" in message


def test_it_trains_with_its_states_placed() -> None:
    ((expected, resident_bytes, _, _),) = run_ranks(1, train)
    ((losses, peak_bytes, foreseen_bytes, config),) = run_ranks(1, train_capped)
    assert resident_bytes > 5 * CAP_BYTES
    assert 0 <= peak_bytes - foreseen_bytes <= SCALARS_BYTES
    assert peak_bytes <= CAP_BYTES + SCALARS_BYTES
    assert losses == expected
    assert config.memory.offload_states == "all" and (config.memory.weight_offload_fraction or 1.0) < 1.0


def train_capped() -> tuple[list[float], int, int, memo.RunConfig]:
    return train(**CAPPED, offload_states="auto")


ACTIVATIONS: dict[str, Any] = {"num_layers": 6, "seq_length": 1536, "recompute_granularity": "none"}


def test_its_activations_move_under_the_limit() -> None:
    """The host has room for all of them, so without the limit none moves."""
    ((expected, resident_bytes, _, _),) = run_ranks(1, train_long)
    ((losses, peak_bytes, _, _),) = run_ranks(1, train_long_capped)
    assert resident_bytes > 1.5 * _cap_of_activations()
    assert peak_bytes <= _cap_of_activations() + SCALARS_BYTES
    assert losses == expected


def _cap_of_activations() -> int:
    """What the run takes at least: with nothing but what always moves on its way to the host."""
    return program_memory(configuration(**ACTIVATIONS, offload_alpha=0.0), 1, 0).total + MIB


def train_long() -> tuple[list[float], int, int, memo.RunConfig]:
    return train(**ACTIVATIONS, offload_alpha="auto")


def train_long_capped() -> tuple[list[float], int, int, memo.RunConfig]:
    return train(**ACTIVATIONS, offload_alpha="auto", device_memory_gib=_cap_of_activations() / GIB)


def test_layers_that_would_be_swept_run_whole_where_nothing_has_to_move() -> None:
    swept = {"offload_alpha": "auto", "offload_granularity": "tile", "offload_tiles": 4}
    found = []
    for memory in ({}, swept):
        with memo.Trainer(config=configuration(num_layers=2, recompute_granularity="none", **memory)) as trainer:
            found.append([trainer.step().lm_loss for _ in range(2)])
            assert trainer.parts.swap is None
    assert found[0] == found[1]
