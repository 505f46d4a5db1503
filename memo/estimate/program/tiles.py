"""One layer as the executor runs it, forward and backward, tensor by tensor, without slots and keys.

There are three executors: of layers without a swap plan (memo.executor.resident), of layers whose slot holds the whole
layer (memo.executor.layer), and of layers swept along the sequence (memo.executor.sweep). Tiles are alike, so one tile
is walked through. In a sweep it is the last tile, which has most keys before it. A swept layer takes no more than this
tile, because hidden states and their gradients are overwritten in place.
"""

from collections.abc import Callable, Iterable
from functools import lru_cache, wraps
from typing import NamedTuple

from memo.config import RunConfig
from memo.config.derived import layer_tiles, resolved_sections, stays_under_autograd
from memo.estimate.program.attention import (
    attention_backward,
    attention_forward,
    gather_rows,
    rows_backward,
    rows_forward_placed,
)
from memo.estimate.program.embedding_and_loss import rope_table, rope_table_bytes
from memo.estimate.program.ledger import Block, Ledger, Pass
from memo.estimate.program.matrices import hidden_bytes
from memo.estimate.program.sizes import LayerSizes
from memo.estimate.program.tile_machine import TileLedger
from memo.estimate.program.tokenwise import heads_forward, rope_in_place
from memo.program.kinds import Kind
from memo.program.walk import Step
from memo.spec.skeleton import moves_in_part, skeletal_tensors
from memo.spec.slots import NEEDS_FULL_ROOM, Moved, resident

Kept = frozenset[str]
"""Values whose slot holds all tiles. Other values are rebuilt in some tile, whose backward needs most memory."""
_Blocks = dict[str, Block]
_NONE: Kept = frozenset()
_Work = Callable[[Ledger, LayerSizes, Kind, Kept], list[Block]]
"""A piece of a pass that frees no tensor of its caller. It returns the tensors that its caller frees; tensors that stay
until the end of the pass are not returned."""


def _shared(work: _Work) -> _Work:
    """Record a piece once on GPUs, because many passes share it; there no thread frees tensors late."""

    @lru_cache(maxsize=4096)
    def recorded(sizes: LayerSizes, kind: Kind, kept: Kept) -> tuple[Pass, dict[str, int], list[tuple[str, int]]]:
        ledger = Ledger(never=sizes.never)
        start = ledger.now
        left = work(ledger, sizes, kind, kept)
        piece, named_bytes = Pass(start, ledger.peak), [(block.name, block.num_bytes) for block in left]
        ledger.free(*left)
        return piece, ledger.now.alive, named_bytes

    @wraps(work)
    def play(ledger: Ledger, sizes: LayerSizes, kind: Kind, kept: Kept) -> list[Block]:
        if not sizes.on_cuda:
            return work(ledger, sizes, kind, kept)
        piece, stays, left = recorded(sizes, kind, kept)
        ledger.reach(piece.transient_bytes, lambda: piece.transient)
        for name, num_bytes in stays.items():
            ledger.make(name, num_bytes)
        return [ledger.make(name, num_bytes) for name, num_bytes in left]

    return play


class Residents(NamedTuple):
    """Tensors that a layer without a swap plan fills beside its input (memo.spec.slots.Resident), in bytes."""

    num_bytes: tuple[tuple[str, int], ...]
    kept: Kept
    dropped: frozenset[str]


def kept_by_layer(config: RunConfig, moved: Moved | None, tiles: int | None = None) -> Kept | Residents | None:
    """Return the values whose slot holds all tiles when `moved` moves; without a swap plan, the tensors on the device;
    None under autograd. The layers of `config` are all of one kind; `tiles` as in `layer_sizes`."""
    if moved is None:
        if stays_under_autograd(config):
            return None
        of = resident(config, config.model)
        named_bytes = tuple((name, place.num_bytes) for name, place in of.made.items())
        return Residents(named_bytes, frozenset(of.layout.places), of.dropped)

    policy, in_slot = config.memory.offload_policy, (tiles or layer_tiles(config)) // resolved_sections(config)

    def moves_whole(group: str) -> bool:
        return moved >= 1 if isinstance(moved, int | float) else moved.get(group, 0) == in_slot

    partly = (tensor for tensor in skeletal_tensors(config.model) if moves_in_part(tensor, policy))
    return frozenset(tensor.name for tensor in partly if moves_whole(tensor.group))


