"""Sizes beyond 32 bits on a GPU: byte counts of copies, and element counts of the loss.

An emulated GPU's memory is the host's, of which a test must not take tens of GiB: there both run at a 128th of the
size. That they pass says that the tests themselves are right, not that a GPU's kernels count beyond 32 bits.
"""

import pytest
import torch

from memo.emulated_gpu.launch import is_emulated
from memo.executor.cuda_streams import CudaStreams
from memo.executor.host_pool import HostPool
from memo.executor.streams import Stream
from memo.parallel.loss import LossSettings, linear_cross_entropy, token_losses
from memo.units import GIB

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

SMALLER = 128 if is_emulated() else 1
BEYOND_32_BITS = 2**32 // SMALLER
BEYOND_31_BITS = 2**31 // SMALLER


def need(num_bytes: int) -> torch.device:
    if torch.cuda.mem_get_info()[0] < num_bytes:
        pytest.skip(f"needs {num_bytes / GIB:.0f} GiB of free device memory")
    return torch.device("cuda", torch.cuda.current_device())


def test_a_record_of_more_than_4_gib_goes_and_comes() -> None:
    num_bytes = BEYOND_32_BITS + 512
    device = need(3 * num_bytes)
    pool, backend = HostPool(1, num_bytes, device), CudaStreams(device)
    slot = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    marks = torch.tensor(
        [0, BEYOND_31_BITS - 1, BEYOND_31_BITS, BEYOND_32_BITS - 1, BEYOND_32_BITS, num_bytes - 1], device=device
    )
    slot[marks] = torch.arange(1, 7, dtype=torch.uint8, device=device)
    back = torch.full_like(slot, 255)
    backend.wait(Stream.OFFLOAD, backend.record(Stream.COMPUTE))
    backend.copy(Stream.OFFLOAD, pool.record(0), slot, "record", "slot")
    backend.wait(Stream.PREFETCH, backend.record(Stream.OFFLOAD))
    backend.copy(Stream.PREFETCH, back, pool.record(0), "back", "record")
    backend.wait(Stream.COMPUTE, backend.record(Stream.PREFETCH))
    backend.synchronize()
    assert torch.equal(back, slot)
    assert back[marks].tolist() == [1, 2, 3, 4, 5, 6]


def test_loss_of_hidden_states_with_more_than_2_31_elements() -> None:
    """The last chunk, behind element 2^31, has the losses and the gradients that it has alone, to the last bit: both
    are the same products of the same chunk."""
    width, vocabulary, chunk = 4096, 64, 1024
    tokens = BEYOND_31_BITS // width + chunk
    device = need(6 * tokens * width * 2)
    generator = torch.Generator(device).manual_seed(0)
    hidden = torch.zeros(tokens, 1, width, dtype=torch.bfloat16, device=device)
    hidden[-chunk:] = torch.randn(chunk, 1, width, generator=generator, device=device)
    hidden.requires_grad_()
    weight = torch.randn(vocabulary, width, generator=generator, device=device).bfloat16()
    labels = torch.randint(0, vocabulary, (tokens, 1), generator=generator, device=device)
    assert hidden.numel() > BEYOND_31_BITS

    def run(x: torch.Tensor, of: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        sizes = {"vocab_size": vocabulary, "chunk_size": chunk}
        settings = LossSettings(torch.nn.Identity(), group=None, **sizes)
        losses = token_losses(x, weight, of, settings)
        loss = linear_cross_entropy(x, weight, of, settings, torch.ones(of.shape, dtype=torch.float64, device=device))
        return losses[-chunk:], torch.autograd.grad(loss, x)[0][-chunk:]

    alone = hidden.detach()[-chunk:].clone().requires_grad_()
    losses, grad = run(hidden, labels)
    expected, expected_grad = run(alone, labels[-chunk:])
    assert expected.abs().max() > 0 and expected_grad.abs().max() > 0
    assert torch.equal(losses, expected)
    assert torch.equal(grad, expected_grad)
