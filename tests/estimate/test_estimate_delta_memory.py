"""Memory of a group of tokens of a gated delta net in torch's operations, counted on the CPU."""

import pytest
import torch
from memory_peaks import counted
from ranks import run_ranks

from memo.attention.delta_rule import DeltaNet, Gradients, Place, backward, forward
from memo.spec.delta import carry_size, group_elements

TOKENS = 1024


def peaks(heads: int, key_heads: int, dim: int, dtype: torch.dtype) -> list[int]:
    """Bytes at the peak of a forward and of a backward, beside their arguments."""
    counter, channels = counted(), (heads + 2 * key_heads) * dim
    shapes = ((channels, 4), (heads,), (heads,), (TOKENS, 1, channels + 2 * heads), (TOKENS, 1, heads * dim))
    *parameters, mixed, out = (torch.zeros(shape, dtype=dtype) for shape in shapes)
    net, place = DeltaNet(*parameters, dim), Place(None, 0)
    carry = net.empty_carry(mixed)
    found = Gradients(torch.zeros_like(mixed), *(torch.zeros_like(x, dtype=torch.float32) for x in (carry, *net[:3])))
    counter.take_peak_bytes()
    before = counter.live_bytes
    forward(net, mixed, carry, place, out, torch.empty_like(carry))
    of_forward = counter.take_peak_bytes() - before
    backward(net, out, mixed, carry, place, found)
    return [of_forward, counter.take_peak_bytes() - before]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("heads", "key_heads", "dim"), [(8, 8, 64), (8, 4, 128), (8, 2, 128)])
def test_the_account_of_a_group(heads: int, key_heads: int, dim: int, dtype: torch.dtype) -> None:
    """At most what is foreseen, and at least 0.95 of it."""
    (measured,) = run_ranks(1, peaks, heads, key_heads, dim, dtype)
    for is_backward, peak in zip((False, True), measured, strict=True):
        elements = group_elements(dim, dim + 2 * dim * key_heads / heads, is_backward, dtype == torch.bfloat16)
        foreseen = 4 * TOKENS * heads * elements + (2 + is_backward) * 4 * carry_size(heads, key_heads, dim)
        assert 0.95 * foreseen <= peak <= foreseen, (is_backward, peak / foreseen)
