"""What a swapped layer's backward computes while its messages over tp are under way.

Ranks stand still for a message that is waited for at once. One layer's backward is watched: every message, and the
matrix products that are issued between its begin and the wait for it.
"""

from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import pytest
from layouts import tiny
from ranks import run_ranks
from swapped_steps import Workplace
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from memo.config import RunConfig
from memo.executor.layer import TokenwiseLayer
from memo.mesh.group import OpenSpan

TILES = 2
PRODUCTS = ("aten::mm", "aten::addmm", "aten::addmm_")

Seen = list[tuple[str, int]]
"""Name of a message, products beside it; in the order of their begins."""

KEPT: Seen = [
    ("all_gather", 0),  # the output's gradient: beside the replays of norm and activation
    ("all_gather", 3),  # fc1's inputs: beside both products of fc2, and fc1's that needs none of them
    ("reduce_scatter", 1),  # the gradient of fc1's inputs: beside that of its weight
    ("all_gather", 0),  # the gradient at attention's projection: it waits for the one before, all else for it
]
LEFT_BEHIND: Seen = [
    ("reduce_scatter", 0),  # the residual
    ("all_gather", 0),  # fc1's inputs
    ("all_gather", 1),  # the output's gradient: beside fc1
    *KEPT[2:],
]
QKV: Seen = [("all_gather", 1), ("reduce_scatter", 1)]
EXPECTED = {1.0: [*KEPT * TILES, *QKV * TILES], 0.0: [("all_gather", 0)] * TILES + [*LEFT_BEHIND * TILES, *QKV * TILES]}


@dataclass
class Span:
    watcher: "Watcher"
    name: str
    first: int
    beside: int = 0

    def waits(self) -> None:
        self.beside = self.watcher.products - self.first

    def end(self) -> None:
        pass


class Watcher(TorchDispatchMode):
    """Also the listener of a mesh."""

    def __init__(self) -> None:
        super().__init__()
        self.products = 0
        self.spans: list[Span] = []

    def begin(self, row: str, name: str, num_bytes: int) -> OpenSpan:
        self.spans.append(Span(self, name, self.products))
        return self.spans[-1]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.products += func.name().partition(".")[0] in PRODUCTS
        return func(*args, **(kwargs or {}))


def watch_backward(config: RunConfig) -> dict[float, Seen]:
    workplace, seen = Workplace(config, 2), {}
    right = TokenwiseLayer.run_backward
    for alpha in EXPECTED:
        model = workplace.build(offload_alpha=alpha, offload_tiles=TILES)
        watcher = Watcher()

        def run_backward(layer: TokenwiseLayer, grad: Tensor, context: Any, watcher: Watcher = watcher) -> Tensor:
            if layer.index != 0:
                return right(layer, grad, context)
            workplace.mesh.watch.listener = watcher
            with watcher:
                grad_x = right(layer, grad, context)
            workplace.mesh.watch.listener = None
            return grad_x

        with patch.object(TokenwiseLayer, "run_backward", run_backward):
            model.forward_backward(workplace.batches(TILES))
        seen[alpha] = [(span.name, span.beside) for span in watcher.spans]
    return seen


@pytest.mark.parametrize("model", [pytest.param("gpt2-tiny", marks=pytest.mark.full), "llama-tiny"])
def test_messages_of_a_backward_are_under_way_while_products_run(model: str) -> None:
    config = tiny(model, tp=2, num_layers=3, global_batch_size=1, overlap_grad_reduce=False)
    for seen in run_ranks(2, watch_backward, config):
        assert seen == EXPECTED
