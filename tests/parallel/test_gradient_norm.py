"""The sum of squares behind the gradient norm: its stated bound at 40M elements, in every cut, and what it takes."""

import math

import pytest
import torch
from ranks import run_ranks

from memo.estimate.program.reductions import NORM_CHUNK
from memo_kernels.squared_norm.reference import CHUNK, squared_norm

NUM_ELEMENTS = 40_000_000
BOUND = (CHUNK + NUM_ELEMENTS / CHUNK + 4) * 2.0**-53  # 1.2e-10, as its docstring derives it


@pytest.mark.parametrize("value", [1e-3, 1e-30, 1e30], ids=str)
def test_forty_million_equal_elements(value: float) -> None:
    """Their sum is known: one square, exact in fp64, times their number. fp32 stops growing, or leaves its range."""
    x = torch.full((NUM_ELEMENTS,), value)
    truth = NUM_ELEMENTS * x[0].item() ** 2
    assert squared_norm(x).item() == pytest.approx(truth, rel=BOUND, abs=0)


def test_the_norm_does_not_depend_on_how_weights_are_cut() -> None:
    """As layouts cut them: in one shard, in three, in eight, and in a hundred buckets."""
    x = torch.randn(NUM_ELEMENTS, generator=torch.Generator().manual_seed(5))
    truth = math.fsum(part.double().square().sum().item() for part in x.split(1 << 12))
    for cuts in (1, 3, 8, 100):
        found = sum(squared_norm(part) for part in x.tensor_split(cuts))
        assert float(found) == pytest.approx(truth, rel=2 * BOUND, abs=0)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("size", [0, 1, 20001])
def test_of_any_size_and_dtype(size: int, dtype: torch.dtype) -> None:
    x = torch.randn(size, generator=torch.Generator().manual_seed(6)).to(dtype)
    found = squared_norm(x)
    assert (found.dtype, found.shape) == (torch.float64, ())
    assert found.item() == pytest.approx(math.fsum(v * v for v in x.tolist()), rel=(size + 4) * 2.0**-53, abs=0)


def bytes_taken(size: int) -> int:
    from allocated_bytes import AllocatedBytes

    x = torch.zeros(size)
    counter = AllocatedBytes()
    before = counter.live_bytes
    counter.take_peak_bytes()
    squared_norm(x)
    return counter.take_peak_bytes() - before


@pytest.mark.parametrize("size", [1000, CHUNK, 20 * CHUNK])
def test_it_takes_one_chunk_in_fp64_however_much_there_is(size: int) -> None:
    """Beside the chunk: some scalars for each. The account of a rank on a CPU knows the same chunk."""
    assert NORM_CHUNK == CHUNK
    chunk_bytes = 8 * min(size, CHUNK)
    assert chunk_bytes <= run_ranks(1, bytes_taken, size)[0] <= chunk_bytes + 4096
