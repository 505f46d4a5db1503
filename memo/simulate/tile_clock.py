"""Times the operations of a layer on one tile of tokens (memo.executor.tile_machine runs them).

memo.program.walk says which operations run in which order, and when a message over tp is sent. Messages run one after
another beside the operations; a rank stands still only while it waits for a message. The backward of a column-parallel
matrix sends the gradient of its input before the product of the weight gradient, so that the message overlaps with this
product.

Elementwise work counts each value once where it is read and once where it is written. memo.simulate.composed adds the
passes of torch's kernels that are not fused.

The matrices of a custom layer (memo.spec.custom_layer) count one by one, each with a message that overlaps with
nothing. The rest of the layer counts by the bytes that its halves make, assumed to be written once and read once. Known
error: not compared with a measurement. Memo's own layer written as a custom one takes from 3 % less to 4 % longer in
the simulator, and up to 10 % longer under a swap plan (tests/simulate/test_simulate_custom_layer.py).
"""

from collections.abc import Callable, Collection
from typing import Any

from memo.program import operations as op
from memo.program.operations import Operation, entry_for
from memo.program.walk import Machine, Step
from memo.simulate.composed import (
    FUSED_NORM,
    NONE,
    ROTATION,
    SUM_BEFORE_NORM,
    Passes,
    activation_passes,
    is_composed,
    norm_passes,
    passes_s,
)
from memo.simulate.cost import Cost
from memo.simulate.half import matrices_of_half, rest_of_half_s
from memo.simulate.layer_shape import LayerShape


