"""What the solver counts is what the executor will take: its bytes against the layout of slots with its alignment."""

import random

import pytest

from memo.config import preset
from memo.config.memory import OffloadPolicy
from memo.planner.problem import Link, SwapProblem
from memo.planner.swap_problem import fixed_buffer_bytes, swap_groups
from memo.spec.skeleton import SlotDims, layer_bytes, skeletal_tensors
from memo.spec.slots import SLOT_ALIGNMENT_BYTES, plan_slot

TILES = 8
LINK = Link(1e9, 1e9)


@pytest.mark.parametrize("policy", ["auto", "paper"])
@pytest.mark.parametrize("num_slots", [1, 2])
@pytest.mark.parametrize(("name", "tp"), [("gpt-tiny", 1), ("gpt-7b", 8), ("llama-3.1-8b", 2), ("qwen3-tiny", 2)])
def test_bytes_are_those_of_the_slots(name: str, tp: int, num_slots: int, policy: OffloadPolicy) -> None:
    model, tokens, rng = preset(name), 2048, random.Random(0)
    dims = SlotDims(tokens, batch=1, tp=tp, tiles=TILES, dtype="bf16")
    sizes = layer_bytes(model, dims, policy)
    problem = SwapProblem(
        policy=policy,
        tiles=TILES,
        always=sizes.always,
        groups=swap_groups(sizes, num_slots, {"qkv": 0.1, "fc1": 0.2}),
        never=sizes.never,
        forward_s=1.0,
        backward_s=1.0,
        offload=LINK,
        prefetch=LINK,
        num_passes=4,
        num_moves=2,
        num_records=2,
        host_bytes=0,
        device_bytes=0,
        fixed_buffer_bytes=fixed_buffer_bytes(sizes, num_slots),
    )
    assert {group.name: group.recompute_s for group in problem.groups} == {
        **dict.fromkeys(sizes.groups, 0.0),
        "qkv": 0.1,
        "fc1": 0.2,
    }
    padding_bytes = SLOT_ALIGNMENT_BYTES * len(skeletal_tensors(model))
    for tiles in [problem.uniform(0), problem.uniform(TILES)] + [
        {group: rng.randint(0, TILES) for group in sizes.groups} for _ in range(20)
    ]:
        layout = plan_slot(skeletal_tensors(model), dims, tiles)
        device_bytes = num_slots * layout.slot_bytes + layout.workspace_bytes
        assert 0 <= device_bytes - problem.buffer_bytes(tiles) <= num_slots * padding_bytes
        assert 0 <= layout.moved_bytes - problem.moved_bytes(tiles) <= padding_bytes


def test_tokens_of_several_sequences_count_like_more_tokens() -> None:
    model = preset("gpt-tiny")
    dims = SlotDims(512, batch=3, tp=1, tiles=TILES, dtype="fp32")
    sizes = layer_bytes(model, dims, "auto")
    layout = plan_slot(skeletal_tensors(model), dims, dict.fromkeys(sizes.groups, TILES))
    assert layout.moved_bytes == sum(sizes.always.values()) + sum(sizes.groups.values())