def resident_forward(ledger: Ledger, sizes: LayerSizes, kind: Kind, of: Residents, x: Block) -> tuple[Block, _Blocks]:
    """Return (output, tensors that stay with the input)."""
    filled = {name: ledger.make(name, num_bytes) for name, num_bytes in of.num_bytes}
    _before(ledger, _tile(sizes), kind, of.kept)
    _attend(ledger, _whole(sizes), kind, _NONE)
    y = ledger.make("layer output", x.num_bytes)
    _after(ledger, _tile(sizes), kind, of.kept)
    ledger.free(*(filled.pop(name) for name in of.dropped))
    return y, filled


def resident_backward(
    ledger: Ledger, sizes: LayerSizes, kind: Kind, of: Residents, x: Block, filled: _Blocks, grad: Block
) -> None:
    """Run the backward and free `x`, `filled` and `grad`."""
    filled = filled | {name: ledger.make(name, num_bytes) for name, num_bytes in of.num_bytes if name in of.dropped}
    if NEEDS_FULL_ROOM in of.dropped:
        _before_again(ledger, _tile(sizes), kind, of.kept)
    if "attention_out" in of.dropped:
        _attend(ledger, _whole(sizes), kind, _NONE)
    grad_residual, grad_out = _after_gradients(ledger, sizes, kind, of.kept, grad)
    ledger.free(*(filled.pop(name, None) for operation in kind.after for name in operation.makes))
    grads = _attention_gradients(ledger, _whole(sizes), kind, _NONE)
    ledger.free(*grad_out)
    ledger.free(filled.pop("attention_out"), filled.pop("lse", None))
    _before_gradients(ledger, sizes, kind, of.kept, (grad_residual, *grads, grad))
    ledger.free(*filled.values(), x)


