"""A custom layer on tiles of tokens: its two halves, before and after attention, each run again in backward.

Of what stands in a half memo knows the matrices alone. So forward runs a half without a graph and keeps in the slot the
tokens that move of each column-parallel matrix after attention; backward runs the half again under a graph of its own,
in which such a matrix finds its output instead of computing it. Matrices add their weight gradients to the main
gradients themselves, with the products of memo.executor.pieces; what is between them goes through autograd. Forward and
both runs do the same operations on the same tiles, so that any share that moves gives the same bits.

Shapes as in memo.executor.tile_operations.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from memo.executor.layer import TokenwiseLayer
from memo.executor.pieces import (
    Gathering,
    Linear,
    column_backward,
    column_forward,
    row_backward,
    row_forward,
)
from memo.executor.sweep import SweptLayer
from memo.executor.tile_operations import Context, Tile, TileOperations
from memo.parallel.collectives import all_gather
from memo.parallel.tensor import ColumnParallelLinear, RowParallelLinear


@dataclass(frozen=True)
class _Running:
    """The tile on which a half works, and its slot; `again`: in backward, where the slot may hold what it made."""

    tile: Tile
    kept: dict[str, Tensor]
    is_second: bool
    again: bool


class HalvesOperations(TileOperations):
    """The operations of a custom layer on a tile, in the place of those of memo's own layer."""

    def __init__(self, layer: Any, *how: Any) -> None:
        """`layer` is a memo.model.custom.CustomLayer, whose matrices are wrapped; `how`: as of the other base."""
        super().__init__(layer, *how)
        self.running: _Running | None = None
        modules = dict(layer.named_modules())
        for name, module in modules.items():
            owner, _, attribute = name.rpartition(".")
            if isinstance(module, _Tiled):
                module.layer_of = (self,)  # it was on tiles already, where it was measured
            elif isinstance(module, ColumnParallelLinear | RowParallelLinear) and not isinstance(
                modules[owner], _Tiled
            ):
                kind = _TiledColumn if isinstance(module, ColumnParallelLinear) else _TiledRow
                setattr(modules[owner], attribute, kind(module, name, self))
        self._recalled = {name: layer.get_submodule(name).linear for name in layer.recalled}
        of_matrices = {id(p) for m in layer.modules() if isinstance(m, _Tiled) for p in m.linear.parameters()}
        self._others = [parameter for parameter in layer.parameters() if id(parameter) not in of_matrices]

    # The first half.

    def compute_qkv(self, kept: dict[str, Tensor], tile: Tile, context: Context) -> None:
        attention = self.layer.attention
        with self._at(tile, kept, is_second=False, again=False):
            qkv = kept["qkv"][tile.full]
            qkv.copy_(self.layer.before_attention(kept["input"][tile.shard]))
        q, k, _ = attention.normed_heads(qkv)
        attention.rotate_(q, k, self._rope_rows(context, tile))

    def _qkv_backward(self, kept: dict[str, Tensor], tile: Tile, grads: Sequence[Tensor], context: Context) -> Tensor:
        grad_q, grad_k, grad_v = grads
        self.layer.attention.rotate_(grad_q, grad_k, self._rope_rows(context, tile), back=True)  # in place
        grad = torch.cat([part.flatten(2) for part in (grad_q, grad_k, grad_v)], dim=-1)
        with self._at(tile, kept, is_second=False, again=True):
            (grad_x,) = self._again(self.layer.before_attention, [kept["input"][tile.shard]], grad)
        return grad_x

    # The second half.

    def _finish(self, kept: dict[str, Tensor], tile: Tile, out: Tensor) -> None:
        out.copy_(self._second(kept, tile))

    def _keep_again(self, kept: dict[str, Tensor], tile: Tile) -> None:
        if any(self._is_kept(name, tile.full) for name in self._recalled):
            self._second(kept, tile)

    def _second(self, kept: dict[str, Tensor], tile: Tile) -> Tensor:
        with self._at(tile, kept, is_second=True, again=False):
            y: Tensor = self.layer.after_attention(kept["input"][tile.shard], kept["attention_out"][tile.full])
        return y

    def _finish_backward(self, kept: dict[str, Tensor], tile: Tile, grad: Tensor, grad_residual: Tensor) -> Tensor:
        inputs = [kept["input"][tile.shard], kept["attention_out"][tile.full]]
        with self._at(tile, kept, is_second=True, again=True):
            grad_x, grad_out = self._again(self.layer.after_attention, inputs, grad[tile.shard])
        grad_residual[tile.shard] = grad_x
        return grad_out

    # Both.

    def recomputations(self, kept: dict[str, Tensor], tile: Tile, context: Context) -> dict[str, Callable[[], object]]:
        rows = kept["input"][tile.shard]

        def product(linear: Linear) -> Tensor:
            inputs = rows.new_empty(*rows.shape[:-1], linear.weight.shape[1])
            return column_forward(all_gather(inputs, self.group), linear)

        products = {name: functools.partial(product, linear) for name, linear in self._recalled.items()}
        return {"qkv": lambda: self.compute_qkv(kept, tile, context), **products}

    @contextlib.contextmanager
    def _at(self, tile: Tile, kept: dict[str, Tensor], *, is_second: bool, again: bool) -> Iterator[None]:
        self.running = _Running(tile, kept, is_second, again)
        try:
            yield
        finally:
            self.running = None

    def _again(self, half: Callable[..., Tensor], inputs: list[Tensor], grad: Tensor) -> list[Tensor]:
        """Runs a half under a graph and through it backward: the gradients of its inputs. Those of matrices are added
        by these, those of its other parameters here."""
        with torch.enable_grad():
            leaves = [x.detach().requires_grad_() for x in inputs]
            y = half(*leaves)
        found = torch.autograd.grad(y, [*leaves, *self._others], grad, allow_unused=True)
        for parameter, value in zip(self._others, found[len(leaves) :], strict=True):
            if value is not None:
                self.sink.main_gradient(parameter).add_(value)
        of_inputs = found[: len(leaves)]
        return [torch.zeros_like(x) if g is None else g for x, g in zip(inputs, of_inputs, strict=True)]


