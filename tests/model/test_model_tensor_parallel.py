"""Sharded equals unsharded three times: output, weight gradient, input gradient.

Legend: s tokens, b batch, n = s / tp tokens of one rank between matrices.
"""

from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from layouts import assemble
from ranks import run_ranks
from torch import Tensor, nn

from memo.parallel import embedding
from memo.parallel.embedding import VocabParallelEmbedding
from memo.parallel.shards import Shard, ShardedParameter, sharded_parameter
from memo.parallel.tensor import ColumnParallelLinear, RowParallelLinear
from memo.spec.weights import Weight, one

torch.set_num_threads(1)

S, B, IN = 8, 2, 16
OUT_SIZES = {"q": 32, "k": 16, "v": 16}
OUT = sum(OUT_SIZES.values())
VOCAB = 100  # at tp 4, rows 64 + 36, and two ranks with nothing but padding
Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class Part:
    """What one rank saw: its outputs and input gradient, and its pieces of the weight gradients."""

    output: Tensor
    grad_input: Tensor
    grad_weights: Tensors
    grad_replicated: Tensors
    padding_is_zero: bool


def draw(seed: int, shapes: dict[str, tuple[int, ...]]) -> Tensors:
    generator = torch.Generator().manual_seed(seed)
    return {n: torch.randn(s, generator=generator, dtype=torch.float64) for n, s in shapes.items()}


def give_weights(module: nn.Module, weights: Tensors) -> None:
    """Parameters have no memory yet; padding gets a value that must not be seen."""
    for name, parameter in list(module.named_parameters()):
        assert isinstance(parameter, ShardedParameter)
        local = torch.full(parameter.shape, 100.0, dtype=torch.float64)
        for piece in parameter.shard.pieces:
            piece.of_local(local).copy_(piece.of_global(weights[piece.name]))
        setattr(module, name, ShardedParameter(local, parameter.shard))


def scatter_pieces(shard: Shard, local: Tensor, dims: int) -> Tensors:
    """Global tensors with NaN outside this rank's pieces; `dims` leading dims of the pieces are looked at."""
    found: Tensors = {}
    for piece in shard.pieces:
        shape = (*piece.global_shape[:dims], *local.shape[dims:])
        whole = found.setdefault(piece.name, torch.full(shape, float("nan"), dtype=local.dtype))
        to = tuple(slice(o, o + n) for o, n in zip(piece.offset[:dims], piece.shape, strict=False))
        at = tuple(slice(o, o + n) for o, n in zip(piece.local_offset[:dims], piece.shape, strict=False))
        whole[to] = local[at]
    return found


def run_module(module: nn.Module, x: Tensor, grad_out: Tensor) -> Part:
    """Forward and backward on this rank; x is a leaf if it has a gradient."""
    output = module(x)
    output.backward(grad_out)
    pieces: Tensors = {}
    replicated: Tensors = {}
    padding_is_zero = True
    for parameter in module.parameters():
        assert isinstance(parameter, ShardedParameter) and parameter.grad is not None
        shard, grad = parameter.shard, parameter.grad
        if shard.replicated == "tp":
            replicated[shard.pieces[0].name] = grad
            continue
        pieces |= scatter_pieces(shard, grad, grad.ndim)
        rest = grad.clone()
        for piece in shard.pieces:
            piece.of_local(rest).zero_()
        padding_is_zero &= not rest.any()
    grad_input = torch.empty(0) if x.grad is None else x.grad
    return Part(output.detach(), grad_input, pieces, replicated, padding_is_zero)


def own_part(weight: Weight, group: dist.ProcessGroup) -> ShardedParameter:
    return sharded_parameter(weight, torch.float64, group, std=0.0)


def column_on_rank(x: Tensor, weights: Tensors, grad_out: Tensors) -> tuple[Part, Tensors]:
    """Part, and its output as global tensors [out, s, b] by name."""
    group, tp, rank = dist.group.WORLD, dist.get_world_size(), dist.get_rank()
    parts = OUT_SIZES.items()
    rows = Weight("fused.weight", tuple((f"{name}.weight", size) for name, size in parts), IN, "rows")
    bias = Weight("fused.bias", tuple((f"{name}.bias", size) for name, size in parts), None, "rows", "zeros")
    module = ColumnParallelLinear(own_part(rows, group), own_part(bias, group), group)
    give_weights(module, weights)
    local = [grad.chunk(tp, dim=-1)[rank] for grad in grad_out.values()]
    part = run_module(module, x.chunk(tp)[rank].clone().requires_grad_(), torch.cat(local, dim=-1))
    assert isinstance(module.weight, ShardedParameter)
    return part, scatter_pieces(module.weight.shard, part.output.movedim(-1, 0), 1)


