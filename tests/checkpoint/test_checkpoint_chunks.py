"""Flat ranges as rectangles, against brute force; fused parameters cut into their global tensors."""

import math
import random

import pytest
import torch

from memo.checkpoint.chunks import global_chunks, rectangles
from memo.parallel.shards import Piece, Shard
from memo.spec.buckets import ParameterRange, Segment


@pytest.mark.parametrize("seed", range(60))
def test_rectangles_cover_the_range_exactly_in_flat_order(seed: int) -> None:
    rng = random.Random(seed)
    shape = tuple(rng.randint(1, 7) for _ in range(rng.randint(1, 4)))
    numel = math.prod(shape)
    flat = torch.arange(numel).view(shape)
    for _ in range(30):
        start, stop = sorted((rng.randint(0, numel), rng.randint(0, numel)))
        found = rectangles(shape, start, stop)
        cut = [flat[tuple(slice(o, o + n) for o, n in zip(*r, strict=True))] for r in found]
        assert [int(x) for part in cut for x in part.reshape(-1)] == list(range(start, stop))
        assert all(part.numel() for part in cut)
        assert len(found) <= 2 * len(shape) - 1


@pytest.mark.parametrize(("start", "stop"), [(0, 24), (0, 12), (3, 24), (5, 6), (2, 17), (7, 7)])
def test_a_fused_parameter_is_cut_into_its_global_tensors(start: int, stop: int) -> None:
    """Rows 0-2 are rows 2-4 of q, rows 3-4 are rows 1-2 of k, row 5 is padding; all of 4 columns."""
    shard = Shard(
        (
            Piece("q", (6, 4), (2, 0), (0, 0), (3, 4)),
            Piece("k", (4, 4), (1, 0), (3, 0), (2, 4)),
        )
    )
    segment = Segment(ParameterRange("qk", (6, 4), 0), start, stop, 0)
    values = torch.arange(float(start), float(stop))
    found = global_chunks(segment, shard, values)
    whole = {"q": torch.full((6, 4), -1.0), "k": torch.full((4, 4), -1.0)}
    for name, tensor in found.items():
        assert tensor.shape == tuple(whole[name].shape)
        for part in tensor.parts:
            view = whole[name][tuple(slice(o, o + n) for o, n in zip(part.offset, part.shape, strict=True))]
            assert (view == -1).all(), "two chunks overlap"
            view.copy_(part.values())
    flat = torch.arange(24.0)
    flat[(flat < start) | (flat >= stop)] = -1
    local = flat.view(6, 4)
    expected = {"q": torch.full((6, 4), -1.0), "k": torch.full((4, 4), -1.0)}
    expected["q"][2:5], expected["k"][1:3] = local[:3], local[3:5]
    assert all(torch.equal(whole[name], expected[name]) for name in whole)
    if start < stop:
        first = next(iter(found.values())).parts[0].values()
        assert first.data_ptr() >= values.data_ptr()  # views: loading fills the shard in place
        assert first.untyped_storage().data_ptr() == values.untyped_storage().data_ptr()
