"""Training steps of a whole model, plain or under a swap plan, on the rank that runs them."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal
from unittest.mock import patch

import torch
import torch.distributed as dist
from layouts import global_pieces
from swap_runs import Poisoned
from torch import Tensor

from memo.config import RunConfig
from memo.config.checks import check
from memo.data import GlobalBatchSampler, MockDataset
from memo.executor.checker import Checked
from memo.executor.cpu_streams import ThreadStreams, VirtualStreams
from memo.executor.streams import StreamBackend
from memo.model.transformer import Microbatch
from memo.parallel.collectives import all_reduce
from memo.parallel.dtypes import torch_dtype
from memo.train import build as building
from memo.train import swap
from memo.train.build import build, build_mesh
from memo.train.feed import Feed
from memo.train.parallel_model import ParallelModel

CPU = torch.device("cpu")
SEED = 7

Copies = Literal["eager", "lazy", "random", "threads"]
"""When copies run: by a policy of VirtualStreams, or in threads of their own."""


@dataclass
class Step:
    """Results of one step on one rank.

    Attributes:
        gradients: every main gradient by local name: the rank's shard reduced, the rest as the rank summed it.
        pieces: the reduced gradients by global name (see layouts.global_pieces), and the loss of all ranks.
    """

    loss: Tensor
    gradients: dict[str, Tensor]
    pieces: dict[str, Tensor]


def differences(actual: Step, expected: Step) -> list[str]:
    """Return the names of values that are not equal to the last bit; a NaN equals nothing."""
    assert actual.gradients.keys() == expected.gradients.keys()
    found = [] if torch.equal(actual.loss, expected.loss) else ["loss"]
    return found + [
        name for name, theirs in expected.gradients.items() if not torch.equal(actual.gradients[name], theirs)
    ]


@contextmanager
def observed(poison: bool = True, copies: Copies = "lazy") -> Iterator[None]:
    """Let engines that start inside fill invalid memory with NaN, and check all accesses."""
    with patch.object(building, "make_backend", lambda *_, **__: _backend(poison, copies)):
        yield


def _backend(poison: bool, copies: Copies) -> StreamBackend:
    checked = Checked(ThreadStreams() if copies == "threads" else VirtualStreams(copies, SEED))
    return Poisoned(checked) if poison else checked


class Injected(Exception):
    pass


@contextmanager
def counted(owner: object, name: str, raises_at: int | None = None) -> Iterator[list[int]]:
    """Count the calls of `name` of `owner` from 0; the call `raises_at` raises when it has done its work."""
    function = getattr(owner, name)
    calls: list[int] = []

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        calls.append(len(calls))
        if calls[-1] == raises_at:
            raise Injected
        return result

    with patch.object(owner, name, wrapper):
        yield calls


@contextmanager
def profiled_once() -> Iterator[None]:
    """Let models that are built inside share the first model's profile, which decides nothing if alpha is given."""
    obtain: Callable[..., Any] = swap.obtain
    kept: list[Any] = []

    def first(*args: Any) -> Any:
        if not kept:
            kept.append(obtain(*args))
        return kept[0]

    with patch.object(swap, "obtain", first):
        yield


class Workplace:
    """Builds models of one layout on one mesh, and feeds them all the same packed documents."""

    def __init__(self, config: RunConfig, world_size: int) -> None:
        """`config`: the run, except for the swapping and the dtype of each model."""
        self.config, self.world_size = config, world_size
        self.mesh = build_mesh(config, dist.get_rank() if dist.is_initialized() else 0, world_size)

    def batches(self, tiles: int = 1, swept: bool = False) -> list[Microbatch]:
        """Return the first global batch, in the order of tokens for `tiles` tiles of whole or of swept layers."""
        return self.feed(tiles, swept).next_global_batch()

    def feed(self, tiles: int = 1, swept: bool = False) -> Feed:
        seq_length = self.config.data.seq_length
        data = MockDataset(self.config.model.vocabulary, seq_length, SEED, mean_document_length=23)
        sampler = GlobalBatchSampler(self.config.training.global_batch_size or 1, SEED)
        granularity = {"offload_alpha": 0.0, "offload_granularity": "tile"} if swept else {}
        return Feed(data, sampler, self.mesh, self.config.override(granularity), CPU, tiles)

    def build(self, **overrides: object) -> ParallelModel:
        config = self.config.override(overrides)
        check(config, self.world_size)
        return build(config, self.mesh, torch_dtype(str(config.training.params_dtype)), CPU)

    def step(self, model: ParallelModel, batches: list[Microbatch]) -> Step:
        """Run forward and backward; the weights stay."""
        loss = model.forward_backward(batches)
        sharded = model.data_parallel
        trained = {name: p for name, p in sharded.parameters.items() if p.requires_grad}
        gradients = {name: sharded.main_gradients.main_gradient(p).clone() for name, p in trained.items()}
        pieces = global_pieces(model, "grad")
        return Step(loss, gradients, pieces | {"loss": self.loss_of_all_ranks(loss)})

    def loss_of_all_ranks(self, loss: Tensor) -> Tensor:
        """Return the sum of the ranks' shares; tp ranks hold the same share."""
        return all_reduce(loss.detach().double() * (self.mesh.at.tp == 0), self.mesh.world)


def copy_weights(target: ParallelModel, source: ParallelModel) -> None:
    """Copy the weights to a model of another dtype; a model in fp64 is the reference for rounding."""
    for ours, theirs in zip(target.data_parallel.buckets, source.data_parallel.buckets, strict=True):
        ours.weights.copy_(theirs.weights)
