"""The vocabulary-parallel embedding in chunks of tokens equals torch's: output, weight gradient and padding.

tests/distributed/test_layouts.py has the embedding and the matrices of whole models, sharded and not.
"""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from ranks import run_ranks
from torch import Tensor

from memo.parallel import embedding
from memo.parallel.embedding import VocabParallelEmbedding
from memo.parallel.shards import ShardedParameter, sharded_parameter
from memo.spec.weights import one

S, B, WIDTH = 8, 2, 16
VOCAB = 100  # on the second of two ranks 36 rows, and padding


def on_rank(tokens: Tensor, weight: Tensor, grad_out: Tensor, chunk: int) -> tuple[Tensor, Tensor, bool]:
    """This rank's tokens of the output, its rows of the weight gradient, and whether padding has none."""
    embedding._CHUNK = chunk  # in this process alone
    group, tp, rank = dist.group.WORLD, dist.get_world_size(), dist.get_rank()
    empty = sharded_parameter(one("embedding.weight", VOCAB, WIDTH, "vocabulary"), torch.float64, group, std=0.0)
    (piece,) = empty.shard.pieces
    local = torch.full(empty.shape, 100.0, dtype=torch.float64)  # what padding holds must not be seen
    piece.of_local(local).copy_(piece.of_global(weight))
    module = VocabParallelEmbedding(ShardedParameter(local, empty.shard), group)
    output = module(tokens)
    output.backward(grad_out.chunk(tp)[rank].clone())
    gradient = module.weight.grad
    assert gradient is not None
    rows = piece.of_local(gradient).clone()
    piece.of_local(gradient).zero_()
    return output.detach(), rows, not gradient.any()


@pytest.mark.parametrize("chunk", [1, 12, 8192])  # tokens: a row, an unequal last chunk, all
def test_vocab_parallel_embedding_equals_unsharded(chunk: int) -> None:
    """fp64, 1e-12. Tokens of every slice, some more than once; rows of padding are never read and get no gradient."""
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(VOCAB, WIDTH, generator=generator, dtype=torch.float64).requires_grad_()
    grad_out = torch.randn(S, B, WIDTH, generator=generator, dtype=torch.float64)
    tokens = torch.tensor([0, 1, 63, 64, 65, VOCAB - 1, 63, 64] * B).view(S, B)
    expected = F.embedding(tokens, weight)
    expected.backward(grad_out)
    parts = run_ranks(2, on_rank, tokens, weight.detach(), grad_out, chunk)
    torch.testing.assert_close(torch.cat([out for out, _, _ in parts]), expected.detach(), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(torch.cat([rows for _, rows, _ in parts]), weight.grad, rtol=1e-12, atol=1e-12)
    assert all(padding_is_zero for _, _, padding_is_zero in parts)
