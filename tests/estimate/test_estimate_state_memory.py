"""Bytes of placed states: each term counted from the buckets by hand, and what each estimate makes of them."""

from dataclasses import replace
from typing import Any

import pytest

from memo.config import RunConfig, preset
from memo.config.checks import check
from memo.errors import ResourceError
from memo.estimate.admission import Room, admit
from memo.estimate.cases import read_case
from memo.estimate.node_memory import node_host_bytes
from memo.estimate.program.memory import Program, program_memory
from memo.estimate.rank_memory import rank_memory
from memo.estimate.state_memory import StateBytes, checkpoint_bytes, state_bytes
from memo.search.estimating import answer
from memo.spec.buckets import rank_units
from memo.spec.parameters import count_parameters
from memo.spec.placement import StatePlacement, placement_of
from memo.spec.shapes import shape_of
from memo.units import GIB


def run(name: str = "llama-tiny", **values: Any) -> RunConfig:
    config = RunConfig(model=preset(name)).override({"vocab_size": 257, "device": "cpu", "seq_length": 256, **values})
    check(config, 8, needs_data=False)
    return config


def one_by_one(config: RunConfig, at: StatePlacement, world_size: int, stage: int = 0) -> StateBytes:
    """The contract, layer by layer. Elements are int, bytes exact, for sizes that divide by the shards."""
    units = rank_units(config, world_size, stage)
    narrow = 2 if config.training.params_dtype == "bf16" else 4
    moments = 2 * ((config.training.exp_avg_dtype == "fp32") + (config.training.exp_avg_sq_dtype == "fp32")) + 4
    shards = world_size // (config.parallel.tp * config.parallel.pp)
    count = (config.training.global_batch_size or shards) // shards
    has_masters, whole, part = narrow == 2, units.layer.size, units.layer.size // shards
    weights = gradients = elements = numel = host = 0
    for turn in range(at.layers):
        on_host = turn < at.optimizer
        gradient_slot, weight_slot = at.shards_gradients or turn < at.gradients, at.shards_weights or turn < at.weights
        weights += (part if at.shards_weights and not on_host else 0) if weight_slot else whole
        gradients += (part if at.shards_gradients and not on_host else 0) if gradient_slot else whole
        elements, numel = elements + part * (not on_host), numel + units.layer.numel * (not on_host)
        host += (8 + moments) * part * on_host
        host += 4 * whole * (gradient_slot and not at.shards_gradients and count > 1 < shards)
        host += 2 * part * (on_host and weight_slot and has_masters and at.weight_copy)
    back = [units.layer.largest] if at.optimizer > (at.optimizer if at.shards_weights else at.weights) else []
    for end in units.ends:
        weights, gradients = weights + end.size, gradients + end.size
        if at.ends_on_host:
            host, back = host + (8 + moments) * end.size // shards, [*back, end.largest]
        else:
            elements, numel = elements + end.size // shards, numel + end.numel
    weight_slots = min(2, at.layers if at.shards_weights else at.weights)
    gradient_slots = min(2, at.layers if at.shards_gradients else at.gradients)
    streams = at.optimizer > 0 if at.shards_weights else at.weights > 0
    stages = max(gradient_slots, min(2, at.optimizer)) + (at.shards_gradients and at.optimizer > 0 and count > 1)
    staging = stages * part * 4 * (shards > 1) + weight_slots * part * narrow * (streams and shards > 1)
    staging += units.layer.largest // shards * 4 * (streams and has_masters and not at.weight_copy)
    return StateBytes(
        weights * narrow,
        gradients * 4,
        elements * 4 * has_masters,
        -(-numel // shards) * moments,
        whole * (narrow * weight_slots + 4 * gradient_slots),
        staging,
        host + 2 * max(back, default=0) // shards * narrow * (at.optimizer > 0 and has_masters),
    )


NARROW = {"exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "bf16"}
PLACEMENTS = [
    {},
    {"optimizer": 2},
    {"optimizer": 4},
    {"optimizer": 3, "gradients": 2},
    {"optimizer": 3, "gradients": 1, "weights": 2},
    {"optimizer": 4, "gradients": 4, "weights": 4},
    {"optimizer": 4, "weights": 4, "weight_copy": False},
    {"optimizer": 2, "shards_gradients": True},
    {"shards_gradients": True, "shards_weights": True},
    {"optimizer": 4, "shards_gradients": True, "shards_weights": True, "weight_copy": False},
]


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize(
    ("values", "world_size"),
    [
        ({}, 1),
        ({"params_dtype": "bf16"}, 1),
        ({"params_dtype": "bf16", "gbs": 8}, 2),
        ({"params_dtype": "bf16", "gbs": 8, **NARROW}, 2),
        ({"exp_avg_sq_dtype": "bf16"}, 1),
        ({"tp": 2, "cp": 2, "gbs": 4}, 4),
    ],
)
def test_the_sum_of_all_layers(placement: dict[str, Any], values: dict[str, Any], world_size: int) -> None:
    config, at = run(**values), StatePlacement(4, **placement)
    assert state_bytes(config, world_size, 0, at) == one_by_one(config, at, world_size)


def test_without_clipping_two_records_hold_the_gradients() -> None:
    """Not where ZeRO-2 adds up several microbatches in host memory."""
    at, sharded = StatePlacement(4, 4, 4, 4), StatePlacement(4, 4, 4, 4, shards_gradients=True)
    layer = rank_units(run(), 1, 0).layer.size
    saved = [state_bytes(run(clip_grad=clip), 1, 0, at).host for clip in (1.0, 0.0)]
    assert saved[0] - saved[1] == 2 * 4 * layer
    many = [state_bytes(run(clip_grad=clip, gbs=8), 2, 0, sharded).host for clip in (1.0, 0.0)]
    assert many[0] == many[1]


def test_checkpoints_and_estimates_follow_the_moments() -> None:
    """12 bytes a parameter in a checkpoint, and of the optimizer on a GPU; 2 less for each moment in bf16."""
    asked = {"model": "llama-3.1-8b", "tp": "8", "seq_len": "8192"}
    for dtypes, each in (({}, 12), ({"exp_avg_sq_dtype": "bf16"}, 10), (NARROW, 8)):
        config = run(**dtypes)
        assert checkpoint_bytes(config, 8) == each * count_parameters(config)
        optimizer = answer(read_case({**asked, **dtypes}, "a test")).parts["optimizer"]
        assert optimizer == pytest.approx(each * 8.03e9 / 8, rel=1e-3)


@pytest.mark.parametrize("shares", [{}, {"offload_states": "optimizer"}, {"offload_states": "all"}])
@pytest.mark.parametrize("values", [{}, {"params_dtype": "bf16", "pp": 2, "gbs": 4}])
def test_the_estimates_take_them_in(shares: dict[str, Any], values: dict[str, Any]) -> None:
    """To the byte on a CPU, on GPUs but for padding."""
    config = run(**values, **shares)
    for stage in range(config.parallel.pp):
        found, memory = state_bytes(config, 4, stage), program_memory(replace_alpha(config), 4, stage)
        assert memory.states.device == found.device and memory.states.host == found.host
        assert sum(memory.components.values()) == memory.total
        on_gpu = config.override({"device": "cuda"})
        rank = rank_memory(on_gpu, shape_of(config.model, "", 256), 4, stage)
        assert rank.states == pytest.approx(state_bytes(on_gpu, 4, stage).device, rel=0.02)
        assert rank.host == pytest.approx(state_bytes(on_gpu, 4, stage).host, rel=0.02)
    hosts = [state_bytes(config, 4, stage).host for stage in range(config.parallel.pp)]
    assert node_host_bytes(config, 4, 4, None) == sum(hosts) * 4 // len(hosts)


def replace_alpha(config: RunConfig) -> RunConfig:
    return replace(config, memory=replace(config.memory, offload_alpha="off"))


def test_places_of_buckets_follow_the_layers_of_each_chunk() -> None:
    config = run(pp=2, vpp=2, gbs=8, offload_states="all", optimizer_offload_fraction=0.5)
    course, placement = Program(replace_alpha(config), 4).ranks(0)[0].course, placement_of(config, 4)
    assert placement.layers == 2 and placement.optimizer == 1
    on_host = {owner for owner in range(course.num_modules) if course.places(owner).optimizer_on_host}
    assert len(on_host) == 1 and on_host <= {1, 4}  # one layer between the ends of each chunk


def test_a_cap_on_the_device_is_refused_with_the_bytes_and_what_fits_is_named() -> None:
    config = replace_alpha(run(hidden_size=512, num_layers=8, seq_length=64, params_dtype="bf16"))
    resident = program_memory(config, 1, 0).total
    streamed = program_memory(config.override({"offload_states": "all"}), 1, 0).total
    assert streamed < resident / 3
    cap = streamed / GIB * 1.001
    with pytest.raises(ResourceError) as refused:
        admit(config.override({"device_memory_gib": cap}), 1, Room(64 * GIB, 64 * GIB), 1e12)
    assert f"({resident} bytes) of its device, {int(cap * GIB)} bytes are allowed" in str(refused.value)
    assert "use --offload-states auto" in str(refused.value)
    admit(config.override({"device_memory_gib": cap, "offload_states": "all"}), 1, Room(64 * GIB, 64 * GIB), 1e12)
    with pytest.raises(ResourceError) as refused:
        admit(config.override({"device_memory_gib": cap / 2}), 1, Room(64 * GIB, 64 * GIB), 1e12)
    assert "--offload-states auto" not in str(refused.value)


def test_the_arena_of_a_node_is_checked() -> None:
    config = run(offload_states="all")
    needed = node_host_bytes(config, 8, 8, None)
    admit(config, 8, Room(64 * GIB, 64 * GIB, 8, host_bytes=needed, host_ranks=8), 1e12)
    with pytest.raises(
        ResourceError, match=r"--offload-states all takes .* of 8 ranks.*raise --offload-host-memory-gib"
    ):
        admit(config, 8, Room(64 * GIB, 64 * GIB, 8, host_bytes=needed - 1, host_ranks=8), 1e12)


def test_a_gpu_run_is_told_to_offload_where_that_fits() -> None:
    config = RunConfig(model=preset("llama-3.1-8b")).override({"device": "cuda", "seq_length": 4096})
    with pytest.raises(ResourceError, match="use --offload-states auto"):
        admit(config, 1, Room(40 * GIB, 40 * GIB, host_bytes=512 * GIB), 312e12)
    with pytest.raises(ResourceError) as refused:
        admit(config, 1, Room(40 * GIB, 40 * GIB, host_bytes=64 * GIB), 312e12)
    assert "--offload-states" not in str(refused.value)
