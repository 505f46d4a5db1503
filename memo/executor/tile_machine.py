"""Runs the operations of a layer on one tile of tokens, on tensors in a rounding buffer.

memo.program.walk says which operations run in which order; this file says what each operation does with torch.

Layout: tile t of the context-parallel rank's tokens is split over the tp ranks, so a tile is contiguous both
sharded (rows of [n, b, ...]) and gathered (rows of [s, b, ...]).

Shapes: n = s / tp and s tokens of this context-parallel rank that the slot holds, b micro-batch, a / k query and
key/value heads of this tp rank, d head size, f inner width of the MLP on this rank (2 f when gated, before the
activation); T tiles in the slot.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from memo.executor.expert_pieces import biases_backward, combine_backward, experts_backward
from memo.executor.latent_pieces import expand_backward, expand_forward
from memo.executor.pieces import (
    Gathering,
    GradientSink,
    column_backward,
    column_forward,
    row_backward,
    row_forward,
)
from memo.parallel.experts import ExpertRows
from memo.parallel.replayed import Replayed
from memo.program import operations as op
from memo.program.operations import Operation, entry_for
from memo.program.walk import Machine, Step, graph
from memo.spec.slots import NEEDS_FULL_ROOM


class Rope(Protocol):
    def rows(self, tokens: slice) -> Any: ...


class Context(Protocol):
    """Positions and documents of the tokens of a microbatch, in the gathered order."""

    @property
    def rope(self) -> Rope | None: ...
    @property
    def documents(self) -> Any: ...


@dataclass(frozen=True)
class Tile:
    """The ranges of rows of one tile, in sharded and in gathered tensors."""

    index: int
    shard: slice
    full: slice


def make_tiles(num_tokens: int, tp: int, count: int) -> list[Tile]:
    """Divide s = num_tokens gathered tokens into `count` equal tiles."""
    full, shard = num_tokens // count, num_tokens // (count * tp)
    return [Tile(i, slice(i * shard, (i + 1) * shard), slice(i * full, (i + 1) * full)) for i in range(count)]


class OnTiles(Protocol):
    """The interface of memo.executor.layer_on_tiles.LayerOnTiles."""

    layer: Any
    sink: GradientSink
    group: ProcessGroup | None
    module_of: dict[Operation, Any]

    def kept_of(self, tile: Tile) -> frozenset[str]: ...
    def rows_of(self, name: str, tile: Tile) -> slice: ...


class TileMachine(Machine):
    """Runs steps of a layer on one tile.

    Attributes:
        live: values by name: a tensor; a Gathering for a gathered tensor; a Replayed for a graph; a tuple for the
            gradients of q, k and v.
        slot: the tensors of the layer's slot.
        kept: names of the tensors of which the slot holds this tile's rows between forward and backward.
        places: memory outside the slot that the caller gives for values, by name.
    """

    def __init__(self, on: OnTiles, slot: dict[str, Tensor], tile: Tile, context: Context) -> None:
        super().__init__({})
        self.on, self.slot, self.tile, self.context = on, slot, tile, context
        self.sink, self.group, self.kept = on.sink, on.group, on.kept_of(tile)
        self.places: dict[str, Tensor] = {}

    def take(self, name: str) -> Any:
        """The live value of this name, or else the tile's rows in the slot."""
        found = self.live.get(name)
        return self.in_slot(name) if found is None else found

    def in_slot(self, name: str) -> Tensor:
        return self.slot[name][self.on.rows_of(name, self.tile)]

    def place(self, name: str) -> Tensor | None:
        """The memory to write the value to; None: it needs new memory."""
        if name in self.places:
            return self.places[name]
        return self.in_slot(name) if name == NEEDS_FULL_ROOM or name in self.kept else None

    def put(self, name: str, found: str) -> None:
        """Copy the live value `found` to the place that is given for `name`, unless it is already there."""
        if self.live[found] is not self.places[name]:
            self.places[name].copy_(self.live[found])

    @property
    def rope(self) -> Any:
        return None if self.context.rope is None else self.context.rope.rows(self.tile.full)

    @cached_property
    def expert_rows(self) -> ExpertRows:
        """The tile's rows by expert; the slot must hold the tile's routing."""
        rows: ExpertRows = self.on.layer.mlp.rows(self.in_slot("routing"))
        return rows

    def module(self, operation: Operation) -> Any:
        """What an operation between matrices calls; the activation of experts needs the tile's rows as well."""
        found = self.on.module_of[operation]
        return partial(found, rows=self.expert_rows) if isinstance(operation, op.ActivateExperts) else found

    # The calls of memo.program.walk.

    def gather(self, step: Step) -> None:
        self.live[step.makes[0]] = Gathering(self.take(step.reads[0]), self.group)

    def keep(self, step: Step) -> None:
        (name,) = step.reads
        self.in_slot(name).copy_(self.live[name])

    def forward(self, step: Step, operation: Operation) -> None:
        made = entry_for(operation, _FORWARD)(self, operation, *map(self.take, step.reads))
        self.live.update(zip(step.makes, made, strict=True))

    def replay(self, step: Step, operation: Operation) -> None:
        module = self.module(operation)
        parameters = module.parameters() if isinstance(module, nn.Module) else ()
        again = Replayed(module, *map(self.take, step.reads), parameters=parameters)
        self.live[graph(operation.makes[0])] = again
        for name in step.makes[1:]:
            self.live[name] = again.output

    def backward(self, step: Step, operation: Operation) -> None:
        back = _replayed_backward if operation.replays else entry_for(operation, _BACKWARD)
        made = back(self, operation, *map(self.take, step.reads))
        if step.adds_to:
            made = (torch.add(made[0], self.take(step.adds_to), out=self.places.get(step.place)), *made[1:])
        self.live.update(zip(step.makes, made, strict=True))


