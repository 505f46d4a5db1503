"""Requests of a custom layer (memo.spec.custom_layer): the bytes at the peaks of its halves, not single tensors.

The facts about a custom layer are those of one rank: they lack the gathered input of a matrix, and the gathered
gradient of its output. One tensor of each kind is assumed to live at the peak. Known error: at most 5 % above the
measured peak of a step on a CPU, and at most 1.5 % below (tests/estimate/test_estimate_custom_layer.py).
"""

from dataclasses import dataclass

from memo.estimate.program.attention import attention_backward, attention_forward
from memo.estimate.program.ledger import Block, Ledger
from memo.estimate.program.matrices import hidden_bytes
from memo.estimate.program.messages import all_gather
from memo.estimate.program.sizes import LayerSizes
from memo.spec.custom_layer import Half


@dataclass
class CustomLayerKept:
    """Blocks that the forward keeps for the backward."""

    first: Block
    attended: tuple[Block | None, ...]
    second: Block


def half_forward(ledger: Ledger, sizes: LayerSizes, half: Half) -> None:
    """Request the peak of the forward of a half; nothing stays allocated."""
    gathered = all_gather(ledger, sizes.tp, "gathered", hidden_bytes(sizes, sizes.tokens))
    ledger.scratch(("half of the layer", half.forward.of(sizes.tokens, sizes.tp)))
    ledger.free(gathered)


def half_backward(ledger: Ledger, sizes: LayerSizes, half: Half) -> None:
    """Request the peak of the backward of a half, above the kept blocks."""
    gathered = [
        all_gather(ledger, sizes.tp, name, hidden_bytes(sizes, sizes.tokens))
        for name in ("gathered", "gathered gradient")
    ]
    ledger.scratch(("gradients in half of the layer", half.backward.of(sizes.tokens, sizes.tp)))
    ledger.free(*gathered)


def half_on_tile_backward(ledger: Ledger, sizes: LayerSizes, is_second: bool) -> tuple[Block, ...]:
    """Run a half forward again and backward on one tile, under a graph of its own.

    Returns the gradient of its input, and for the second half also that of attention's output."""
    assert sizes.halves is not None
    half, hidden = sizes.halves[is_second], hidden_bytes(sizes, sizes.tokens) // sizes.tp
    made = ledger.make("output of half of the layer", hidden if is_second else sizes.tokens * sizes.qkv * sizes.narrow)
    half_forward(ledger, sizes, half)
    kept = ledger.make("kept half of the layer", half.kept.of(sizes.tokens, sizes.tp))
    half_backward(ledger, sizes, half)
    ledger.free(kept, made)
    of_input = ledger.make("input gradient of half of the layer", hidden)
    return (of_input, ledger.make("row gradient", sizes.tokens * sizes.q * sizes.narrow)) if is_second else (of_input,)


def custom_layer_forward(ledger: Ledger, sizes: LayerSizes) -> tuple[Block, CustomLayerKept]:
    """Return (output, blocks that are kept besides the input)."""
    assert sizes.halves is not None
    first, second = sizes.halves
    half_forward(ledger, sizes, first)
    before = ledger.make("kept before attention", first.kept.of(sizes.tokens, sizes.tp))
    attended = attention_forward(ledger, sizes)
    half_forward(ledger, sizes, second)
    after = ledger.make("kept after attention", second.kept.of(sizes.tokens, sizes.tp))
    return ledger.make("layer output", sizes.between_layers), CustomLayerKept(before, attended, after)


def custom_layer_backward(ledger: Ledger, sizes: LayerSizes, kept: CustomLayerKept, x: Block) -> None:
    """Run the backward of the layer, and free the kept blocks and `x`.

    The gradient of the input overwrites the gradient of the output."""
    assert sizes.halves is not None
    first, second = sizes.halves
    half_backward(ledger, sizes, second)
    ledger.free(kept.second)
    grad_x = ledger.make("residual gradient", sizes.between_layers)
    grad_out = ledger.make("output gradient", sizes.tokens * sizes.q * sizes.narrow)
    grads = attention_backward(ledger, sizes)
    ledger.free(grad_out, *kept.attended)
    ledger.mark_reduction_start()
    half_backward(ledger, sizes, first)
    ledger.free(kept.first, *grads, grad_x, x)
