"""Partial gradients of bf16 inputs are summed in fp32 and rounded once, however many blocks and ranks give them.

A stand-in for the kernel gives gradients of 1 for causal squares and of 2^-9 for rectangles: in bf16, whose next number
after 1 is 1 + 2^-7, a sum that begins with 1 would never grow.
"""

import torch
import torch.distributed as dist
from ranks import run_ranks
from torch import Tensor

from memo.attention.backends import CpuFlash, Saved
from memo.attention.blocks import ScoreBlock, Scores
from memo.attention.core import attend_backward
from memo.parallel.context import ContextAttention

SMALL = 2.0**-9
DIM = 8


class Constants(CpuFlash):
    """Gradients that depend on the kind of the block alone."""

    def backward(self, grad_out: Tensor, saved: Saved, causal: bool, scale: float) -> tuple[Tensor, Tensor, Tensor]:
        value = 1.0 if causal else SMALL
        return tuple(torch.full_like(x, value) for x in saved[:3])  # type: ignore[return-value]


def zeros(tokens: int) -> Saved:
    """Inputs and results of attention over `tokens`, [tokens, 1, 1, DIM]: no value of theirs is read."""
    x = torch.zeros(tokens, 1, 1, DIM, dtype=torch.bfloat16)
    return Saved(x, x, x, x, torch.zeros(1, 1, tokens))


def rounded_once(num_small: list[int]) -> Tensor:
    """1 and so many times 2^-9, added exactly, then rounded to bf16; one value a token."""
    return (1 + SMALL * torch.tensor(num_small, dtype=torch.float64)).to(torch.bfloat16)


def test_blocks_of_one_rank_are_summed_in_fp32() -> None:
    """Five tokens, each a causal square of its own, and every other pair of them a rectangle of one score."""
    order = [(i, (i + step) % 5) for step in range(5) for i in range(5)]  # the squares come first
    scores = Scores(tuple(ScoreBlock(None, i, i + 1, j, j + 1, i == j) for i, j in order))
    saved = zeros(5)
    for gradient in attend_backward(Constants(), saved.out, saved, scores, 1.0):
        assert gradient.dtype == torch.bfloat16
        assert gradient[:, 0, 0, 0].tolist() == rounded_once([4] * 5).tolist() == [1 + 2.0**-7] * 5


def sums_over_ranks(comm_type: str) -> tuple[list[float], list[float]]:
    """dq and dk of this rank's two tokens, the first in the lower half of the sequence."""
    attention = ContextAttention(Constants(), 8, comm_type, dist.group.WORLD, None, 1.0)
    saved = zeros(2)
    dq, dk, dv = attention.backward(saved.out, *saved)
    assert dq.dtype == dk.dtype == torch.bfloat16 and torch.equal(dk, dv)
    return dq[:, 0, 0, 0].tolist(), dk[:, 0, 0, 0].tolist()


def test_blocks_of_four_ranks_are_summed_in_fp32_round_the_ring() -> None:
    """A lower key meets one block of each other rank's queries, an upper key one of each earlier rank's.

    For queries it is the other way round.
    """
    for rank, (dq, dk) in enumerate(run_ranks(4, sums_over_ranks, "p2p")):
        assert dq == rounded_once([rank, 3]).tolist()
        assert dk == rounded_once([3, rank]).tolist()


def test_gathered_keys_are_summed_in_fp32_within_a_rank_and_over_ranks() -> None:
    """Rank r holds chunks r and 7 - r, and its queries meet all earlier keys of each chunk in one rectangle.

    Chunks 3 and 4 of rank 3 are neighbours, so that they are one square and one rectangle. Chunk 0, for example, is met
    by the two rectangles of ranks 1 and 2, by the upper one of rank 0, and by the one of rank 3: six.
    """
    num_small = [[6, 0], [5, 1], [4, 2], [3, 3]]
    for (_, dk), expected in zip(run_ranks(4, sums_over_ranks, "all_gather"), num_small, strict=True):
        assert dk == rounded_once(expected).tolist()
