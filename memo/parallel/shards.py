"""Describes the part of the global weights that a local parameter holds.

A local parameter is a set of rectangles of named global tensors. A fused qkv weight on one tensor-parallel rank, for
example, holds a range of rows of each of q, k and v. Initialisation, gradients, checkpoints and Hugging Face files all
read this one description, so none of them needs to know how a layer fuses or splits its matrices.
"""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from memo.parallel.collectives import group_rank, group_size
from memo.spec.delta import RATES
from memo.spec.weights import Init, Replicated, Weight


@dataclass(frozen=True)
class Piece:
    """The rectangle of `shape` at `offset` in the global tensor `name`, and at `local_offset` in the local one."""

    name: str
    global_shape: tuple[int, ...]
    offset: tuple[int, ...]
    local_offset: tuple[int, ...]
    shape: tuple[int, ...]

    def of_global(self, tensor: Tensor) -> Tensor:
        return tensor[tuple(slice(o, o + n) for o, n in zip(self.offset, self.shape, strict=True))]

    def of_local(self, tensor: Tensor) -> Tensor:
        return tensor[tuple(slice(o, o + n) for o, n in zip(self.local_offset, self.shape, strict=True))]


@dataclass(frozen=True)
class Shard:
    """The description of one local parameter.

    Attributes:
        pieces: the rectangles that it holds; rows that no piece covers are padding and stay zero.
        init, std: the distribution of the initial values.
        replicated: names the ranks that hold the same values but compute the gradient from other tokens, or from
            another use of the parameter; the gradient is summed over them after the data-parallel reduction.
        decay: whether weight decay applies.
        frozen: whether it is not trained, and so has neither gradient nor moments.
        coded: whether it is quantized, and has its values only while its layer runs.
    """

    pieces: tuple[Piece, ...]
    init: Init = "normal"
    std: float = 0.0
    replicated: Replicated = ""
    decay: bool = True
    frozen: bool = False
    coded: bool = False


class ShardedParameter(nn.Parameter):
    """A parameter with the description of what it holds.

    Attributes:
        local_name: its name in the model of this rank, if memo.parallel.data gives it memory.
        main_grad: the main gradient, in its shape and in the wide dtype; None while it has no memory.
        on_added: called by a backward that has added its contribution to main_grad itself
            (memo.parallel.weight_gradients); None if no MainGradients owns it.
    """

    shard: Shard
    local_name: str
    main_grad: Tensor | None
    on_added: "Callable[[ShardedParameter], None] | None"

    def __new__(cls, data: Tensor, shard: Shard, local_name: str = "") -> "ShardedParameter":
        parameter = super().__new__(cls, data, requires_grad=not shard.frozen)
        parameter.shard, parameter.local_name = shard, local_name
        parameter.main_grad = parameter.on_added = None
        return parameter


def empty_parameter(shape: tuple[int, ...], shard: Shard, dtype: torch.dtype) -> ShardedParameter:
    """A parameter without memory; later it becomes a view of a flat buffer of `memo.parallel.data`."""
    return ShardedParameter(torch.empty(shape, dtype=dtype, device="meta"), shard)


def sharded_parameter(
    weight: Weight, dtype: torch.dtype, group: ProcessGroup | None, *, std: float, prefix: str = ""
) -> ShardedParameter:
    """Return the part of `weight` that this rank of `group` (None: tp 1) holds, without memory.

    Args:
        std: standard deviation of the initial values, if they are random.
        prefix: prefix of the names of its global tensors, such as "layers.3.".
    """
    size, rank = group_size(group), group_rank(group)
    pieces: list[Piece] = []
    start = 0
    for name, shape in weight.part_shapes().items():
        name = prefix + name
        if weight.split == "whole":
            pieces.append(whole(name, shape, start))
        elif weight.split == "vocabulary":
            pieces += _vocabulary_rows(name, shape, weight.local_shape(size)[0], rank)
        else:
            pieces.append(split(name, shape, 0 if weight.split == "rows" else 1, size, rank, start))
        start += pieces[-1].shape[0] if pieces else 0
    std = std if weight.init == "normal" else 0.0
    shard = Shard(tuple(pieces), weight.init, std, weight.replicated, weight.decays, weight.frozen, weight.coded)
    return empty_parameter(weight.local_shape(size), shard, dtype)


def _vocabulary_rows(name: str, shape: tuple[int, ...], rows: int, rank: int) -> list[Piece]:
    """Return block `rank` of a table that is cut into blocks of `rows` rows; [] if the block is all padding."""
    first = min(rank * rows, shape[0])
    own = (min(rows, shape[0] - first), *shape[1:])
    zeros = (0,) * len(shape)
    return [Piece(name, shape, (first, *zeros[1:]), zeros, own)] if own[0] else []


def split(name: str, global_shape: tuple[int, ...], dim: int, size: int, rank: int, local_start: int = 0) -> Piece:
    """Return the `rank`-th of `size` equal parts along `dim`, at row `local_start` of the local tensor."""
    length = global_shape[dim] // size
    offset, local_offset, shape = [0] * len(global_shape), [0] * len(global_shape), list(global_shape)
    offset[dim], local_offset[0], shape[dim] = rank * length, local_start, length
    return Piece(name, global_shape, tuple(offset), tuple(local_offset), tuple(shape))


def whole(name: str, global_shape: tuple[int, ...], local_start: int = 0) -> Piece:
    """Return a whole global tensor as one piece, at row `local_start` of the local tensor."""
    zeros = (0,) * len(global_shape)
    return Piece(name, global_shape, zeros, (local_start, *zeros[1:]), global_shape)


@torch.no_grad()
def initialize(parameter: ShardedParameter, seed: int) -> None:
    """Set the initial values, which depend on the seed and the global name alone, not on the layout.

    Each rank draws the whole global tensor in fp32 and keeps its rectangle. So every layout starts from the same
    weights, at the price of drawing tp times as many numbers as the rank needs.
    """
    parameter.zero_()
    for piece in parameter.shard.pieces:
        target = piece.of_local(parameter)
        if parameter.shard.init not in ("ones", "zeros"):
            generator = torch.Generator(device=parameter.device).manual_seed(_name_seed(piece.name, seed))
            values = torch.empty(piece.global_shape, dtype=torch.float32, device=parameter.device)
            if parameter.shard.init == "normal":
                values.normal_(0.0, parameter.shard.std, generator=generator)
            elif parameter.shard.init == "uniform_by_columns":
                bound = piece.global_shape[-1] ** -0.5
                values.uniform_(-bound, bound, generator=generator)
            else:
                values.uniform_(*RATES, generator=generator).log_()
            target.copy_(piece.of_global(values))
        else:
            target.fill_(1.0 if parameter.shard.init == "ones" else 0.0)


def _name_seed(name: str, seed: int) -> int:
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1  # torch seeds are signed 64-bit