def tiled_forward(ledger: Ledger, sizes: LayerSizes, kind: Kind, kept: Kept, x: Block) -> Block:
    """Return the output of the layer; x is freed."""
    _before(ledger, _tile(sizes), kind, kept)
    _attend(ledger, _whole(sizes), kind, _NONE)
    y = ledger.make("layer output", hidden_bytes(sizes, sizes.tokens) // sizes.tp)
    _after(ledger, _tile(sizes), kind, kept)
    ledger.free(x)
    return y


def tiled_backward(ledger: Ledger, sizes: LayerSizes, kind: Kind, kept: Kept, grad: Block) -> None:
    """Run the backward and free `grad`."""
    if NEEDS_FULL_ROOM not in kept:
        _before_again(ledger, _tile(sizes), kind, kept)
    grad_residual, grad_out = _after_gradients(ledger, sizes, kind, kept, grad)
    grads = _attention_gradients(ledger, _whole(sizes), kind, _NONE)
    ledger.free(*grad_out)
    _before_gradients(ledger, sizes, kind, kept, (grad_residual, *grads, grad))


def _after_gradients(
    ledger: Ledger, sizes: LayerSizes, kind: Kind, kept: Kept, grad: Block
) -> tuple[Block, list[Block]]:
    """Return the residual's gradient and the gradient of attention's output, which gathers the tiles."""
    grad_residual = ledger.make("residual gradient", grad.num_bytes)
    if sizes.tiles == 1:
        return grad_residual, _after_backward(ledger, _tile(sizes), kind, kept)
    grad_out = ledger.make("output gradient", sizes.tokens * sizes.q * sizes.narrow)
    ledger.free(*_after_backward(ledger, _tile(sizes), kind, kept))
    return grad_residual, [grad_out]


def _before_gradients(ledger: Ledger, sizes: LayerSizes, kind: Kind, kept: Kept, ends: tuple[Block, ...]) -> None:
    """Compute the gradient of the input while `ends` live, then free `ends`."""
    ledger.make("input gradient", ends[0].num_bytes)
    _before_backward(ledger, _tile(sizes), kind, kept)
    ledger.free(*ends)


def swept_forward(ledger: Ledger, sizes: LayerSizes, kind: Kind, kept: Kept) -> None:
    tile, before = _last_tile(sizes)
    table = _positions(ledger, sizes)
    _before(ledger, _tile(sizes), kind, kept)
    heads = _attention_inputs(ledger, tile)
    lse = rows_forward_placed(ledger, tile, before)
    ledger.free(lse, *heads)
    _after(ledger, _tile(sizes), kind, kept)
    ledger.free(table)


def swept_backward(ledger: Ledger, sizes: LayerSizes, kind: Kind, kept: Kept) -> None:
    tile, before = _last_tile(sizes)
    table = _positions(ledger, sizes)
    gather_rows(ledger, tile)
    if NEEDS_FULL_ROOM not in kept:
        _before_again(ledger, _tile(sizes), kind, kept)
    grad_out = _after_backward(ledger, _tile(sizes), kind, kept)
    heads = _attention_inputs(ledger, tile)
    ledger.free(*heads[1:])  # keys are in the store already
    grads = rows_backward(ledger, tile, before)
    ledger.free(*heads[:1])
    _before_backward(ledger, _tile(sizes), kind, kept)
    ledger.free(*grads, *grad_out, table)


def _last_tile(sizes: LayerSizes) -> tuple[LayerSizes, int]:
    """Return this rank's sizes of the last tile, and the number of tokens before it on all context-parallel ranks."""
    tokens = sizes.tokens // sizes.tiles
    return sizes._replace(tokens=tokens), (sizes.tokens - tokens) * sizes.ring * sizes.a2a


def _positions(ledger: Ledger, sizes: LayerSizes) -> Block | None:
    """Return RoPE's table of a section; it is computed while the table of the previous section still lives."""
    if not sizes.rope:
        return None
    section = sizes._replace(tokens=sizes.tokens // sizes.sections)
    last = ledger.make("rope table", rope_table_bytes(section)) if sizes.sections > 1 else None
    table = rope_table(ledger, section)
    ledger.free(last)
    return table


@_shared
def _attend(ledger: Ledger, sizes: LayerSizes, kind: Kind, kept: Kept) -> list[Block]:
    """Run attention; its output and log-sum-exp are written into tensors that exist already."""
    heads = _attention_inputs(ledger, sizes)
    _, lse = attention_forward(ledger, sizes, placed=True)
    ledger.free(lse, *heads)
    return []


@_shared
def _attention_gradients(ledger: Ledger, sizes: LayerSizes, kind: Kind, kept: Kept) -> list[Block]:
    heads = _attention_inputs(ledger, sizes)
    grads = attention_backward(ledger, sizes)
    ledger.free(*heads)
    return grads


@lru_cache(maxsize=4096)
def _tile(sizes: LayerSizes) -> LayerSizes:
    """Return the sizes of a tile, for token-wise work, which does not depend on attention."""
    return _whole(sizes)._replace(tokens=sizes.tokens // sizes.tiles, ring=1, ring_rank=0, a2a=1, gathers_kv=False)


@lru_cache(maxsize=4096)
def _whole(sizes: LayerSizes) -> LayerSizes:
    """Return the sizes for attention, which takes all tiles at once."""
    return sizes._replace(tiles=1, sections=0)


def _of_tile(steps: Callable[[Kind, Kept], Iterable[Step]], placed: str) -> _Work:
    """Take these steps of a tile, whose slot has memory for the values that it keeps and for `placed`."""

    def work(ledger: Ledger, sizes: LayerSizes, kind: Kind, kept: Kept) -> list[Block]:
        TileLedger(ledger, sizes, {placed, *kept}).run(steps(kind, kept))
        return []

    return _shared(work)


_before = _of_tile(Kind.qkv, NEEDS_FULL_ROOM)
_before_again = _of_tile(Kind.qkv_again, NEEDS_FULL_ROOM)
_after = _of_tile(Kind.output, "layer_output")


@_shared
def _after_backward(ledger: Ledger, sizes: LayerSizes, kind: Kind, kept: Kept) -> list[Block]:
    """Return the gradient of attention's output."""
    walk, machine = kind.after_backward(kept), TileLedger(ledger, sizes)
    machine.run(walk)
    made = machine.live[walk.gradients["attention_out"]]
    return [] if made is None else [made]


@_shared
def _before_backward(ledger: Ledger, sizes: LayerSizes, kind: Kind, kept: Kept) -> list[Block]:
    TileLedger(ledger, sizes).run(kind.before_backward(kept))
    return []


def _attention_inputs(ledger: Ledger, sizes: LayerSizes) -> tuple[Block, ...]:
    """Return q and k of all tokens if they have norms; otherwise the slot holds q and k, and nothing is made."""
    heads = heads_forward(ledger, sizes, graph=False)
    if sizes.rope and sizes.qk_norm:
        rope_in_place(ledger, sizes)
    return heads.blocks
