"""What matrix products take beside their results: measured, whatever the CPU and whoever else profiles."""

import pytest
import torch
from torch import Tensor

from memo.estimate.program.products import LinearProducts, Product
from memo.profiler import product_scratch
from memo.profiler.product_scratch import scratch_on_this_cpu

PRODUCTS = [
    LinearProducts(16, 24, bias=True).forward(40),
    LinearProducts(16, 24).forward(40),
    LinearProducts(16, 24).input_gradient(40),
    LinearProducts(16, 24).weight_gradient(40),
]


def test_the_products_of_a_linear_layer_have_its_shapes() -> None:
    """Forward [40, 24], gradient of the input [40, 16], of the weight [24, 16]."""
    for product, shape in zip(PRODUCTS, [(40, 24), (40, 24), (40, 16), (24, 16)], strict=True):
        assert (product.rows, product.columns) == shape
        assert product_scratch._prepared(product, torch.bfloat16)().shape == shape


def test_scratch_is_the_most_that_lives_beside_the_result(monkeypatch: pytest.MonkeyPatch) -> None:
    def stand_in(product: Product, dtype: torch.dtype) -> object:
        def multiply() -> Tensor:
            result = torch.empty(product.rows, product.columns, dtype=dtype)
            first = torch.empty(1000, dtype=torch.uint8)
            del first
            second, third = torch.empty(700, dtype=torch.uint8), torch.empty(500, dtype=torch.uint8)
            del second, third
            return result

        return multiply

    monkeypatch.setattr(product_scratch, "_prepared", stand_in)
    assert product_scratch._run(PRODUCTS[0], torch.bfloat16, torch.get_num_threads()) == 1200


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_profiler_of_the_user_changes_nothing_and_goes_on(dtype: torch.dtype) -> None:
    plain = [product_scratch._run(product, dtype, torch.get_num_threads()) for product in PRODUCTS]
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        assert [scratch_on_this_cpu(dtype)(product) for product in PRODUCTS] == plain
        torch.ones(3).exp_()
    assert "aten::exp_" in [event.name for event in profiler.events()]


def test_what_memory_does_not_suffice_for_is_not_counted() -> None:
    """The run itself says that it is out of memory, and where."""
    side = 1 << 24  # a weight of 2^50 bytes
    assert scratch_on_this_cpu(torch.float32)(LinearProducts(side, side).forward(8)) == 0
