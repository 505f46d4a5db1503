"""Attention kernels on a GPU: as accurate as torch's own in bf16, with saved output and log-sum-exp."""

import pytest
import torch
from attention_reference import assert_accurate, make_inputs, random_documents

from memo.attention.select import CUDA_BACKENDS, is_installed, select_backend
from memo.parallel.context import ContextAttention

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

SEQ_LENGTH, HEAD_DIM = 512, 64


@pytest.mark.parametrize("heads", [(4, 4), (4, 2)], ids=["mha", "gqa"])
@pytest.mark.parametrize("packed", [False, True], ids=["whole", "packed"])
@pytest.mark.parametrize("name", CUDA_BACKENDS)
def test_kernel_equals_dense_attention(name: str, packed: bool, heads: tuple[int, int]) -> None:
    if not is_installed(name):
        pytest.skip(f"the package of {name} is not installed")
    inputs = make_inputs(SEQ_LENGTH, 2, heads, HEAD_DIM, torch.bfloat16)
    documents = random_documents(SEQ_LENGTH, 2, seed=1) if packed else None
    scale = HEAD_DIM**-0.5
    attention = ContextAttention(select_backend(name, "cuda"), SEQ_LENGTH, "p2p", None, None, scale)
    q, k, v, grad_out = (t.cuda() for t in inputs)
    out, lse = attention.forward(q, k, v, documents)
    grads = attention.backward(grad_out, q, k, v, out, lse, documents)
    assert_accurate([t.cpu() for t in (out, *grads)], inputs, documents, scale)
    place = torch.full((*q.shape[:2], 2 * q.shape[2] * HEAD_DIM), torch.nan, dtype=q.dtype, device="cuda")
    place = place[..., : q.shape[2] * HEAD_DIM].unflatten(-1, (-1, HEAD_DIM))
    placed, placed_lse = attention.forward(q, k, v, documents, place)
    assert placed.data_ptr() == place.data_ptr()
    assert torch.equal(place, out) and torch.equal(placed_lse, lse)
