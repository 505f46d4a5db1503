"""Requests of multi-latent attention on a tile of tokens (memo.model.latent, memo.executor.latent_pieces)."""

import math

from memo.estimate.program.ledger import Block, Ledger
from memo.estimate.program.matrices import (
    adapter_backward,
    adapter_forward,
    adapter_gradients,
    adapter_of,
    add_weight_gradient,
    multiply,
)
from memo.estimate.program.sizes import LayerSizes
from memo.estimate.program.tokenwise import Normed, norm_backward, norm_forward


def latent_norm_forward(ledger: Ledger, sizes: LayerSizes, graph: bool) -> tuple[Block, tuple[Normed, ...]]:
    """Return the normed latents, and what the graphs of their norms keep."""
    norms = tuple(norm_forward(ledger, sizes, "normed latent", sizes.tokens, width, graph) for width in _normed(sizes))
    made = ledger.make("latent_norm", _bytes(sizes, sum(sizes.latents)))
    ledger.free(*(norm.out for norm in norms))
    return made, norms


def latent_norm_backward(ledger: Ledger, sizes: LayerSizes, norms: tuple[Normed, ...]) -> Block:
    """Return the gradient of the latents."""
    grads = [norm_backward(ledger, sizes, norm) for norm in reversed(norms)]
    made = ledger.make("latent gradient", _bytes(sizes, sum(sizes.latents)))
    ledger.free(*grads)
    return made


def expand_forward(ledger: Ledger, sizes: LayerSizes, placed: bool) -> Block | None:
    """Return q, k and v side by side; None if they are placed."""
    made = [_product(ledger, sizes, f"attention.{name}") for name in _expanded(sizes)]
    qkv = None if placed else ledger.make("qkv", _bytes(sizes, sizes.qkv))
    ledger.free(*made)
    return qkv


def expand_backward(ledger: Ledger, sizes: LayerSizes) -> tuple[Block, ...]:
    """Return the gradient of the normed latents, and that of queries without a latent."""
    matrices, names = dict(sizes.matrices), _expanded(sizes)
    widths = (matrices[f"attention.{name}"][0] for name in ("q", "kv"))
    grads = [ledger.make("expanded gradient", _bytes(sizes, width)) for width in widths]
    found = [ledger.make("latent gradient", _bytes(sizes, sizes.latents[2]))]
    for name in reversed(names):
        module, (outputs, inputs) = f"attention.{name}", matrices[f"attention.{name}"]
        found.append(ledger.make("latent gradient", _bytes(sizes, inputs)))
        multiply(ledger, sizes, sizes.tokens * inputs)
        adapter = adapter_of(matrices, module)
        narrow = adapter_backward(ledger, sizes, sizes.tokens, adapter)
        if module not in sizes.frozen:
            add_weight_gradient(ledger, sizes, math.prod((outputs, inputs)))
        adapter_gradients(ledger, sizes, sizes.tokens, adapter, narrow)
    made = ledger.make("latent gradient", _bytes(sizes, sum(sizes.latents)))
    of_queries = () if "q" in names else (grads.pop(0),)
    ledger.free(*found, *grads)
    return made, *of_queries


def trim_forward(ledger: Ledger, sizes: LayerSizes) -> Block:
    """Return attention's output without the channels that values do not have."""
    return ledger.make("trimmed", _bytes(sizes, dict(sizes.matrices)["attention.projection"][1]))


def _product(ledger: Ledger, sizes: LayerSizes, module: str) -> Block:
    matrices = dict(sizes.matrices)
    elements = sizes.tokens * matrices[module][0]
    made = ledger.make("expanded", elements * sizes.narrow)
    multiply(ledger, sizes, elements)
    adapter_forward(ledger, sizes, sizes.tokens, adapter_of(matrices, module))
    return made


def _expanded(sizes: LayerSizes) -> tuple[str, ...]:
    """The matrices that expand latents."""
    return ("q", "kv") if sizes.latents[0] else ("kv",)


def _normed(sizes: LayerSizes) -> tuple[int, ...]:
    """Widths of the latents that have norms."""
    return tuple(width for width in sizes.latents[:2] if width)


def _bytes(sizes: LayerSizes, width: int) -> int:
    return sizes.tokens * width * sizes.narrow