class HalvesLayer(HalvesOperations, TokenwiseLayer):
    """A custom layer whose slot holds all of it."""


class SweptHalvesLayer(HalvesOperations, SweptLayer):
    """A custom layer that is swept along the sequence."""


class _Tiled(nn.Module):
    """A matrix of a custom layer; outside of tiles, in an evaluation, it is the plain one."""

    def __init__(self, linear: Any, name: str, layer: HalvesOperations) -> None:
        super().__init__()
        self.linear: Any = linear
        self.name = name
        self.layer_of = (layer,)  # in a tuple, so that the layer is no child of its matrix

    @property
    def layer(self) -> HalvesOperations:
        return self.layer_of[0]


class _TiledColumn(_Tiled):
    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x) if self.layer.running is None else _Column.apply(x, self)
        return y

    def output(self, x: Tensor) -> Tensor:
        """Of x [n / T, b, in]: from the slot, if it was kept there, else computed, and kept if it is to be."""
        layer = self.layer
        at = layer.running
        assert at is not None
        is_kept = at.is_second and layer._is_kept(self.name, at.tile.full)
        if is_kept and at.again:
            return at.kept[self.name][at.tile.full]
        y = column_forward(all_gather(x, layer.group), self.linear)
        if is_kept:
            at.kept[self.name][at.tile.full].copy_(y)
        return y


class _TiledRow(_Tiled):
    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x) if self.layer.running is None else _Row.apply(x, self)
        return y


class _Column(torch.autograd.Function):
    """[n / T, b, in] -> [s / T, b, out / tp]; its backward adds the weight's gradient to the main gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, matrix: _TiledColumn) -> Tensor:
        ctx.save_for_backward(x)
        ctx.matrix = matrix
        return matrix.output(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        layer, (x,) = ctx.matrix.layer, ctx.saved_tensors
        grad = grads[0].contiguous()
        return column_backward(grad, Gathering(x, layer.group), ctx.matrix.linear, layer.group, layer.sink), None


class _Row(torch.autograd.Function):
    """[s / T, b, in / tp] -> [n / T, b, out]; likewise."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, matrix: _TiledRow) -> Tensor:
        ctx.save_for_backward(x)
        ctx.matrix = matrix
        return row_forward(x, matrix.linear, matrix.layer.group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        layer, (x,) = ctx.matrix.layer, ctx.saved_tensors
        grad = grads[0].contiguous()
        return row_backward(grad, Gathering(grad, layer.group), x, ctx.matrix.linear, layer.sink), None
