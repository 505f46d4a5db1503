"""What moves under alpha auto, and its memory when groups differ."""

from dataclasses import replace

import pytest
from capacity import gpu_bytes_for

from memo.config import RunConfig, preset
from memo.estimate.accounts import Account
from memo.estimate.hardware_files import HARDWARE
from memo.estimate.node_memory import node_host_bytes
from memo.estimate.verdict import Capacity, room_for_unseen
from memo.planner.problem import Limit
from memo.search.swap_choice import choose_swap
from memo.spec.shapes import shape_of
from memo.units import GIB

MACHINE = HARDWARE["a800-80"]


def run(**values: object) -> RunConfig:
    base = {"params_dtype": "bf16", "device": "cuda", "offload_alpha": "auto", "gbs": 16}
    return RunConfig(model=preset("gpt-7b")).override({**base, **values})


@pytest.mark.parametrize(
    ("seq_k", "gpu_gib", "host_gib", "limit"),
    [
        (1024, 64, 8192, Limit.DEVICE),
        (512, 80, 900, Limit.HOST),
        (512, 80, 2048, Limit.EVERYTHING),
        (16, 80, 2048, Limit.OFFLOAD),
    ],
)
def test_each_limit_binds_to_the_last_tile(seq_k: int, gpu_gib: float, host_gib: float, limit: Limit) -> None:
    """All that is planned fits; a tile more of everything breaks the limit that is named."""
    config, capacity = run(seq_length=seq_k << 10, tp=4, cp=2), Capacity(gpu_gib * GIB, host_gib * GIB)
    account = Account("memo", shape_of(config.model, "gpt-7b", seq_k << 10), 8)
    swap = choose_swap(config, account, MACHINE, capacity)
    assert swap.limit == limit and swap.layer_s > 0 and swap.link_s > 0
    more = {name: count + 1 for name, count in swap.tiles.items()}
    host = 0.9 * capacity.host_bytes
    gpu = capacity.sure_gpu_bytes - room_for_unseen(account.unseen(config, account.worst(config, swap.tiles)))
    assert account.worst(config, swap.tiles).total <= gpu
    assert node_host_bytes(config, 8, 8, swap.tiles) <= host
    if limit == Limit.DEVICE:
        assert account.worst(config, more).total > gpu
    elif limit == Limit.HOST:
        assert node_host_bytes(config, 8, 8, more) > host
    elif limit == Limit.EVERYTHING:
        assert set(swap.tiles.values()) == {8}
    else:
        assert 0 < sum(swap.tiles.values()) < 3 * 8


def test_padding_of_slots_counts() -> None:
    """Tensors whose sizes are no multiple of 512 bytes, in memory that grows a few bytes at a time."""
    config = run(seq_length=40, offload_tiles=4)
    config = replace(config, model=replace(preset("gpt2-tiny"), vocab_size=257))
    account = Account("memo", shape_of(config.model, "gpt2-tiny", 40), 1)
    machine = replace(MACHINE, offload_gb_per_s=1e6, prefetch_gb_per_s=1e6)
    least = account.worst(config, {}).total + room_for_unseen(account.unseen(config, account.worst(config, {})))
    seen = set()
    for extra in range(0, 300_000, 1000):
        sure = least + 4096 + extra
        swap = choose_swap(config, account, machine, Capacity(gpu_bytes_for(sure), 1e12))
        assert account.worst(config, swap.tiles).total <= sure
        seen.add(tuple(swap.tiles.values()))
    assert len(seen) > 3


@pytest.mark.parametrize("share", [1.0001, 1.02])
def test_both_ends_of_a_pipeline_must_fit(share: float) -> None:
    config = run(seq_length=1 << 18, pp=4, cp=2)
    config = replace(
        config, model=replace(config.model, untie_embeddings_and_output_weights=True, vocab_size=1_000_000)
    )
    account = Account("memo", shape_of(config.model, "gpt-7b", 1 << 18), 8)
    sure = share * account.worst(config, {}).total
    swap = choose_swap(config, account, MACHINE, Capacity(gpu_bytes_for(sure), 1e14))
    assert account.worst(config, swap.tiles).total <= sure


def test_what_cannot_fit_names_the_memory() -> None:
    config = run(seq_length=1 << 20, tp=4, cp=2)
    account = Account("memo", shape_of(config.model, "gpt-7b", 1 << 20), 8)
    for capacity, limit in (
        (Capacity(20 * GIB, 2048 * GIB), Limit.DEVICE),
        (Capacity(80 * GIB, 100 * GIB), Limit.HOST),
    ):
        swap = choose_swap(config, account, MACHINE, capacity)
        assert swap.limit == limit and set(swap.tiles.values()) == {0}