def row_on_rank(x: Tensor, weights: Tensors, grad_out: Tensor) -> Part:
    group, tp, rank = dist.group.WORLD, dist.get_world_size(), dist.get_rank()
    columns, bias = one("row.weight", IN, OUT, "columns"), one("row.bias", IN, init="zeros")
    module = RowParallelLinear(own_part(columns, group), own_part(bias, group), group)
    give_weights(module, weights)
    return run_module(module, x.chunk(tp, dim=-1)[rank].clone().requires_grad_(), grad_out.chunk(tp)[rank].clone())


def embedding_on_rank(tokens: Tensor, weights: Tensors, grad_out: Tensor, chunk: int) -> Part:
    embedding._CHUNK = chunk  # in this process alone
    group, tp, rank = dist.group.WORLD, dist.get_world_size(), dist.get_rank()
    module = VocabParallelEmbedding(own_part(one("embedding.weight", VOCAB, IN, "vocabulary"), group), group)
    give_weights(module, weights)
    return run_module(module, tokens, grad_out.chunk(tp)[rank].clone())


def assert_equal(actual: Tensors, expected: Tensors) -> None:
    """fp64, 1e-12."""
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        error = (actual[name] - value).abs().max().item()
        assert error <= 1e-12 * max(1.0, value.abs().max().item()), f"{name}: error {error:.1e}"


def leaves_of(tensors: Tensors) -> Tensors:
    return {name: value.clone().requires_grad_() for name, value in tensors.items()}


def gradients(outputs: list[Tensor], leaves: Tensors, grad_outs: list[Tensor]) -> Tensors:
    """Of the unsharded module, by name."""
    grads = torch.autograd.grad(outputs, list(leaves.values()), grad_outs)
    return dict(zip(leaves, grads, strict=True))


def test_column_parallel_equals_unsharded(tp: int = 4) -> None:
    """Three fused matrices: each rank has its rows of every one."""
    shapes: dict[str, tuple[int, ...]] = {f"{n}.weight": (out, IN) for n, out in OUT_SIZES.items()}
    weights = draw(1, shapes | {f"{n}.bias": (out,) for n, out in OUT_SIZES.items()})
    grad_out = draw(2, {n: (S, B, out) for n, out in OUT_SIZES.items()})
    x = draw(3, {"x": (S, B, IN)})["x"]
    results = run_ranks(tp, column_on_rank, x, weights, grad_out)

    leaves = leaves_of(weights | {"x": x})
    outputs = {n: F.linear(leaves["x"], leaves[f"{n}.weight"], leaves[f"{n}.bias"]) for n in OUT_SIZES}
    actual = assemble([part.grad_weights for part, _ in results])
    actual["x"] = torch.cat([part.grad_input for part, _ in results])
    assert_equal(actual, gradients(list(outputs.values()), leaves, list(grad_out.values())))
    assert_equal(
        assemble([output for _, output in results]),
        {f"{n}.weight": y.detach().movedim(-1, 0) for n, y in outputs.items()},
    )


def test_row_parallel_equals_unsharded(tp: int = 4) -> None:
    """The bias is on every rank, and each has seen some of the tokens: its gradient is the ranks' sum."""
    weights = draw(1, {"row.weight": (IN, OUT), "row.bias": (IN,)})
    tensors = draw(2, {"x": (S, B, OUT), "grad_out": (S, B, IN)})
    parts = run_ranks(tp, row_on_rank, tensors["x"], weights, tensors["grad_out"])

    leaves = leaves_of(weights | {"x": tensors["x"]})
    output = F.linear(leaves["x"], leaves["row.weight"], leaves["row.bias"])
    actual = {
        "x": torch.cat([part.grad_input for part in parts], dim=-1),
        "row.bias": torch.stack([part.grad_replicated["row.bias"] for part in parts]).sum(0),
        **assemble([part.grad_weights for part in parts]),
    }
    assert_equal(actual, gradients([output], leaves, [tensors["grad_out"]]))
    assert_equal({"output": torch.cat([part.output for part in parts])}, {"output": output.detach()})


@pytest.mark.parametrize(("tp", "chunk"), [(4, 1), (2, 12), (4, 8192)])  # tokens: a row, an unequal last chunk, all
def test_vocab_parallel_embedding_equals_unsharded(tp: int, chunk: int) -> None:
    """Tokens of every slice, some more than once; rows of padding are never read and get no gradient."""
    weights = draw(1, {"embedding.weight": (VOCAB, IN)})
    tokens = torch.tensor([0, 1, 63, 64, 65, VOCAB - 1, 63, 64] * B).view(S, B)
    grad_out = draw(2, {"grad_out": (S, B, IN)})["grad_out"]
    parts = run_ranks(tp, embedding_on_rank, tokens, weights, grad_out, chunk)

    leaves = leaves_of(weights)
    output = F.embedding(tokens, leaves["embedding.weight"])
    assert_equal(assemble([part.grad_weights for part in parts]), gradients([output], leaves, [grad_out]))
    assert_equal({"output": torch.cat([part.output for part in parts])}, {"output": output.detach()})
    assert all(part.padding_is_zero for part in parts)
