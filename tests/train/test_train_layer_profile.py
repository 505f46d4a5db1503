"""Where a run's layer profile comes from: a file, the cache, or a measurement; and that all ranks take one way."""

import dataclasses
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from layouts import tiny
from ranks import run_ranks

import memo
from memo.artifacts.layer_profile import LayerProfile
from memo.config import RunConfig
from memo.errors import ArtifactError, ConfigError
from memo.train import layer_profile
from memo.train.build import build, build_mesh
from memo.train.parallel_model import ParallelModel

CPU = torch.device("cpu")


class Count:
    """Stands before `profile_layer` and counts its calls; `factor` makes a rank's results those of a slower one."""

    def __init__(self, factor: float = 1.0) -> None:
        self.calls, self.factor = 0, factor
        self.measure = layer_profile.profile_layer
        self.measured: LayerProfile | None = None

    def __call__(self, *args: Any) -> LayerProfile:
        self.calls += 1
        found = self.measure(*args)
        self.measured = dataclasses.replace(
            found,
            forward_s=found.forward_s * self.factor,
            recompute_s={group: seconds * self.factor for group, seconds in found.recompute_s.items()},
            offload_bytes_per_s=found.offload_bytes_per_s / self.factor,
        )
        return self.measured


@pytest.fixture
def count(monkeypatch: pytest.MonkeyPatch) -> Count:
    counter = Count()
    monkeypatch.setattr(layer_profile, "profile_layer", counter)
    return counter


def trainer(cache: Path | str, **overrides: Any) -> memo.Trainer:
    values: dict[str, Any] = {"num_layers": 2, "hidden_size": 32, "seq_length": 64, "mock_data": True, "device": "cpu"}
    values |= {"peak_tflops": 1.0, "num_threads": 1, "profile_cache": str(cache)}
    return memo.Trainer("gpt-tiny", **{**values, **overrides})


def origin(made: memo.Trainer) -> str:
    assert made.parts.chosen_swap is not None
    return made.parts.chosen_swap.origin


def test_the_second_start_measures_nothing_and_says_so(tmp_path: Path, count: Count) -> None:
    first, second = trainer(tmp_path), trainer(tmp_path, lr=0.5, num_layers=4, train_iters=7)
    assert count.calls == 1
    (kept,) = tmp_path.iterdir()
    assert LayerProfile.load(kept) == count.measured  # one rank: its own numbers
    assert origin(first) == f"measured now, kept in {kept}"
    date = LayerProfile.load(kept).measured_on
    told = f"from {kept} of {date}; to measure again: `memo profile` with the same flags, or --profile-cache off"
    assert origin(second) == told
    for made in (first, second):
        assert made.parts.chosen_swap is not None and count.measured is not None
        assert made.parts.chosen_swap.problem.forward_s == count.measured.forward_s


@pytest.mark.parametrize("change", [{"seq_length": 128}, {"params_dtype": "fp64"}, {"num_threads": 2}])
def test_another_layer_is_measured(tmp_path: Path, count: Count, change: dict[str, Any]) -> None:
    trainer(tmp_path)
    trainer(tmp_path, **change)
    assert count.calls == 2 and len(list(tmp_path.iterdir())) == 2