class TileClock(Machine):
    """Adds up the seconds of steps.

    Attributes:
        live: by name of a gathered value, when all of it has arrived.
        kept: values of this tile that the slot holds between forward and backward.
    """

    def __init__(self, shape: LayerShape, kept: Collection[str] = ()) -> None:
        super().__init__({})
        self.shape, self.kept = shape, kept
        self.matmul_s = self.elementwise_s = self.waiting_s = 0.0
        self._gather_s = shape.kernels.gather_s(
            shape.tile_tokens * shape.config.model.hidden_size * shape.kernels.narrow, shape.tp
        )
        self._sent_s = 0.0  # when the last message is over
        self.is_composed = is_composed(shape.config)
        self.of_norm = norm_passes(shape.config, shape.kernels)
        of_fused = zip(self.of_norm, FUSED_NORM, strict=True)
        self._more: dict[type[Any], Passes] = {
            Operation: NONE,
            op.Norm: Passes(*(passes - fused for passes, fused in of_fused)),
            op.Activate: activation_passes(shape.config),
        }

    @property
    def cost(self) -> Cost:
        return Cost(matmul=self.matmul_s, elementwise=self.elementwise_s, tensor=self.waiting_s)

    def free(self, names: tuple[str, ...]) -> None:
        for name in names:
            self.live.pop(name, None)

    def send(self) -> float:
        """Gather or scatter the hidden states of the tile over tp; returns the end of the message."""
        now_s = self.matmul_s + self.elementwise_s + self.waiting_s
        self._sent_s = max(self._sent_s, now_s) + self._gather_s
        return self._sent_s

    def arrival_s(self, name: str) -> float:
        """Return when a value is gathered. Under autograd this call sends the message of the value."""
        sent_s = self.live.get(name)
        return self.send() if sent_s is None else sent_s

    def wait(self, until_s: float) -> None:
        self.waiting_s += max(0.0, until_s - self.matmul_s - self.elementwise_s - self.waiting_s)

    def move(self, *names: str) -> None:
        """Count one kernel that reads or writes these values."""
        self.elementwise_s += self.shape.kernels.memory_s(self.shape.value_bytes(*names))

    def compose(self, operation: Operation, backward: bool = False, of_sum: int = 0) -> None:
        """Count the passes over an operation's output by which torch's kernels exceed a fused one."""
        passes = entry_for(operation, self._more)[backward] + of_sum
        self.elementwise_s += passes_s(self.shape.kernels, passes, self.shape.value_bytes(operation.makes[0]))

    def multiply(self, module: str) -> None:
        """Count the product of all rows, or of their gradients, with a matrix and with the adapter beside it.

        The output of the adapter is added in place, but of experts after the product."""
        shape, kernels = self.shape, self.shape.kernels
        rows, experts = shape.rows(module), shape.experts(module)
        of_one = rows / max(1, experts)  # experts have equal rows
        self.matmul_s += shape.of_all_s(module, kernels.matmul_s(of_one, *shape.matrix(module)))
        for part in shape.adapter(module):
            product_s, width = kernels.matmul_s(of_one, *shape.matrix(part)), max(shape.matrix(part))
            if experts:
                self.matmul_s += shape.of_all_s(module, product_s)
                self.elementwise_s += kernels.memory_s(3 * rows * width * kernels.narrow)
            else:
                self.matmul_s += max(product_s, kernels.memory_s(2 * rows * width * kernels.narrow))

    def multiply_gradients(self, module: str) -> None:
        """Count the gradient of a matrix, or of one matrix for each expert, added to its main gradient.

        A frozen matrix has none. An adapter beside it has gradients too: the input of its second matrix, of LoRA's
        rank, is made again for them. Gradients of experts are dense products, one after another (memo.executor.pieces);
        other frameworks are assumed to group them."""
        shape, kernels = self.shape, self.shape.kernels
        experts, adapter = max(1, shape.experts(module)), shape.adapter(module)
        rows = shape.rows(module) / experts
        for part in adapter:
            self.multiply_gradients(part)
        for part in adapter[:1]:
            self.matmul_s += shape.of_all_s(module, kernels.matmul_s(rows, *shape.matrix(part)))
        if shape.is_frozen(module):
            return
        outputs, inputs = shape.matrix(module)
        if shape.adds_in_products:
            product_s = kernels.adding_matmul_s(outputs, inputs, rows)
        else:
            product_s = kernels.matmul_s(outputs, inputs, rows)
            self.elementwise_s += experts * kernels.sum_s(outputs, inputs)
        self.matmul_s += shape.of_all_s(module, product_s) if shape.under_autograd else experts * product_s

    def move_rows(self, module: str) -> None:
        """Count the copy of tokens' hidden states to the rows of a module's experts, or back, if it has experts."""
        if self.shape.experts(module):
            num_bytes = (self.shape.tile_tokens + 2 * self.shape.rows(module)) * self.shape.config.model.hidden_size
            self.elementwise_s += self.shape.kernels.memory_s(num_bytes * self.shape.kernels.narrow)

    def pass_heads(self, passes: float, width: float) -> None:
        """Count passes over so many channels of the tile's heads."""
        num_bytes = passes * self.shape.tile_tokens * width * self.shape.kernels.narrow
        self.elementwise_s += self.shape.kernels.memory_s(num_bytes, passes)

    def rotate(self) -> None:
        """Count the rotation of queries and keys, if the model has RoPE."""
        model = self.shape.config.model
        if model.position_embedding_type == "rope":
            passes = 2 + ROTATION * self.is_composed
            self.pass_heads(passes, (self.shape.q + self.shape.kv) * model.rotary_dim / model.head_dim)

    def norm_heads(self) -> None:
        """Count the norms of queries and keys, and of values if the model has them.

        Where tp splits their width, ranks add up squares first, and no kernel is fused (memo.parallel.split_norm)."""
        passes = 5 if self.shape.splits_norms else self.of_norm.forward
        self.pass_heads(passes, self.shape.normed_heads)
        self.add_up_squares()

    def add_up_squares(self) -> None:
        """Count an all-reduce over tp of one number a token for q and one for k; it overlaps with nothing."""
        if self.shape.splits_norms:
            num_bytes = 2 * self.shape.tile_tokens * self.shape.kernels.wide
            self.waiting_s += self.shape.kernels.all_reduce_s(num_bytes, self.shape.tp)

    # Kinds of steps.

    def gather(self, step: Step) -> None:
        if not self.shape.under_autograd:
            self.live[step.makes[0]] = self.send()

    def keep(self, step: Step) -> None:
        """Count a copy to the slot."""
        self.move(*step.reads, *step.reads)

    def forward(self, step: Step, operation: Operation) -> None:
        run = _moves if operation.replays else entry_for(operation, _FORWARD)
        run(self, step, operation)

    def replay(self, step: Step, operation: Operation) -> None:
        if not self.shape.under_autograd:
            self.move(*operation.reads, *operation.makes)
            self.compose(operation)

    def backward(self, step: Step, operation: Operation) -> None:
        run = _replayed_backward if operation.replays else entry_for(operation, _BACKWARD)
        run(self, step, operation)
        if step.adds_to:
            self.move(*operation.reads[:1] * 3)


def _moves(clock: TileClock, step: Step, operation: Operation) -> None:
    """Count a memory-bound kernel. A sum and its norm are one kernel in memo, and two in other frameworks."""
    if step.total is not None and clock.shape.under_autograd:
        clock.move(*step.reads, *step.total.makes)
        clock.move(*step.total.makes, *step.makes[1:])
    else:
        clock.move(*step.reads, *step.makes)
        clock.compose(operation, of_sum=SUM_BEFORE_NORM * (clock.is_composed and step.total is not None))


def _column(clock: TileClock, step: Step, operation: Operation) -> None:
    for name in step.reads[: len(operation.reads)]:
        clock.wait(clock.arrival_s(name))
    if "routing" in step.makes:
        clock.multiply("mlp.router")
    clock.move_rows(operation.module)
    clock.multiply(operation.module)


