"""Requests of the operations of a layer on one tile of tokens (memo.executor.tile_machine runs the operations).

memo.program.walk gives the order of operations, and frees their results. Tensors in a slot, or in memory of the caller,
request nothing here.
"""

import math
from collections.abc import Callable, Collection, Iterable
from typing import Any

from memo.estimate.program import experts
from memo.estimate.program.custom_layer import half_forward, half_on_tile_backward
from memo.estimate.program.latent import (
    expand_backward,
    expand_forward,
    latent_norm_backward,
    latent_norm_forward,
    trim_forward,
)
from memo.estimate.program.ledger import Block, Ledger
from memo.estimate.program.matrices import (
    AdapterSizes,
    adapter_backward,
    adapter_forward,
    adapter_gradients,
    adapter_of,
    add_weight_gradient,
    hidden_bytes,
    multiply,
    row_forward,
)
from memo.estimate.program.messages import all_gather_async, reduce_scatter
from memo.estimate.program.sizes import LayerSizes
from memo.estimate.program.tokenwise import (
    Normed,
    activation_backward,
    activation_forward,
    gate_backward,
    gate_forward,
    heads_backward,
    heads_forward,
    norm_backward,
    norm_forward,
    rope_in_place,
    weighted_activation_backward,
)
from memo.program import operations as op
from memo.program.operations import Operation, entry_for
from memo.program.walk import Machine, Step, graph

Made = tuple[Block | None, ...]


