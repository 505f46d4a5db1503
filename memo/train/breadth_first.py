"""Gradient accumulation layer by layer: all microbatches pass through a layer before any enters the next layer.

    depth first      F0 F1 F2 B2 B1 B0 | F0 F1 F2 B2 B1 B0            (layers; | between microbatches)
    breadth first    F0 F0 F1 F1 F2 F2 | B2 B2 B1 B1 B0 B0

Streamed weights and gradients are then fetched once a step instead of once a microbatch (the order of Lamy-Poirier,
Breadth-First Pipeline Parallelism, 2022, on one stage). Both orders sum the microbatches of a parameter in the same
order, except for a tied parameter, so the gradients are equal to the last bit.

Every layer has a separate autograd graph, cut at its input. Only the layer itself can save the hidden states between
two layers; under a swap plan no layer does.
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
    """One microbatch's input of a layer, where the layer's graph begins; `behind`: the end of the graph before it."""

    behind: GradientEdge


def run_breadth_first(
    chunk: TransformerChunk, batches: Sequence[Microbatch], entering: Callable[[int], None]
) -> Tensor:
    """Run forward and backward of one step of a whole model; returns the detached sum of this rank's losses.

    `entering(microbatch)` is called before each layer, the embedding and the head work on this microbatch.
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
    """The weight that embedding and head of one chunk share, if any; here each of them adds its own gradient to it."""
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
    """Run forward and backward of the head, microbatch by microbatch; frees the tensors of `hidden`."""
    assert chunk.head is not None
    total = torch.zeros((), dtype=wide_dtype(chunk.dtype), device=hidden[0].device)
    for microbatch, (batch, cut) in enumerate(zip(batches, cuts, strict=True)):
        entering(microbatch)
        loss = chunk.head(enter(hidden[microbatch], cut), batch)
        hidden[microbatch] = hidden[microbatch].new_empty(0)
        loss.backward()
        total += loss.detach()
    return total