def test_off_measures_at_each_start_and_writes_nothing(
    tmp_path: Path, count: Count, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert origin(trainer("off")) == origin(trainer("off")) == "measured now"
    assert count.calls == 2 and list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("text", ["{", '{"schema": "layer_profile", "version": 0}'], ids=["corrupt", "old"])
def test_a_kept_file_that_cannot_be_used_is_replaced_with_a_warning(tmp_path: Path, count: Count, text: str) -> None:
    trainer(tmp_path)
    (kept,) = tmp_path.iterdir()
    kept.write_text(text)
    with pytest.warns(UserWarning, match=rf"the kept profile is not used, the layer is measured: {kept}"):
        trainer(tmp_path)
    assert count.calls == 2 and LayerProfile.load(kept) == count.measured


def test_a_cache_that_cannot_be_written_is_a_warning(tmp_path: Path, count: Count) -> None:
    (tmp_path / "file").write_text("")
    with pytest.warns(UserWarning, match=r"the layer's profile is not kept: .*, or --profile-cache off"):
        made = trainer(tmp_path / "file" / "below")
    assert origin(made) == "measured now" and made.step().iteration == 1


def test_a_given_file_is_used_and_refused_in_another_run(tmp_path: Path, count: Count) -> None:
    trainer(tmp_path / "cache")
    (kept,) = (tmp_path / "cache").iterdir()
    made = trainer("off", layer_profile=str(kept))
    assert count.calls == 1 and origin(made) == f"from {kept} of {LayerProfile.load(kept).measured_on}"
    with pytest.raises(ConfigError) as caught:
        trainer("off", layer_profile=str(kept), seq_length=128, micro_batch_size=2)
    assert str(caught.value) == (
        f"--layer-profile {kept} was not measured for this run: seq_length is 64 there and 128 here; micro_batch_size "
        f"is 1 there and 2 here: run `memo profile --out {kept}` with the flags of this run, or leave --layer-profile "
        "out"
    )
    with pytest.raises(ArtifactError, match="nowhere: the file does not exist: give a layer_profile file"):
        trainer("off", layer_profile="nowhere")
    assert count.calls == 1


CHANGES: list[dict[str, Any]] = [
    {"hidden_size": 64},
    {"num_query_groups": 2},
    {"kv_channels": 16},
    {"ffn_hidden_size": 96},
    {"normalization": "RMSNorm"},
    {"activation": "swiglu"},
    {"position_embedding_type": "learned_absolute"},
    {"add_bias_linear": True},
    {"add_qkv_bias": True},
    {"qk_layernorm": True},
    {"qk_layernorm": True, "qk_layernorm_across_heads": True},
    {"norm_placement": "after"},
    {"attention_sinks": True},
    {"seq_length": 128},
    {"micro_batch_size": 2},
    {"tp": 2},
    {"cp": 2},
    {"cp": 2, "cp_comm_type": "all_gather"},
    {"cp": 4, "cp_comm_type": "a2a+p2p", "cp_a2a_size": 2},
    {"cp": 4, "cp_comm_type": "a2a+p2p", "cp_a2a_size": 4},
    {"params_dtype": "fp32"},
    {"offload_tiles": 4},
    {"attention_backend": "cpu"},
]
SAME: list[dict[str, Any]] = [
    {"num_layers": 4},
    {"vocab_size": 99},
    {"pp": 2},
    {"global_batch_size": 8},
    {"lr": 1.0},
    {"offload_policy": "paper"},
    {"offload_host_memory_gib": 1.0},
    {"kv_channels": 8},  # what it is by default
    {"cp_comm_type": "a2a"},  # without context parallelism
]


def test_the_key_names_what_changes_a_layer_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    config = tiny(offload_alpha="auto")
    plain = layer_profile.profile_key(config, CPU)
    changed = [layer_profile.profile_key(config.override(change), CPU) for change in CHANGES]
    assert len({plain, *changed}) == 1 + len(CHANGES)
    assert all(layer_profile.profile_key(config.override(same), CPU) == plain for same in SAME)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    assert layer_profile.profile_key(config, CPU).differences(plain) == "ranks_per_node is 3 there and 1 here"
    assert plain.num_threads == torch.get_num_threads() and plain.torch == torch.__version__
    assert plain.device and plain.memo == memo.__version__


def _model(config: RunConfig) -> ParallelModel:
    return build(config, build_mesh(config, dist.get_rank(), dist.get_world_size()), torch.float64, CPU)


def _starts(folder: str, values: dict[str, Any], device_names: tuple[str, str]) -> list[tuple[int, str, float]]:
    """Two starts of one run, with a cache of its own on each rank: (measurements so far, origin, forward_s)."""
    rank = dist.get_rank()
    layer_profile.device_name = lambda device: device_names[rank]
    layer_profile.profile_layer = counter = Count()
    found = []
    for _ in range(2):
        chosen = _model(tiny(offload_alpha="auto", profile_cache=os.path.join(folder, str(rank)), **values)).chosen_swap
        assert chosen is not None
        found.append((counter.calls, chosen.origin, chosen.problem.forward_s))
    return found


@pytest.mark.parametrize("values", [{"tp": 2}, {"pp": 2}, {}], ids=["tp", "pp", "dp"])
def test_all_ranks_start_from_what_rank_0_kept(tmp_path: Path, values: dict[str, Any]) -> None:
    ranks = run_ranks(2, _starts, str(tmp_path), values, ("a", "a"))
    assert [[calls for calls, _, _ in starts] for starts in ranks] == [[1, 1], [1, 1]]
    assert len({forward_s for starts in ranks for _, _, forward_s in starts}) == 1
    (kept,) = (tmp_path / "0").iterdir()
    assert not (tmp_path / "1").exists()
    assert all(starts[1][1].startswith(f"from {tmp_path}") for starts in ranks)
    assert ranks[0][1][1].startswith(f"from {kept} of ")


def test_ranks_on_different_devices_measure_together_each_time(tmp_path: Path) -> None:
    """The kept profile fits rank 0 alone; if only rank 1 measured, it would wait for ever."""
    ranks = run_ranks(2, _starts, str(tmp_path), {"tp": 2}, ("a", "b"))
    assert [[calls for calls, _, _ in starts] for starts in ranks] == [[1, 2], [1, 2]]


def _profiled() -> tuple[list[float], float]:
    kinds = {"layer_types": "linear,full", "attention_output_gate": False}  # the delta net alone has a gate
    chosen = _model(tiny("qwen3.5-tiny", pp=2, offload_alpha=0.5, num_query_groups=4, **kinds)).chosen_swap
    assert chosen is not None
    return [group.recompute_s for group in chosen.problem.groups], chosen.problem.forward_s


def test_stages_with_other_kinds_of_layers_have_one_profile() -> None:
    first, second = run_ranks(2, _profiled)
    assert first == second


def _slowest(factors: tuple[float, float]) -> tuple[LayerProfile, LayerProfile]:
    layer_profile.profile_layer = counter = Count(factors[dist.get_rank()])
    config = tiny(offload_alpha="off", seq_length=64)
    model = _model(config)
    layer = model.chunks[0].layers[0].layer  # what the executor runs
    gradient = model.data_parallel.main_gradients.main_gradient
    agreed = layer_profile.measure(config.override({"offload_alpha": "auto"}), model.mesh, {0: layer}, gradient, CPU)
    assert counter.measured is not None
    return counter.measured, agreed


def test_a_run_goes_at_the_pace_of_its_slowest_rank_and_link() -> None:
    (own_0, agreed), (own_1, other) = run_ranks(2, _slowest, (1.0, 1e6))
    assert agreed == dataclasses.replace(other, measured_at=agreed.measured_at)
    assert agreed.forward_s == own_1.forward_s > own_0.forward_s
    assert agreed.recompute_s == own_1.recompute_s
    assert agreed.offload_bytes_per_s == own_1.offload_bytes_per_s < own_0.offload_bytes_per_s
    assert agreed.prefetch_bytes_per_s == min(own_0.prefetch_bytes_per_s, own_1.prefetch_bytes_per_s)
    assert agreed.backward_s == max(own_0.backward_s, own_1.backward_s)
