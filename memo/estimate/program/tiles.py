"""One layer under a swap plan (memo.executor.layer), forward and backward, tensor by tensor, without its slot."""

from dataclasses import dataclass

from memo.estimate.program.attention import attention_backward, attention_forward
from memo.estimate.program.halves import half_again, half_forward
from memo.estimate.program.layer import matrices, normed_heads_backward, normed_heads_forward
from memo.estimate.program.ledger import Block, Ledger
from memo.estimate.program.matrices import Matrix, hidden_bytes, multiply, row_forward, weight_gradient
from memo.estimate.program.messages import all_gather, reduce_scatter
from memo.estimate.program.products import Product
from memo.estimate.program.sizes import LayerSizes
from memo.estimate.program.tokenwise import (
    activation_backward,
    activation_forward,
    norm_backward,
    norm_forward,
    rope_in_place,
)
from memo.spec.slots import Moved


@dataclass(frozen=True)
class KeptGroups:
    """Which groups of activations a slot holds for all of its tiles.

    Of the other groups, at least one tile is recomputed, and the backward of that tile needs most memory.
    """

    qkv: bool
    residual: bool
    fc1: bool


def kept_groups(moved: Moved, tiles: int) -> KeptGroups:
    """The groups of which `moved` moves all `tiles` tiles of a slot."""

    def moves_whole(group: str) -> bool:
        if isinstance(moved, int | float):
            return moved >= 1
        return moved.get(group, 0) == tiles

    return KeptGroups(qkv=moves_whole("qkv"), residual=moves_whole("residual"), fc1=moves_whole("fc1"))


def tiled_forward(ledger: Ledger, z: LayerSizes, groups: KeptGroups, x: Block) -> Block:
    """Output of the layer; x is freed."""
    tile = z.tokens // z.tiles
    hidden = hidden_bytes(z, z.tokens) // z.tp
    compute_qkv(ledger, z, tile)
    q, k = attention_inputs(ledger, z, z.tokens)
    _, lse = attention_forward(ledger, z, placed=True)
    ledger.free(lse, q, k)
    y = ledger.make("layer output", hidden)
    mlp_forward(ledger, z, groups, tile)
    ledger.free(x)
    return y


def tiled_backward(ledger: Ledger, z: LayerSizes, groups: KeptGroups, grad: Block) -> Block:
    """Gradient of the input; `grad` is freed."""
    tile = z.tokens // z.tiles
    hidden, q_bytes = grad.num_bytes, z.tokens * z.q * z.narrow
    if not groups.qkv:
        compute_qkv(ledger, z, tile)
    grad_residual = ledger.make("residual gradient", hidden)
    grad_out = ledger.make("output gradient", q_bytes)
    ledger.free(mlp_backward(ledger, z, groups, tile))
    q, k = attention_inputs(ledger, z, z.tokens)
    grads = attention_backward(ledger, z)
    ledger.free(grad_out, q, k)
    grad_x = ledger.make("input gradient", hidden)
    qkv_backward(ledger, z, tile)
    ledger.free(grad_residual, *grads, grad)
    return grad_x