class TileLedger(Machine):
    """Records the requests of steps on a tile of `sizes.tokens` tokens.

    Attributes:
        live: {value: block}; None for a value in a slot or in memory of the caller.
        placed: values that are written to existing memory.
        graphs: {value: tensors that the graph of its operation keeps besides input and output}.
        reads: values that the running step reads.
        copies: {gathered value: gloo's copy} of messages that no operation has waited for yet.
    """

    live: dict[str, Block | None]

    def __init__(self, ledger: Ledger, sizes: LayerSizes, placed: Collection[str] = ()) -> None:
        super().__init__({})
        self.ledger, self.sizes, self.placed = ledger, sizes, placed
        self.graphs: dict[str, Any] = {}
        self.reads: tuple[str, ...] = ()
        self.copies: dict[str, Block | None] = {}
        self.matrices = dict(sizes.matrices)
        self.expert_rows: Block | None = None

    def free(self, names: tuple[str, ...]) -> None:
        """Free each name, and its block if no other live name has this block."""
        for name in names:
            block = self.live.pop(name)
            if all(other is not block for other in self.live.values()):
                self.ledger.free(block)

    def make(self, name: str, num_bytes: int) -> Block | None:
        return None if name in self.placed else self.ledger.make(name, num_bytes)

    def sort_rows(self) -> None:
        """Sort the rows of the tile by expert, once for all operations on experts."""
        if self.expert_rows is None:
            self.expert_rows = experts.expert_rows(self.ledger, self.sizes)

    def run(self, steps: Iterable[Step]) -> None:
        super().run(steps)
        self.ledger.free(self.expert_rows)

    @property
    def rows(self) -> int:
        """Tokens of this tensor-parallel rank."""
        return self.sizes.tokens // self.sizes.tp

    @property
    def whole_bytes(self) -> int:
        """Bytes of the tile's hidden states, gathered over tp."""
        return hidden_bytes(self.sizes, self.sizes.tokens)

    def of_mlp(self, activation: Operation) -> LayerSizes:
        """Return the sizes with the width of the MLP to which the activation belongs.

        The width of experts counts all experts of a token, and is that of the layer's sizes."""
        if isinstance(activation, op.ActivateExperts):
            return self.sizes
        return self.sizes._replace(ffn=self.matrices[f"{activation.module.rpartition('.')[0]}.fc2"][1])

    # The kinds of steps.

    def gather(self, step: Step) -> None:
        (source,), (made,) = step.reads, step.makes
        own = self.live.get(source)
        found = all_gather_async(self.ledger, self.sizes.tp, made.split(" of ")[0], self.whole_bytes, own)
        self.live[made], self.copies[made] = found

    def wait(self) -> None:
        """Wait for the messages that the step reads."""
        self.ledger.free_late(*(self.copies.pop(name, None) for name in self.reads))

    def keep(self, step: Step) -> None:
        """A copy to the slot takes no memory."""

    def forward(self, step: Step, operation: Operation) -> None:
        self.reads = step.reads
        total: Made = ()
        if step.total is not None:
            total = (self.ledger.make(step.makes[0], self.whole_bytes // self.sizes.tp),)
        if operation.replays:
            made: Made = entry_for(operation, _REPLAYED)(self, operation, False)[:1]
        else:
            made = entry_for(operation, _FORWARD)(self, operation)
        self.live |= zip(step.makes, total + made, strict=True)

    def replay(self, step: Step, operation: Operation) -> None:
        (name,) = operation.makes
        output, self.graphs[name] = entry_for(operation, _REPLAYED)(self, operation, True)
        self.live |= dict.fromkeys((graph(name), *step.makes), output)

    def backward(self, step: Step, operation: Operation) -> None:
        self.reads = step.reads
        made = entry_for(operation, _BACKWARD)(self, operation)
        if step.adds_to:
            term = made[0]
            total = None if step.place or term is None else self.ledger.make("sum of gradients", term.num_bytes)
            self.ledger.free(term)
            made = (total, *made[1:])
        self.live |= zip(step.makes, made, strict=True)

    def experts_of(self, operation: Operation) -> int:
        """Return how many experts have a matrix each in this operation; 0: one matrix multiplies all tokens."""
        return self.sizes.experts if isinstance(operation, op.ExpertColumn | op.ExpertRow) else 0

    def gradient_elements(self, operation: Operation) -> int:
        """Return the elements of the gradient of an operation's matrix, or of one expert's; 0 if it is frozen."""
        elements = 0 if operation.module in self.sizes.frozen else math.prod(self.matrices[operation.module])
        return elements // max(1, self.experts_of(operation))

    def add_weight_gradient(self, operation: Operation) -> None:
        """Compute the gradient of an operation's matrix, unless the matrix is frozen."""
        if elements := self.gradient_elements(operation):
            add_weight_gradient(self.ledger, self.sizes, elements)

    def adapter_of(self, operation: Operation) -> AdapterSizes | None:
        return adapter_of(self.matrices, operation.module, self.experts_of(operation))


def _norm(machine: TileLedger, operation: Operation, graph: bool) -> tuple[Block, Normed]:
    sizes = machine.sizes
    normed = norm_forward(machine.ledger, sizes, operation.makes[0], machine.rows, sizes.hidden, graph)
    return normed.out, normed


def _activate(machine: TileLedger, operation: Operation, graph: bool) -> tuple[Block, tuple[Block, ...]]:
    if isinstance(operation, op.ActivateExperts):
        machine.sort_rows()
    is_weighted = isinstance(operation, op.ActivateScored | op.ActivateExperts)
    return activation_forward(machine.ledger, machine.of_mlp(operation), graph, is_weighted)


def _add(machine: TileLedger, operation: Operation) -> Made:
    return (machine.make(operation.makes[0], machine.whole_bytes // machine.sizes.tp),)


def _column(machine: TileLedger, operation: Operation) -> Made:
    elements = machine.sizes.tokens * machine.matrices[operation.module][0]
    machine.wait()
    made = machine.make(operation.makes[0], elements * machine.sizes.narrow)
    multiply(machine.ledger, machine.sizes, elements)
    adapter_forward(machine.ledger, machine.sizes, machine.sizes.tokens, machine.adapter_of(operation))
    return (made,)


def _row(machine: TileLedger, operation: Operation) -> Made:
    return (row_forward(machine.ledger, machine.sizes, machine.adapter_of(operation)),)


def _expert_column(machine: TileLedger, operation: Operation) -> Made:
    ledger, sizes = machine.ledger, machine.sizes
    again = "routing" in machine.reads
    machine.wait()
    if not again:
        experts.route(ledger, sizes)
    machine.sort_rows()
    made = experts.first_forward(ledger, sizes, "fc1" in machine.placed, machine.adapter_of(operation))
    return (made,) if again else (made, None)


def _expert_row(machine: TileLedger, operation: Operation) -> Made:
    return (experts.second_forward(machine.ledger, machine.sizes, machine.adapter_of(operation)),)


def _rotated_heads(machine: TileLedger, operation: Operation) -> Made:
    if machine.sizes.rope:
        rope_in_place(machine.ledger, machine.sizes)
    return (None,)


def _half(machine: TileLedger, operation: op.Opaque) -> Made:
    assert machine.sizes.halves is not None
    half_forward(machine.ledger, machine.sizes, machine.sizes.halves[operation.is_second])
    return tuple(None for _ in operation.makes)


def _column_backward(machine: TileLedger, operation: Operation) -> Made:
    ledger, sizes = machine.ledger, machine.sizes
    whole = ledger.make("column gradient", machine.whole_bytes)
    multiply(ledger, sizes, sizes.tokens * sizes.hidden)
    adapter = machine.adapter_of(operation)
    narrow = adapter_backward(ledger, sizes, sizes.tokens, adapter)
    grad_x, copy = reduce_scatter(ledger, sizes.tp, "column gradient", whole)
    if sizes.tp > 1:
        ledger.free(whole)  # gloo works on a copy of it
    machine.wait()
    machine.add_weight_gradient(operation)
    adapter_gradients(ledger, sizes, sizes.tokens, adapter, narrow)
    ledger.mark_reduction_start()  # unless a norm stands before it
    ledger.free_late(copy)
    return (grad_x,)


def _row_backward(machine: TileLedger, operation: Operation) -> Made:
    ledger, sizes, adapter = machine.ledger, machine.sizes, machine.adapter_of(operation)
    rows, of_rows, num_experts = sizes.tokens, None, machine.experts_of(operation)
    machine.wait()
    if num_experts:
        machine.sort_rows()
        rows, of_rows = rows * sizes.top_k, experts.of_tokens(ledger, sizes)
    machine.add_weight_gradient(operation)
    elements = rows * machine.matrices[operation.module][1]
    grad_x = ledger.make("row gradient", elements * sizes.narrow)
    multiply(ledger, sizes, elements, num_experts)
    narrow = adapter_backward(ledger, sizes, rows, adapter)
    adapter_gradients(ledger, sizes, rows, adapter, narrow)
    ledger.free(of_rows)
    return (grad_x, *(None for _ in operation.reads[1:]))


def _expert_column_backward(machine: TileLedger, operation: Operation) -> Made:
    machine.wait()
    matrix, adapter = machine.gradient_elements(operation), machine.adapter_of(operation)
    return experts.first_backward(machine.ledger, machine.sizes, matrix, adapter, len(operation.reads))


def _norm_backward(machine: TileLedger, operation: Operation) -> Made:
    normed: Normed = machine.graphs.pop(operation.makes[0])
    return (norm_backward(machine.ledger, machine.sizes, normed),)


def _weighted_activation_backward(machine: TileLedger, operation: Operation) -> Made:
    saved = machine.graphs.pop(operation.makes[0])
    return (None, weighted_activation_backward(machine.ledger, machine.of_mlp(operation), saved))


def _activate_backward(machine: TileLedger, operation: Operation) -> Made:
    kept = machine.graphs.pop(operation.makes[0])
    return (activation_backward(machine.ledger, machine.of_mlp(operation), kept),)


def _heads_backward(machine: TileLedger, operation: Operation) -> Made:
    ledger, sizes = machine.ledger, machine.sizes
    if sizes.rope:
        rope_in_place(ledger, sizes)
    heads = heads_forward(ledger, sizes, graph=True)
    made = heads_backward(ledger, sizes, heads)
    ledger.free(*heads.blocks)
    return (made,)


_REPLAYED: dict[type[Any], Callable[[TileLedger, Any, bool], tuple[Block, Any]]] = {
    op.Norm: _norm,
    op.LatentNorm: lambda on, _, graph: latent_norm_forward(on.ledger, on.sizes, graph),
    op.Trim: lambda on, _, graph: (trim_forward(on.ledger, on.sizes), None),
    op.Activate: _activate,
    op.Gate: lambda on, _, graph: gate_forward(on.ledger, on.sizes, graph),
}
"""(ledger, operation, whether under a graph) -> (output, tensors that the graph keeps beside input and output)."""
_FORWARD: dict[type[Any], Callable[[TileLedger, Any], Made]] = {
    op.Expand: lambda on, _: (expand_forward(on.ledger, on.sizes, placed="qkv" in on.placed),),
    op.Add: _add,
    op.Scale: _add,
    op.Column: _column,
    op.Row: _row,
    op.ExpertColumn: _expert_column,
    op.ExpertRow: _expert_row,
    op.Heads: _rotated_heads,
    op.Opaque: _half,
}
_BACKWARD: dict[type[Any], Callable[[TileLedger, Any], Made]] = {
    op.Norm: _norm_backward,
    op.LatentNorm: lambda on, of: (latent_norm_backward(on.ledger, on.sizes, on.graphs.pop(of.makes[0])),),
    op.Expand: lambda on, _: expand_backward(on.ledger, on.sizes),
    op.Trim: lambda on, _: (on.ledger.make("output gradient", on.sizes.tokens * on.sizes.q * on.sizes.narrow),),
    op.Scale: lambda on, _: (on.ledger.make("scaled gradient", on.whole_bytes // on.sizes.tp),),
    op.Column: _column_backward,
    op.Row: _row_backward,
    op.Activate: _activate_backward,
    op.ActivateScored: _weighted_activation_backward,
    op.ExpertColumn: _expert_column_backward,
    op.ActivateExperts: _weighted_activation_backward,
    op.Gate: lambda on, of: gate_backward(on.ledger, on.sizes, on.graphs.pop(of.makes[0])),
    op.Heads: _heads_backward,
    op.Opaque: lambda on, of: half_on_tile_backward(on.ledger, on.sizes, of.is_second),
}