Made = tuple[Any, ...]


def _norm(machine: TileMachine, operation: Operation, *x: Tensor) -> Made:
    module = machine.on.module_of[operation]
    return module.of_sum(*x) if len(x) == 2 else (module(*x),)


def _add(machine: TileMachine, operation: Operation, *x: Tensor) -> Made:
    return (torch.add(*x, out=machine.place(operation.makes[0])),)


def _scale(machine: TileMachine, operation: Operation, x: Tensor) -> Made:
    return (torch.mul(x, machine.on.layer.scalar, out=machine.place(operation.makes[0])),)


def _column(machine: TileMachine, operation: Operation, x: Gathering) -> Made:
    return (column_forward(x.wait(), machine.on.module_of[operation], out=machine.place(operation.makes[0])),)


def _row(machine: TileMachine, operation: Operation, x: Tensor) -> Made:
    return (row_forward(x, machine.on.module_of[operation], machine.group),)


def _experts(machine: TileMachine, operation: Operation, x: Gathering, *taken: Any) -> Made:
    mlp, routing = machine.on.layer.mlp, machine.in_slot("routing")
    own, recalled = taken[: len(operation.reads) - 1], taken[len(operation.reads) - 1 :]
    if not recalled:
        routing.copy_(mlp.route((*own, x)[0].wait()).view_as(routing))
    made = mlp.expand(x.wait(), machine.expert_rows, machine.place("fc1"))
    return (made,) if recalled else (made, routing)


def _combine(machine: TileMachine, operation: Operation, x: Tensor, routing: Tensor) -> Made:
    return (machine.on.layer.mlp.combine(x, routing, machine.expert_rows),)


def _applied(machine: TileMachine, operation: Operation, *x: Tensor) -> Made:
    return (machine.module(operation)(*x),)


def _rotated_heads(machine: TileMachine, operation: Operation, qkv: Tensor) -> Made:
    attention = machine.on.module_of[operation]
    q, k, _ = attention.normed_heads(qkv)
    attention.rotate_(q, k, machine.rope)
    return (qkv,)


def _expand(machine: TileMachine, operation: Operation, *x: Tensor) -> Made:
    return (expand_forward(machine.on.module_of[operation], *x, out=machine.place(operation.makes[0])),)


