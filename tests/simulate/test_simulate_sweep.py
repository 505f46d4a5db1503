"""The cost of attention in a sweep: its calls and sums are those that the blocks of the executor make."""

import math
from dataclasses import replace
from math import inf

import pytest
import torch
from torch import Tensor

from memo.attention.backends import CpuFlash, Saved
from memo.attention.blocks import cut_keys
from memo.config import RunConfig, preset
from memo.estimate.hardware_files import HARDWARE
from memo.parallel.context import ContextAttention
from memo.parallel.context_sweep import backward_rows, forward_rows, rows_scores
from memo.simulate.kernels import Kernels
from memo.simulate.layer import swapped_layer
from memo.simulate.predict import predict_step
from memo.simulate.sweep import SUM_PASSES, SweptAttention
from memo.spec.sweep import BACKWARD_KEYS_PER_QUERY

MACHINE = HARDWARE["h100-80"]
BYTES = Kernels(
    replace(MACHINE, memory_gb_per_s=1e-9, efficiency=replace(MACHINE.efficiency, memory=1.0, kernel_s=0.0)), "bf16"
)
"""A machine that moves a byte a second, and launches for nothing."""
CALLS = Kernels(replace(MACHINE, memory_gb_per_s=inf, efficiency=replace(MACHINE.efficiency, kernel_s=1.0)), "bf16")
"""A machine whose kernels take a second each, whatever they move."""

TILES, TOKENS, HEADS, GROUPS, SIZE = 24, 8, 4, 2, 16
"""TOKENS of a tile."""


class Counting(CpuFlash):
    """Counts its calls, the elements of the outputs that are merged, and of the gradients of keys and values."""

    def __init__(self) -> None:
        self.calls = self.merged = self.gradients = 0

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float, out: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        self.calls += 1
        return super().forward(q, k, v, causal, scale, out)

    def backward(self, grad_out: Tensor, saved: Saved, causal: bool, scale: float) -> tuple[Tensor, Tensor, Tensor]:
        dq, dk, dv = super().backward(grad_out, saved, causal, scale)
        self.calls += 1
        self.gradients += dk.numel() + dv.numel()
        return dq, dk, dv

    def merge_(self, total_out: Tensor, total_lse: Tensor, out: Tensor, lse: Tensor) -> None:  # type: ignore[override]
        self.merged += out.numel()
        super().merge_(total_out, total_lse, out, lse)


def sweep(attention: ContextAttention, forward: bool) -> None:
    """A layer's forward, or backward, over all tiles."""
    both = torch.randn(TILES * TOKENS, 1, 2 * GROUPS, SIZE)
    sums, q = torch.zeros_like(both), torch.randn(TOKENS, 1, HEADS, SIZE)
    keys = torch.randn(2, TOKENS, 1, GROUPS, SIZE)
    for tile in range(TILES):
        before = both[: (tile + 1) * TOKENS]
        if forward:
            forward_rows(attention, (q, keys[0], keys[1]), None, before, None, torch.empty_like(q))
        else:
            saved = Saved(q, *before.chunk(2, dim=2), q, torch.randn(1, HEADS, TOKENS))
            backward_rows(attention, q, saved, sums[: len(before)], None)


@pytest.mark.parametrize("forward", [True, False])
def test_calls_and_sums_are_those_that_a_sweep_makes(forward: bool) -> None:
    backend = Counting()
    sweep(ContextAttention(backend, TILES * TOKENS, "p2p", None, None, 1.0), forward)
    q, kv = TILES * TOKENS * HEADS * SIZE, TILES * TOKENS * 2 * GROUPS * SIZE
    counted, swept = SweptAttention(CALLS, TILES, q, kv), SweptAttention(BYTES, TILES, q, kv)
    attention = counted.forward if forward else counted.backward
    assert backend.calls - 1 == attention.attention
    if forward:
        # Sums are zeroed and read, the output is written, and keys and values are copied.
        rest = backend.merged // 2 * (4 + 4 + 2) + kv * (2 + 2)
        assert swept.forward.elementwise == pytest.approx(SUM_PASSES * 4 * backend.merged + rest)
    else:
        added = backend.gradients + backend.calls * q // TILES
        assert swept.backward.elementwise == pytest.approx(SUM_PASSES * 4 * added + (q + kv) * (4 + 4 + 2))


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_calls_of_millions_of_tiles_are_summed_at_once(ranks: int) -> None:
    """As a sum over tiles, of which a sequence of terabytes has too many to count."""
    for tiles in (1, 2, 7, 8, 9, 64):
        calls = sum(math.ceil(before * ranks / BACKWARD_KEYS_PER_QUERY) for before in range(tiles))
        calls += tiles if ranks == 1 else 0
        counted = SweptAttention(CALLS, tiles, 1.0, 1.0, gathered_from=ranks)
        assert counted.backward.attention == calls - 1
    assert SweptAttention(CALLS, 10**12, 1.0, 1.0).backward.attention > 6e22


