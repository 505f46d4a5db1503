"""Collectives: values, out buffers, and no-ops on a single rank; rings of attention show point-to-point messages."""

import warnings

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks

from memo.parallel.collectives import (
    all_gather,
    all_gather_async,
    all_reduce,
    all_to_all,
    group_rank,
    group_size,
    reduce_scatter,
    reduce_scatter_async,
)


def check_values(dtype: torch.dtype) -> None:
    warnings.simplefilter("error")  # such as of calls that torch will no longer have
    group, rank, size = dist.group.WORLD, dist.get_rank(), dist.get_world_size()
    assert group is not None and (group_size(group), group_rank(group)) == (size, rank)
    x = torch.arange(6, dtype=dtype).view(2, 3) + 10 * rank
    gathered = torch.cat([torch.arange(6, dtype=dtype).view(2, 3) + 10 * r for r in range(size)])
    assert torch.equal(all_gather(x, group), gathered)
    assert torch.equal(all_gather(x.t().contiguous().t(), group), gathered)  # strided input
    out = torch.empty_like(gathered)
    assert all_gather(x, group, out) is out and torch.equal(out, gathered)

    blocks = torch.arange(2 * size, dtype=dtype).view(2 * size, 1) + rank
    mine = size * torch.arange(2 * rank, 2 * rank + 2, dtype=dtype).view(2, 1) + sum(range(size))
    assert torch.equal(reduce_scatter(blocks, group), mine)
    assert torch.equal(reduce_scatter(blocks, group, torch.empty_like(mine)), mine)
    assert torch.equal(blocks, torch.arange(2 * size, dtype=dtype).view(2 * size, 1) + rank)  # untouched

    sent = torch.arange(size, dtype=dtype) + 100 * rank
    assert torch.equal(all_to_all(sent, group), 100 * torch.arange(size, dtype=dtype) + rank)

    y = torch.tensor([float(rank)], dtype=dtype)
    assert all_reduce(y, group) is y and y.item() == sum(range(size))
    assert all_reduce(torch.tensor([float(rank)], dtype=dtype), group, "max").item() == size - 1
    assert all_reduce(torch.tensor([float(rank)], dtype=dtype), group, "min").item() == 0


def check_async_and_errors() -> None:
    group, rank, size = dist.group.WORLD, dist.get_rank(), dist.get_world_size()
    gathered, work = all_gather_async(torch.full((2,), rank), group)
    assert work is not None
    work.wait()
    assert gathered.tolist() == [r for r in range(size) for _ in range(2)]
    mine, work = reduce_scatter_async(torch.arange(size), group)
    assert work is not None
    work.wait()
    assert mine.tolist() == [size * rank]
    for collective in (reduce_scatter, all_to_all):
        with pytest.raises(ValueError, match=f"dim 0 .* is {size + 1}, the group has {size} ranks"):
            collective(torch.zeros(size + 1), group)
    with pytest.raises(ValueError, match="'mean'; known are sum, max, min"):
        all_reduce(torch.zeros(1), group, "mean")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_values(dtype: torch.dtype) -> None:
    run_ranks(3, check_values, dtype)


def test_async_variants_and_errors() -> None:
    run_ranks(2, check_async_and_errors)


def test_single_rank_returns_the_input() -> None:
    x = torch.arange(4)
    for collective in (all_gather, reduce_scatter, all_to_all, all_reduce):
        assert collective(x, None) is x
    for start in (all_gather_async, reduce_scatter_async):
        assert start(x, None) == (x, None)
    out = torch.empty_like(x)
    assert all_gather(x, None, out) is out and torch.equal(out, x)
    assert (group_size(None), group_rank(None)) == (1, 0)
