"""A gated delta net (memo.attention.delta_rule) over a sequence that is split over ranks.

A recurrence runs through all tokens in order. So ranks exchange heads: each computes some heads for all tokens, and
sends the outputs back (--cp-comm-type a2a).

Legend: s tokens of this rank, b batch, n value heads of this tp rank, d head dim; mixed [s, b, W] as in
memo.attention.delta_rule, with the tokens in the order of memo.parallel.zigzag.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from memo.attention import delta_rule
from memo.attention.blocks import Documents
from memo.attention.delta_rule import DeltaNet, Gradients, Place
from memo.parallel.context import ContextAttention


class ContextDelta:
    def __init__(self, exchange: ContextAttention, of_all_heads: Callable[[], DeltaNet]) -> None:
        """`exchange` has the cp groups. `of_all_heads` returns the net of all heads of this tp rank, with the module's
        parameters, which may be replaced between two calls."""
        self._exchange, self._of_all_heads, net = exchange, of_all_heads, of_all_heads()
        channels = [count * net.head_dim for count in (net.key_heads, net.key_heads, net.heads)]
        self._widths = [*channels, net.heads, net.heads]
        self._widths_of = (channels, [net.heads], [net.heads])

    def forward(
        self, mixed: Tensor, out: Tensor, documents: Documents | None, start: int = 0, carry: Tensor | None = None
    ) -> Tensor:
        """Compute `out` [s, b, n d] for tokens from position `start` on; returns the carry after them.

        `carry` is the state before these tokens, None at the beginning of the sequence. Carries cover the heads that
        this rank computes.
        """
        net, own = self._share(), self._split(mixed, self._widths)
        carry = net.empty_carry(own) if carry is None else carry
        is_whole = self._exchange.a2a_size == 1
        place = out if is_whole else own.new_empty((*own.shape[:2], net.heads * net.head_dim))
        after = torch.empty_like(carry)
        with self._exchange.around():
            delta_rule.forward(net, own, carry, Place(documents, start), place, after)
        if not is_whole:
            self._exchange.join_heads([place.unsqueeze(-1)], out=out.unsqueeze(-1))
        return after

    def backward(
        self,
        grad_out: Tensor,
        mixed: Tensor,
        main_gradient: Callable[[Any], Tensor | None],
        documents: Documents | None,
        start: int = 0,
        carry: Tensor | None = None,
        grad_carry: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return the gradients of `mixed` and of `carry`; adds the parameters' gradients to their main gradients.

        `grad_carry`: gradient of the carry that `forward` returned, which is overwritten; None: that carry was unused.
        """
        net, own = self._share(), self._split(mixed, self._widths)
        carry = net.empty_carry(own) if carry is None else carry
        grad_carry = torch.zeros_like(carry) if grad_carry is None else grad_carry
        grad_out, grad = self._split(grad_out, [grad_out.shape[-1]]), torch.empty_like(own)
        sums = tuple(torch.zeros_like(each, dtype=carry.dtype) for each in net[:3])
        with self._exchange.around():
            found = Gradients(grad, grad_carry, *sums)
            delta_rule.backward(net, grad_out, own, carry, Place(documents, start), found)
        for parameter, widths, total in zip(self._of_all_heads()[:3], self._widths_of, sums, strict=True):
            main = main_gradient(parameter)
            if main is not None:  # trained
                shares = [width // self._exchange.a2a_size for width in widths]
                for view, part in zip(self._own_rows(main, widths), total.split(shares), strict=True):
                    view.add_(part)
        if self._exchange.a2a_size > 1:
            parts = grad.unsqueeze(-1).split([width // self._exchange.a2a_size for width in self._widths], dim=2)
            grad = torch.cat(self._exchange.join_heads([*parts]), dim=2).squeeze(-1)
        return grad, grad_carry

    def _split(self, x: Tensor, widths: Sequence[int]) -> Tensor:
        """All heads' [s, b, W] -> some heads' [A s, b, W / A]; `widths`: channels of each part of W."""
        if self._exchange.a2a_size == 1:
            return x
        return torch.cat(self._exchange.split_heads(*x.unsqueeze(-1).split(widths, dim=2)), dim=2).squeeze(-1)

    def _share(self) -> DeltaNet:
        """The net of the heads that this rank computes."""
        net = self._of_all_heads()
        rows = (self._own_rows(each.data, of) for each, of in zip(net[:3], self._widths_of, strict=True))
        kernels, rates, biases = map(torch.cat, rows)
        return type(net)(kernels, rates, biases, net.head_dim)

    def _own_rows(self, parameter: Tensor, widths: Sequence[int]) -> list[Tensor]:
        """Views of the rows for the heads that this rank computes, one in each part; `widths`: rows of each part."""
        exchange = self._exchange
        return [part.chunk(exchange.a2a_size)[exchange.a2a_rank] for part in parameter.split(widths)]
