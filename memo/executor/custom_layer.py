"""A custom layer on tiles of tokens: its two halves, before and after attention, each run again in backward.

memo knows only the matrices of a half. So forward runs a half without a graph; for each column-parallel matrix after
attention, the slot keeps the outputs of the tokens that move. Backward runs the half again under a graph of its own, in
which those matrices take their outputs from the slot instead of computing them. Matrices add their weight gradients to
the main gradients themselves, with the products of memo.executor.pieces; everything between the matrices goes through
autograd. Both runs do the same operations on the same tiles, so the results do not depend on how much moves.

Shapes as in memo.executor.tile_machine.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from memo.executor.layer import TokenwiseLayer
from memo.executor.layer_on_tiles import LayerOnTiles
from memo.executor.pieces import (
    Gathering,
    Linear,
    column_backward,
    column_forward,
    row_backward,
    row_forward,
)
from memo.executor.sweep import SweptLayer
from memo.executor.tile_machine import Context, Tile, TileMachine
from memo.parallel.collectives import all_gather
from memo.parallel.tensor import ColumnParallelLinear, RowParallelLinear
from memo.program.operations import Operation


@dataclass(frozen=True)
class _Running:
    """The tile on which a half works; `again`: whether in backward, where the slot may hold its matrices' outputs."""

    machine: TileMachine
    again: bool


class CustomLayerOperations(LayerOnTiles):
    """The operations of a custom layer on a tile, which replace those of memo's own layer."""

    def __init__(self, layer: Any, *how: Any, **swept: Any) -> None:
        """Wraps the matrices of `layer`, a memo.model.custom.CustomLayer; further arguments as for its plain kind."""
        super().__init__(layer, *how, **swept)
        self.running: _Running | None = None
        modules = dict(layer.named_modules())
        for name, module in modules.items():
            owner, _, attribute = name.rpartition(".")
            if isinstance(module, _Tiled):
                module.layer_of = (self,)  # it was wrapped already, to be measured
            elif isinstance(module, ColumnParallelLinear | RowParallelLinear) and not isinstance(
                modules[owner], _Tiled
            ):
                kind = _TiledColumn if isinstance(module, ColumnParallelLinear) else _TiledRow
                setattr(modules[owner], attribute, kind(module, name, self))
        self._recalled = {name: layer.get_submodule(name).linear for name in layer.recalled}
        matrix_parameters = {id(p) for m in layer.modules() if isinstance(m, _Tiled) for p in m.linear.parameters()}
        self._other_parameters = [p for p in layer.parameters() if id(p) not in matrix_parameters and p.requires_grad]

    def run_half(self, machine: TileMachine, operation: Operation, *x: Tensor) -> Tensor:
        """Run one half forward."""
        with self._at(machine, again=False):
            y: Tensor = self.module_of[operation](*x)
        return y

    def run_half_backward(
        self, machine: TileMachine, operation: Operation, grads: Tensor | tuple[Tensor, ...], *x: Tensor
    ) -> tuple[Tensor, ...]:
        """Run a half again under a graph, then its backward; returns the gradients of its inputs.

        Matrices add their own weight gradients; the gradients of all other parameters are added here.
        """
        with self._at(machine, again=True):
            with torch.enable_grad():
                leaves = [each.detach().requires_grad_() for each in x]
                y = self.module_of[operation](*leaves)
            found = torch.autograd.grad(y, [*leaves, *self._other_parameters], grads, allow_unused=True)
        for parameter, value in zip(self._other_parameters, found[len(x) :], strict=True):
            main = self.sink.main_gradient(parameter)
            if value is not None and main is not None:
                main.add_(value)
        return tuple(torch.zeros_like(each) if g is None else g for each, g in zip(x, found[: len(x)], strict=True))

    def recomputations(self, kept: dict[str, Tensor], tile: Tile, context: Context) -> dict[str, Callable[[], object]]:
        rows = kept["input"][tile.shard]

        def product(linear: Linear) -> Tensor:
            inputs = rows.new_empty(*rows.shape[:-1], linear.weight.shape[1])
            return column_forward(all_gather(inputs, self.group), linear)

        products = {name: functools.partial(product, linear) for name, linear in self._recalled.items()}
        return {"qkv": lambda: self.compute_qkv(kept, tile, context), **products}

    @contextlib.contextmanager
    def _at(self, machine: TileMachine, *, again: bool) -> Iterator[None]:
        self.running = _Running(machine, again)
        try:
            yield
        finally:
            self.running = None


class TokenwiseCustomLayer(CustomLayerOperations, TokenwiseLayer):
    """A custom layer whose slot holds all tokens of this rank."""


class SweptCustomLayer(CustomLayerOperations, SweptLayer):
    """A custom layer that is swept along the sequence."""


class _Tiled(nn.Module):
    """A matrix of a custom layer; outside of tiles it calls the plain matrix."""

    def __init__(self, linear: Any, name: str, layer: CustomLayerOperations) -> None:
        super().__init__()
        self.linear: Any = linear
        self.name = name
        self.layer_of = (layer,)  # in a tuple, so that torch does not register the layer as a child of its matrix

    @property
    def layer(self) -> CustomLayerOperations:
        return self.layer_of[0]

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x) if self.layer.running is None else _OnTile.apply(x, self)
        return y


class _TiledColumn(_Tiled):
    """[n / T, b, in] -> [s / T, b, out / tp]."""

    def output(self, x: Tensor) -> Tensor:
        """The output for x [n / T, b, in]: in backward from the slot if it was kept there, else computed.

        Forward copies it to the slot if the slot keeps it.
        """
        layer = self.layer
        at = layer.running
        assert at is not None
        is_kept = self.name in layer._recalled and self.name in at.machine.kept
        if is_kept and at.again:
            return at.machine.in_slot(self.name)
        y = column_forward(all_gather(x, layer.group), self.linear)
        if is_kept:
            at.machine.in_slot(self.name).copy_(y)
        return y

    def backward(self, grad: Tensor, x: Tensor) -> Tensor:
        layer = self.layer
        return column_backward(grad, Gathering(x, layer.group), self.linear, layer.group, layer.sink)


class _TiledRow(_Tiled):
    """[s / T, b, in / tp] -> [n / T, b, out]."""

    def output(self, x: Tensor) -> Tensor:
        return row_forward(x, self.linear, self.layer.group)

    def backward(self, grad: Tensor, x: Tensor) -> Tensor:
        return row_backward(grad, Gathering(grad, self.layer.group), x, self.linear, self.layer.sink)


class _OnTile(torch.autograd.Function):
    """A matrix on a tile; its backward adds the weight's gradient to the main gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, matrix: _TiledColumn | _TiledRow) -> Tensor:
        ctx.save_for_backward(x)
        ctx.matrix = matrix
        return matrix.output(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        return ctx.matrix.backward(grads[0].contiguous(), x), None
