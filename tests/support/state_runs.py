"""Runs of the engine that streams states, with synthetic layers that record their weights and add to their gradient."""

from dataclasses import dataclass, field
from typing import Any

import torch
from layouts import tiny
from swap_runs import CPU, Poisoned
from torch import Tensor, nn

from memo.config import TrainingConfig
from memo.executor.host_pool import HostPool
from memo.executor.layer_states import Update
from memo.executor.states import StateStreamer
from memo.executor.streams import StreamBackend
from memo.mesh import Mesh
from memo.parallel.data import ShardedDataParallel
from memo.parallel.shards import Shard, ShardedParameter, empty_parameter, whole
from memo.parallel.units import moment_dtypes
from memo.planner.state_plan import placed_state_plan
from memo.spec.layer_ops import LayerOp
from memo.spec.placement import StatePlacement
from memo.train.optimizer import Optimizer

TRAINING = tiny(clip_grad=1.0).training
BUCKET_SIZE = 100
"""Elements of a bucket: each layer has two buckets."""


class _Part(nn.Module):
    def __init__(self, name: str, sizes: tuple[int, ...], dtype: torch.dtype) -> None:
        super().__init__()
        for index, size in enumerate(sizes):
            shard = Shard((whole(f"{name}.{index}", (size,)),), std=0.5)
            setattr(self, f"weight{index}", empty_parameter((size,), shard, dtype))

    @property
    def weights(self) -> list[ShardedParameter]:
        return [p for p in self.parameters() if isinstance(p, ShardedParameter)]


class _Chunk(nn.Module):
    """An embedding or head and some layers, named as in a model."""

    def __init__(self, num_layers: int, sizes: tuple[int, ...], dtype: torch.dtype) -> None:
        super().__init__()
        self.embedding = _Part("embedding", (70,), dtype)
        self.layers = nn.ModuleList(_Part(f"layer{i}", sizes, dtype) for i in range(num_layers))


@dataclass
class Seen:
    """Values that a run recorded.

    Attributes:
        weights: weights at each operation; at the end masters and moments.
        steps: gradient norm of each step, and whether weights were updated.
    """

    weights: list[Tensor] = field(default_factory=list)
    steps: list[tuple[float, bool]] = field(default_factory=list)

    def differs_from(self, other: "Seen") -> bool:
        """Return whether any bit differs; a NaN equals nothing."""
        pairs = zip(self.weights, other.weights, strict=True)
        return self.steps != other.steps or not all(torch.equal(ours, theirs) for ours, theirs in pairs)


class StateRun:
    """One rank's layers, data parallelism and optimizer, and the engine that streams their states, if any.

    Args:
        ops: operations of one stage; layers are numbered by their position on this rank.
        backend: None keeps all states on the device.
        sizes: elements of a layer's weights, cut into buckets of `bucket_size`.
    """

    def __init__(
        self,
        ops: list[LayerOp],
        placement: StatePlacement,
        backend: StreamBackend | None,
        mesh: Mesh,
        dtype: torch.dtype = torch.bfloat16,
        *,
        sizes: tuple[int, ...] = (70, 130, 33),
        bucket_size: int = BUCKET_SIZE,
        training: TrainingConfig = TRAINING,
    ) -> None:
        layers = sorted({op.layer for op in ops})
        self.positions = {layer: position for position, layer in enumerate(layers)}
        self.ops = ops
        self.num_microbatches = len({op.microbatch for op in ops})
        self.chunk = _Chunk(len(layers), sizes, dtype)
        self.data_parallel = ShardedDataParallel(
            nn.ModuleList([self.chunk]),
            mesh,
            dtype=dtype,
            device=CPU,
            bucket_size=bucket_size,
            overlap=True,
            placement=None if backend is None else placement,
            host_memory=lambda num_bytes: HostPool(1, num_bytes, CPU, contents="states"),
            accumulates=self.num_microbatches > 1,
            consumes_gradients=training.clip_grad == 0,
            moments=moment_dtypes(training, dtype),
        )
        self.data_parallel.initialize(seed=3)
        self.states: StateStreamer | None = None
        if backend is not None:
            plan = placed_state_plan(ops, placement)
            self.states = StateStreamer(plan, self.data_parallel, self.positions, Poisoned(backend))
        self.optimizer = Optimizer(self.data_parallel, training, self.states)
        self.seen = Seen()

    @torch.no_grad()
    def step(self, lr: float = 0.1) -> None:
        """One training step in the order of the operations."""
        with self.optimizer.updating(lr) as update:
            self._backwards(update)
            self.seen.steps.append(self.optimizer.step(lr))

    def _backwards(self, update: Update | None) -> None:
        if self.states is not None:
            self.states.next_step(update)
        self.data_parallel.main_gradients.begin_step(self.num_microbatches)
        for op in self.ops:
            if self.states is not None:
                self.states.begin(op.kind, op.layer)
            self._run(op)
            if self.states is not None:
                self.states.end(op.kind, op.layer)
        for microbatch in range(self.num_microbatches):
            self._backward(self.chunk.embedding, microbatch)
        self.data_parallel.main_gradients.finish_reduction(self.states)

    @torch.no_grad()
    def evaluate(self) -> None:
        """Run a forward of all layers outside any plan."""
        self._look(self.chunk.embedding)
        for layer in self.positions:
            if self.states is not None:
                self.states.begin_unplanned(layer)
            self._look(self._layer(layer))
            if self.states is not None:
                self.states.end_unplanned(layer)

    def finish(self) -> Seen:
        """Wait for all copies; record masters and moments, and return all records."""
        if self.states is not None:
            self.states.backend.synchronize()
        found = {(s.segment.range.name, s.segment.start): kinds for s, kinds in self.optimizer.segment_states()}
        for where in sorted(found):  # the order of updates depends on the placement
            self.seen.weights += [value.clone() for value in found[where].values()]
        return self.seen

    def _layer(self, layer: int) -> Any:
        return self.chunk.layers[self.positions[layer]]

    def _run(self, op: LayerOp) -> None:
        self._look(self._layer(op.layer))
        if op.kind == "B":
            self._backward(self._layer(op.layer), op.microbatch)

    def _look(self, part: _Part) -> None:
        self.seen.weights += [weight.detach().clone() for weight in part.weights]

    def _backward(self, part: _Part, microbatch: int) -> None:
        for weight in part.weights:
            gradient = self.data_parallel.main_gradients.main_gradient(weight)
            gradient.add_(weight.detach().to(gradient.dtype) * (0.1 * (microbatch + 1)) + 0.01)
            self.data_parallel.main_gradients.gradient_done(weight)


def run(
    ops: list[LayerOp],
    placement: StatePlacement,
    backend: StreamBackend | None,
    mesh: Mesh,
    dtype: torch.dtype = torch.bfloat16,
) -> Seen:
    """Run two steps with an evaluation after each."""
    work = StateRun(ops, placement, backend, mesh, dtype)
    for _ in range(2):
        work.step()
        work.evaluate()
    return work.finish()