def compute_qkv(ledger: Ledger, z: LayerSizes, tile: int) -> None:
    if z.halves is not None:
        half_forward(ledger, z, z.halves[0], tile)
        if z.rope:
            rope_in_place(ledger, z, tile)
        return
    normed = norm_forward(ledger, z, "attention_norm", tile // z.tp, z.hidden, graph=False).out
    gathered = all_gather(ledger, z.tp, "gathered", hidden_bytes(z, tile))
    multiply(ledger, z, matrices(z)[0].column(z).forward(tile))  # qkv itself is written into the slot
    ledger.free(gathered)
    if z.rope and not z.qk_norm:
        rope_in_place(ledger, z, tile)
    ledger.free(normed)


def attention_inputs(ledger: Ledger, z: LayerSizes, tokens: int) -> tuple[Block | None, Block | None]:
    """q and k of these tokens if they are normed; else the slot holds them."""
    heads = normed_heads_forward(ledger, z, tokens, graph=False)
    if z.rope and z.qk_norm:
        rope_in_place(ledger, z, tokens)
    return heads.q, heads.k


def mlp_forward(ledger: Ledger, z: LayerSizes, groups: KeptGroups, tile: int) -> None:
    """From attention's output to that of the layer, which takes no memory of its own here, for one tile."""
    if z.halves is not None:
        half_forward(ledger, z, z.halves[1], tile)
        return
    _, projection, fc1, fc2 = matrices(z)
    projected = row_forward(ledger, z, projection, tile)
    residual = ledger.make("residual", projected.num_bytes)
    normed = norm_forward(ledger, z, "mlp_norm", tile // z.tp, z.hidden, graph=False).out
    ledger.free(projected)
    gathered = all_gather(ledger, z.tp, "gathered", hidden_bytes(z, tile))
    inner = _fc1(ledger, z, groups, fc1, tile)
    ledger.free(gathered)
    active, _ = activation_forward(ledger, z, tile, graph=False)
    ledger.free(normed, inner)
    added = row_forward(ledger, z, fc2, tile)
    ledger.free(active, residual, added)


def _residual(ledger: Ledger, z: LayerSizes, projection: Matrix, tile: int) -> Block:
    projected = row_forward(ledger, z, projection, tile)
    residual = ledger.make("residual", projected.num_bytes)
    ledger.free(projected)
    return residual


def _fc1(ledger: Ledger, z: LayerSizes, groups: KeptGroups, fc1: Matrix, tile: int) -> Block | None:
    """Output of fc1: a tensor of its own, or None if the slot holds it."""
    inner = None if groups.fc1 else ledger.make("fc1", tile * fc1.inside * z.narrow)
    multiply(ledger, z, fc1.column(z).forward(tile))
    return inner


def mlp_backward(ledger: Ledger, z: LayerSizes, groups: KeptGroups, tile: int) -> Block:
    """Backward of the MLP and the projection for one tile: the gradient of attention's output.

    As in the code, local variables live until its end.
    """
    if z.halves is not None:
        half_again(ledger, z, z.halves[1], tile)
        return ledger.make("row gradient", tile * z.q * z.narrow)
    _, projection, fc1, fc2 = matrices(z)
    rows = tile // z.tp
    whole = hidden_bytes(z, tile)
    gradients = all_gather(ledger, z.tp, "gathered gradient", whole) if groups.fc1 else None
    residual = None if groups.residual else _residual(ledger, z, projection, tile)
    norm = norm_forward(ledger, z, "mlp_norm", rows, z.hidden, graph=True)
    inputs = all_gather(ledger, z.tp, "gathered", whole)
    inner = None
    if not groups.fc1:
        gradients = all_gather(ledger, z.tp, "gathered gradient", whole)
        inner = _fc1(ledger, z, groups, fc1, tile)
    active, silu = activation_forward(ledger, z, tile, graph=True)
    grad_active = _row_backward(ledger, z, fc2, tile, gradients)
    grad_inner = activation_backward(ledger, z, tile, silu, None, None)
    grad_normed = _column_backward(ledger, z, fc1, tile)
    grad_x = norm_backward(ledger, z, norm, None, None, adds=False)
    ledger.free(grad_x)
    gradients = all_gather(ledger, z.tp, "gathered gradient", whole)
    grad_out = _row_backward(ledger, z, projection, tile, gradients)
    ledger.free(residual, norm.out, inputs, inner, active, grad_active, grad_inner, grad_normed)
    return grad_out


def qkv_backward(ledger: Ledger, z: LayerSizes, tile: int) -> None:
    if z.halves is not None:
        if z.rope:
            rope_in_place(ledger, z, tile)
        grad_qkv = ledger.make("qkv gradient", tile * z.qkv * z.narrow)
        half_again(ledger, z, z.halves[0], tile)
        ledger.free(grad_qkv)
        return
    norm = norm_forward(ledger, z, "attention_norm", tile // z.tp, z.hidden, graph=True)
    inputs = all_gather(ledger, z.tp, "gathered", hidden_bytes(z, tile))
    if z.rope:
        rope_in_place(ledger, z, tile)
    heads = normed_heads_forward(ledger, z, tile, graph=True)
    grad_qkv = normed_heads_backward(ledger, z, tile, heads)
    grad_normed = _column_backward(ledger, z, matrices(z)[0], tile)
    grad_x = norm_backward(ledger, z, norm, None, None, adds=False)
    ledger.free(heads.q, heads.k, grad_qkv, norm.out, inputs, grad_normed, grad_x)


def _row_backward(ledger: Ledger, z: LayerSizes, matrix: Matrix, tile: int, gathered: Block | None) -> Block:
    """Gradient of the input; frees `gathered`, the gradient of the output."""
    _weight_gradient(ledger, z, matrix.row(z).weight_gradient(tile))
    grad_x = ledger.make("row gradient", tile * matrix.inside * z.narrow)
    multiply(ledger, z, matrix.row(z).input_gradient(tile))
    ledger.free(gathered)
    return grad_x


def _column_backward(ledger: Ledger, z: LayerSizes, matrix: Matrix, tile: int) -> Block:
    grad_gathered = ledger.make("column gradient", hidden_bytes(z, tile))
    multiply(ledger, z, matrix.column(z).input_gradient(tile))
    grad_x, copy = reduce_scatter(ledger, z.tp, "column gradient", grad_gathered)
    if z.tp > 1:
        ledger.free(grad_gathered)  # gloo works on a copy of it
    _weight_gradient(ledger, z, matrix.column(z).weight_gradient(tile))
    ledger.free(copy)
    return grad_x


def _weight_gradient(ledger: Ledger, z: LayerSizes, product: Product) -> None:
    """The matrix product itself adds to the main gradient, but on CPUs where this is wider than the model."""
    (weight_gradient if z.mixed else multiply)(ledger, z, product)
