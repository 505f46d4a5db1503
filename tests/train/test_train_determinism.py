"""--deterministic: two runs have the same bits, whatever would have them differ is refused, and the header tells."""

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from trainers import QUIET

import memo
from memo.config.run import HardwareConfig
from memo.errors import ConfigError
from memo.train.determinism import ENVIRONMENT, describe_bits, make_deterministic

RUN: dict[str, Any] = {
    **QUIET,
    "model": "llama-tiny",
    "num_layers": 2,
    "vocab_size": 97,
    "seq_length": 64,
    "mock_data": True,
    "device": "cpu",
    "profile_cache": "off",
    "deterministic": True,
}
Bits = tuple[list[float], bytes]


def train(**flags: Any) -> Bits:
    """Losses, and the weights after two steps."""
    world = dist.get_world_size()
    if world == 1:
        dist.destroy_process_group()  # run_ranks' own
    with memo.Trainer(**{**RUN, **flags}) as trainer:
        losses = [trainer.step().lm_loss for _ in range(2)]
        weights = torch.cat([p.detach().flatten() for chunk in trainer.parts.chunks for p in chunk.parameters()])
    assert torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled()
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8" and os.environ["NCCL_ALGO"] == "Ring"
    return losses, weights.view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize(
    "flags",
    [
        pytest.param({"params_dtype": "bf16"}, marks=pytest.mark.full),
        {"params_dtype": "fp32", "offload_alpha": 0.5, "offload_granularity": "tile", "offload_tiles": 4},
    ],
    ids=["plain", "swept"],
)
def test_two_runs_have_the_same_bits(flags: dict[str, Any]) -> None:
    first, second = (run_ranks(1, train, **flags) for _ in range(2))
    assert first == second


@pytest.fixture
def unset(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    for name in ENVIRONMENT:
        monkeypatch.delenv(name, raising=False)
    yield monkeypatch
    torch.use_deterministic_algorithms(False)


def wanted(is_wanted: bool = True) -> HardwareConfig:
    return HardwareConfig(deterministic=is_wanted)


def test_without_the_flag_nothing_is_set(unset: pytest.MonkeyPatch) -> None:
    make_deterministic(wanted(False))
    assert not torch.are_deterministic_algorithms_enabled() and not ENVIRONMENT.keys() & os.environ.keys()


@pytest.mark.parametrize(
    ("name", "value", "other"),
    [
        ("CUBLAS_WORKSPACE_CONFIG", ":0:0", ":16:8"),
        ("NCCL_ALGO", "Tree", "^NVLS"),
        ("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "1", "0"),
    ],
)
def test_an_environment_that_says_the_opposite_is_refused(
    name: str, value: str, other: str, unset: pytest.MonkeyPatch
) -> None:
    unset.setenv(name, other)
    make_deterministic(wanted())
    assert os.environ[name] == other and torch.are_deterministic_algorithms_enabled()
    unset.setenv(name, value)
    with pytest.raises(ConfigError, match=rf"--deterministic needs {name} to be .*{other.strip('^')}.* has {name}="):
        make_deterministic(wanted())


def test_the_header_says_whether_bits_repeat() -> None:
    (plain,) = run_ranks(1, header, deterministic=False)
    assert "bits: every run of these flags gives the same, as kernels of a CPU add in one order" in plain
    assert describe_bits(wanted(), "cuda", "flash") == (
        "bits: every run of these flags on such machines gives the same (--deterministic)"
    )
    assert describe_bits(wanted(False), "cuda", "cudnn") == (
        "bits: runs differ in the last ones, as the backward of cudnn adds in no fixed order: --deterministic makes "
        "them repeat"
    )


def header(**flags: Any) -> list[str]:
    dist.destroy_process_group()
    from memo.train.header import describe_start

    with memo.Trainer(**{**RUN, **flags}) as made:
        return describe_start(made.parts, made._prepared).splitlines()