def _half(machine: TileMachine, operation: Operation, *x: Tensor) -> Made:
    on: Any = machine.on  # memo.executor.custom_layer.CustomLayerOperations
    made = on.run_half(machine, operation, *x)
    place = machine.place(operation.makes[0])
    return (made if place is None else place.copy_(made), *(None for _ in operation.makes[1:]))


def _scale_backward(machine: TileMachine, operation: Operation, grad: Tensor) -> Made:
    return (grad * machine.on.layer.scalar,)


def _column_backward(machine: TileMachine, operation: Operation, grad: Tensor, x: Gathering | None = None) -> Made:
    return (column_backward(grad, x, machine.on.module_of[operation], machine.group, machine.sink),)


def _row_backward(
    machine: TileMachine, operation: Operation, grad: Tensor, whole: Gathering, x: Tensor | None = None
) -> Made:
    return (row_backward(grad, whole, x, machine.on.module_of[operation], machine.sink),)


def _experts_backward(
    machine: TileMachine, operation: Operation, grad: Tensor, of_routing: Tensor, *taken: Any
) -> Made:
    mlp, rows, (*x, routing) = machine.on.layer.mlp, machine.expert_rows, taken
    return experts_backward((grad, of_routing), x, routing, mlp, rows, machine.group, machine.sink)


def _combine_backward(
    machine: TileMachine, operation: Operation, grad: Tensor, whole: Gathering, *taken: Tensor
) -> Made:
    mlp, rows, (*x, routing) = machine.on.layer.mlp, machine.expert_rows, taken
    made = (combine_backward(whole, x[0] if x else None, routing, mlp, rows, machine.sink),)
    return (
        made
        if operation.reads_without_gradient
        else (*made, biases_backward(grad, routing, mlp, rows, machine.group, machine.sink))
    )


def _replayed_backward(machine: TileMachine, operation: Operation, grad: Tensor, again: Replayed) -> Made:
    return again.backward(machine.sink.main_gradient, grad)


def _heads_backward(machine: TileMachine, operation: op.Heads, grads: tuple[Tensor, ...], qkv: Tensor) -> Made:
    """Return the gradient of qkv; overwrites the gradients of q and k."""
    attention = machine.on.module_of[operation]
    attention.rotate_(grads[0], grads[1], machine.rope, back=True)
    if operation.in_place:
        return (torch.cat(grads, dim=2).flatten(2),)
    norms = (attention.q_norm, attention.k_norm)
    again = Replayed(attention.normed_heads, qkv, parameters=[p for module in norms for p in module.parameters()])
    return again.backward(machine.sink.main_gradient, *grads)


def _expand_backward(machine: TileMachine, operation: Operation, grad: Tensor, normed: Tensor) -> Made:
    return expand_backward(machine.on.module_of[operation], grad, normed, machine.sink)


def _half_backward(machine: TileMachine, operation: Operation, grad: Tensor, *x: Tensor) -> Made:
    on: Any = machine.on  # memo.executor.custom_layer.CustomLayerOperations
    made: Made = on.run_half_backward(machine, operation, grad, *x)
    return made


_FORWARD: dict[type[Any], Callable[..., Made]] = {
    op.Norm: _norm,
    op.Expand: _expand,
    op.Trim: _applied,
    op.Add: _add,
    op.Scale: _scale,
    op.Column: _column,
    op.Row: _row,
    op.Activate: _applied,
    op.ExpertColumn: _experts,
    op.ExpertRow: _combine,
    op.Gate: _applied,
    op.Heads: _rotated_heads,
    op.Opaque: _half,
}
_BACKWARD: dict[type[Any], Callable[..., Made]] = {
    op.Expand: _expand_backward,
    op.Scale: _scale_backward,
    op.Column: _column_backward,
    op.Row: _row_backward,
    op.ExpertColumn: _experts_backward,
    op.ExpertRow: _combine_backward,
    op.Heads: _heads_backward,
    op.Opaque: _half_backward,
}