@pytest.mark.parametrize("cp", [2, 4])
def test_ranks_that_gather_keys_have_as_many_rectangles_before_a_tile(cp: int) -> None:
    attention = ContextAttention(CpuFlash(), 2 * cp * TOKENS * TILES, "all_gather", None, None, 1.0)
    attention.ring_size, attention.ring_rank = cp, 1
    q, per_tile = torch.empty(2 * TOKENS, 1, HEADS, SIZE), 2 * cp * TOKENS
    blocks = [
        block
        for tile in range(TILES)
        for block in cut_keys(
            rows_scores(attention, q, torch.empty((tile + 1) * per_tile, 1, GROUPS, SIZE), None),
            BACKWARD_KEYS_PER_QUERY * len(q),
        ).blocks
        if block.k_stop <= tile * per_tile
    ]
    elements = TILES * len(q) * HEADS * SIZE
    counted = SweptAttention(CALLS, TILES, elements, 1.0, gathered_from=cp)
    assert counted.backward.attention == len(blocks) - 1
    width = 2 * GROUPS * SIZE
    met = sum(block.k_stop - block.k_start for block in blocks) * width
    swept = SweptAttention(BYTES, TILES, elements, TILES * per_tile * width, gathered_from=cp)
    added = met + len(blocks) * len(q) * HEADS * SIZE
    assert swept.backward.elementwise == pytest.approx(SUM_PASSES * 4 * added)


def config(**values: object) -> RunConfig:
    base = {
        "seq_length": 1 << 18,
        "offload_alpha": 1.0,
        "device": "cuda",
        "offload_granularity": "tile",
        "offload_slot_tiles": 1,
    }
    return RunConfig(model=preset("llama-3.1-8b")).override({**base, **values})


@pytest.mark.parametrize(
    "layout", [{"tp": 8}, {"cp": 8, "cp_comm_type": "all_gather"}, {"cp": 8, "cp_comm_type": "a2a"}]
)
def test_smaller_tiles_cost_more_and_whole_layers_least(layout: dict[str, object]) -> None:
    kernels = Kernels(MACHINE, "bf16")
    costs = [swapped_layer(config(**layout, offload_tiles=tiles), kernels) for tiles in (8, 16, 64)]
    whole = swapped_layer(config(**layout, offload_granularity="layer"), kernels)
    times = [(cost.forward + cost.backward).total_s for cost in (whole, *costs)]
    assert times == sorted(times)
    assert times[1] < 1.03 * times[0]


@pytest.mark.parametrize(
    ("model", "gpus", "machine"),
    [("llama-3.1-8b", 8, "h100-80"), ("gpt-7b", 8, "a800-80"), ("llama-3.1-8b", 1, "h100-80")],
)
@pytest.mark.parametrize("seq_length", [1 << 18, 1 << 19, 1 << 20])
def test_a_sweep_costs_at_most_two_percent_from_256k_tokens_on(
    model: str, gpus: int, machine: str, seq_length: int
) -> None:
    """In the tiles of a run that names none."""
    swept = config(seq_length=seq_length, tp=gpus)
    swept = replace(swept, model=preset(model))
    whole = swept.override({"offload_granularity": "layer"})
    swept_s, whole_s = (predict_step(run, gpus, HARDWARE[machine]).step_time_s for run in (swept, whole))
    assert whole_s < swept_s < 1.02 * whole_s


def test_attention_that_is_recomputed_is_merged_again() -> None:
    layers = preset("llama-3.1-8b").num_layers
    kernels = Kernels(MACHINE, "bf16")
    few, many = (swapped_layer(config(offload_tiles=n, recompute_attention_layers=layers), kernels) for n in (8, 64))
    assert many.attention_again.elementwise > few.attention_again.elementwise
