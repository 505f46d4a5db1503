"""Gradient accumulation layer by layer: all microbatches pass through a layer before any meets the next.

    depth first      F0 F1 F2 B2 B1 B0 | F0 F1 F2 B2 B1 B0            (layers; | between microbatches)
    breadth first    F0 F0 F1 F1 F2 F2 | B2 B2 B1 B1 B0 B0

Weights and gradients that stream are then fetched once a step and not once a microbatch (the order of Lamy-Poirier,
Breadth-First Pipeline Parallelism, 2022, on one stage). Each parameter but a tied one sums its microbatches in the same
order either way, so the gradients are the same to the last bit.

Every layer is a graph of its own, cut at its input, and nothing holds the hidden states between two layers but what a
layer saves: under a swap plan that is nothing.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from memo.executor.phases import unmarked
from memo.model.transformer import Microbatch, TransformerChunk
from memo.parallel.entrance import Entrance, enter
from memo.parallel.shards import ShardedParameter
from memo_kernels import wide_dtype


@dataclass(kw_only=True)
class _Cut(Entrance):
    """One microbatch at the input of one layer, whose graph begins here; `behind`: the graph behind it."""

    behind: GradientEdge


def run_breadth_first(
    chunk: TransformerChunk, batches: Sequence[Microbatch], entering: Callable[[int], None]
) -> Tensor:
    """Forwards and backwards of one step of a whole model; returns the detached sum of this rank's losses.

    `entering` is told which microbatch a layer, or an end of the model, works on next.
    """
    assert chunk.embedding is not None and chunk.head is not None, "breadth first needs the whole model on one stage"
    contexts = [chunk.contexts(batch) for batch in batches]
    hidden: list[Tensor] = []
    for microbatch, batch in enumerate(batches):
        entering(microbatch)
        hidden.append(chunk.embedding(batch))
    cuts: list[list[_Cut]] = []
    for index, layer in enumerate(chunk.layers):
        cuts.append([_Cut(behind=get_gradient_edge(x)) for x in hidden])
        for microbatch, cut in enumerate(cuts[-1]):
            entering(microbatch)
            hidden[microbatch] = layer(enter(hidden[microbatch], cut), contexts[microbatch][index])
    cuts.append([_Cut(behind=get_gradient_edge(x)) for x in hidden])
    loss_sum = _losses(chunk, batches, hidden, cuts[-1], entering)
    for at_layer in reversed(cuts):
        for microbatch, cut in enumerate(at_layer):
            entering(microbatch)
            grad, cut.grad = cut.grad, None
            torch.autograd.backward([cut.behind], [grad])
    return loss_sum


def tied_weight(chunk: TransformerChunk) -> ShardedParameter | None:
    """What embedding and head of one chunk share: here each gives it a gradient of its own."""
    embedding, head = unmarked(chunk.embedding), unmarked(chunk.head)
    if embedding is None or head is None or embedding.tokens.weight is not head.weight:
        return None
    weight: ShardedParameter = head.weight
    return weight


def _losses(
    chunk: TransformerChunk,
    batches: Sequence[Microbatch],
    hidden: list[Tensor],
    cuts: list[_Cut],
    entering: Callable[[int], None],
) -> Tensor:
    """Forward and backward of the head, microbatch by microbatch; empties `hidden`."""
    assert chunk.head is not None
    total = torch.zeros((), dtype=wide_dtype(chunk.dtype), device=hidden[0].device)
    for microbatch, (batch, cut) in enumerate(zip(batches, cuts, strict=True)):
        entering(microbatch)
        loss = chunk.head(enter(hidden[microbatch], cut), batch)
        hidden[microbatch] = hidden[microbatch].new_empty(0)
        loss.backward()
        total += loss.detach()
    return total