def _row(clock: TileClock, step: Step, operation: Operation) -> None:
    clock.multiply(operation.module)
    clock.move_rows(operation.module)
    clock.wait(clock.send())


def _expand(clock: TileClock, step: Step, operation: Operation) -> None:
    """Count the products of latents, and the copy of their results side by side."""
    for module in _expanded(operation):
        clock.multiply(module)
    clock.move("qkv", "qkv")


def _expand_backward(clock: TileClock, step: Step, operation: Operation) -> None:
    _expand(clock, step, operation)
    for module in _expanded(operation):
        clock.multiply_gradients(module)
    clock.move("latent_norm", "latent_norm")


def _expanded(operation: Operation) -> tuple[str, ...]:
    """The matrices that expand latents; queries without a latent are read."""
    return ("attention.kv",) if len(operation.reads) > 1 else ("attention.q", "attention.kv")


def _replayed_backward(clock: TileClock, step: Step, operation: Operation) -> None:
    clock.move(*operation.makes, *operation.reads, *operation.reads)
    clock.compose(operation, backward=True)


def _column_backward(clock: TileClock, step: Step, operation: Operation) -> None:
    arrival_s = None if operation.frozen else clock.arrival_s(step.reads[1])
    clock.multiply(operation.module)
    scattered_s = clock.send()
    if arrival_s is not None:
        clock.wait(arrival_s)
    clock.multiply_gradients(operation.module)
    clock.wait(scattered_s)


def _row_backward(clock: TileClock, step: Step, operation: Operation) -> None:
    clock.wait(clock.arrival_s(step.reads[1]))
    clock.move_rows(operation.module)
    clock.multiply_gradients(operation.module)
    clock.multiply(operation.module)


def _expert_column_backward(clock: TileClock, step: Step, operation: Operation) -> None:
    for name in step.reads[2:-1]:
        clock.wait(clock.arrival_s(name))
    for _ in range(2):  # scores again, and the gradient of the tokens
        clock.multiply("mlp.router")
    clock.multiply(operation.module)
    clock.move_rows(operation.module)
    scattered_s = max(clock.send() for _ in operation.reads)
    clock.multiply_gradients("mlp.router")
    clock.move_rows(operation.module)
    clock.multiply_gradients(operation.module)
    clock.wait(scattered_s)


def _heads_backward(clock: TileClock, step: Step, operation: op.Heads) -> None:
    """Count the rotation back and the copy into one value; norms of queries and keys run forward again and backward."""
    clock.rotate()
    if operation.normed:
        wide = clock.shape.kernels.wide // clock.shape.kernels.narrow
        # Where tp splits the norms, their terms are in the wide dtype.
        backward = 6 + 12 * wide if clock.shape.splits_norms else clock.of_norm.backward
        clock.pass_heads(backward, clock.shape.normed_heads)
        clock.add_up_squares()
        if not clock.shape.under_autograd:
            clock.norm_heads()
    if not clock.shape.under_autograd:
        clock.move(*operation.reads * 2)


def _half(clock: TileClock, step: Step, operation: op.Opaque) -> None:
    _half_again(clock, operation.is_second, ())


def _half_backward(clock: TileClock, step: Step, operation: op.Opaque) -> None:
    is_second = operation.is_second
    if not clock.shape.under_autograd:
        _half_again(clock, is_second, clock.kept if is_second else ())
    for module, weight in matrices_of_half(clock.shape, is_second).items():
        for _ in range(2 if weight.split == "rows" else 1):
            clock.wait(clock.send())
        clock.multiply(module)
        clock.multiply_gradients(module)
    clock.elementwise_s += 2 * rest_of_half_s(clock.shape, is_second)


def _half_again(clock: TileClock, is_second: bool, kept: Collection[str]) -> None:
    """Count the forward of half of a custom layer, without the matrices whose output was kept."""
    for module in matrices_of_half(clock.shape, is_second):
        if module not in kept:
            clock.multiply(module)
            clock.wait(clock.send())
    clock.elementwise_s += rest_of_half_s(clock.shape, is_second)


_FORWARD: dict[type[Any], Callable[[TileClock, Step, Any], None]] = {
    op.Add: _moves,
    op.Scale: _moves,
    op.Expand: _expand,
    op.Column: _column,
    op.Row: _row,
    op.Heads: lambda clock, step, operation: clock.rotate(),
    op.Opaque: _half,
}
_BACKWARD: dict[type[Any], Callable[[TileClock, Step, Any], None]] = {
    op.Scale: lambda clock, step, operation: clock.move(*operation.reads, *operation.makes),
    op.Expand: _expand_backward,
    op.ExpertColumn: _expert_column_backward,
    op.Column: _column_backward,
    op.Row: _row_backward,
    op.Heads: _heads_backward,
    op.Opaque: _half_backward,
}
