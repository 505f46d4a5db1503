"""Sliding windows: blocks that hold each score of the window once, and kernels on them against a mask."""

import random

import pytest
import torch
from attention_reference import assert_accurate, make_inputs
from test_attention_core import VarlenByLoop, run
from torch import Tensor

from memo.attention.backends import CpuFlash
from memo.attention.blocks import Chunk, Documents, attention_blocks, cut_within, strips
from memo.spec.window import attended_pairs, ring_steps


def zigzag(tokens: int, ranks: int, rank: int) -> tuple[Chunk, Chunk]:
    length = tokens // (2 * ranks)
    return Chunk(rank * length, length, 0), Chunk((2 * ranks - 1 - rank) * length, length, length)


def mask(queries: Tensor, keys: Tensor, row: tuple[int, ...], window: int) -> Tensor:
    """Which positions attend to which, written down from the meaning of a window and of documents."""
    bounds = torch.tensor(row)
    back = queries[:, None] - keys[None]
    same = torch.bucketize(queries, bounds, right=True)[:, None] == torch.bucketize(keys, bounds, right=True)[None]
    return (back >= 0) & (back < window) & same


def test_a_ring_has_the_steps_in_which_some_rank_has_scores() -> None:
    draw = random.Random(0)
    for _ in range(200):
        ranks, chunk = draw.randint(2, 9), draw.randint(1, 12)
        tokens = 2 * ranks * chunk
        window = draw.randint(1, tokens)
        held = [zigzag(tokens, ranks, rank) for rank in range(ranks)]
        meeting = {
            step
            for step in range(ranks)
            for rank in range(ranks)
            if attention_blocks(held[rank], held[(rank - step) % ranks], None, window).blocks
        }
        assert set(ring_steps(tokens, ranks, window)) == meeting | {1, ranks - 1}, (tokens, ranks, window)
    assert ring_steps(1 << 20, 16, 4096) == (0, 1, 15) and ring_steps(1 << 20, 4, None) == (0, 1, 2, 3)


def positions(chunks: tuple[Chunk, ...]) -> Tensor:
    return torch.cat([torch.arange(chunk.start, chunk.stop) for chunk in chunks])


@pytest.mark.parametrize("seed", range(200))
def test_blocks_have_each_score_of_the_window_once(seed: int) -> None:
    draw = random.Random(seed)
    ranks = draw.choice([1, 1, 2, 3, 4])
    tokens = 2 * ranks * draw.randint(1, 12)
    window = draw.randint(1, tokens + 2)
    cuts = sorted(draw.sample(range(1, tokens), min(tokens - 1, draw.choice([0, 0, 1, 3]))))
    row = (0, *cuts, tokens)
    q_chunks = zigzag(tokens, ranks, draw.randrange(ranks))
    k_chunks = draw.choice([zigzag(tokens, ranks, draw.randrange(ranks)), (Chunk(0, tokens, 0),)])
    scores = attention_blocks(q_chunks, k_chunks, (row,), window)
    if draw.random() < 0.5:
        scores = cut_within(scores, draw.randint(1, 6))
    reach = draw.randint(1, tokens)
    groups = list(strips(scores, reach))
    assert [block for group in groups for block in group] == list(scores.blocks)
    assert all(len(group) == 1 or group[-1].q_stop - group[0].q_start <= reach for group in groups)
    expected = mask(positions(q_chunks), positions(k_chunks), row, window)
    found = torch.zeros(expected.shape, dtype=torch.int64)
    for block in scores.blocks:
        part = torch.ones(block.q_stop - block.q_start, block.k_stop - block.k_start, dtype=torch.int64)
        part = part.tril() if block.causal else part
        part = part.flip(0, 1) if block.flipped else part
        found[block.q_start : block.q_stop, block.k_start : block.k_stop] += part
    assert torch.equal(found, expected.long())
    if not cuts and q_chunks == k_chunks and ranks == 1:
        assert attended_pairs(tokens, window) == expected.sum()


@pytest.mark.parametrize("backend", [CpuFlash(), VarlenByLoop()], ids=["cpu", "varlen"])
@pytest.mark.parametrize("window", [2, 5, 8, 16, 47])
@pytest.mark.parametrize("documents", [None, ((0, 20, 48), (0, 20, 48)), ((0, 48), (0, 3, 7, 30, 48))], ids=str)
def test_kernels_on_strips_equal_a_mask(
    window: int, documents: Documents | None, backend: CpuFlash | VarlenByLoop
) -> None:
    whole = (Chunk(0, 48, 0),)
    scores = attention_blocks(whole, whole, documents, window)
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        inputs = make_inputs(48, 2, (4, 2), 16, dtype)
        found, _ = run(backend, inputs, scores, 0.25)
        assert_accurate(found, inputs, documents, 0.25, window)


def test_strips_alike_are_one_call() -> None:
    """A million tokens in windows of 128: 32 calls, where 16,383 blocks are."""
    whole = (Chunk(0, 1 << 20, 0),)
    scores = attention_blocks(whole, whole, None, 128)
    assert len(scores.blocks) == 2 * (1 << 20) // 128 - 1
    assert len(list(strips(scores, 1 << 20))) == 32
    assert len(list(strips(scores, 1 << 15))) == 64  # rows so far apart that a kernel reaches no more tokens
