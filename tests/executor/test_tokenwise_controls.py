"""Negative controls: each fault put into a swapped layer must show in the comparison that the other tests rely on.

Stale buffers often hold the right numbers: those of the same layer, one step or one pass before. Only NaN in what is
no longer valid makes a layer that relies on them fail, so poison has its own controls. Copies that are dropped as a
whole, and records that are reused early, are faults of test_swapper_engine.py.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import pytest
from layouts import tiny
from swap_runs import DroppedCopy, Forwarding, Poisoned
from swapped_steps import Step, Workplace, differences, observed, profiled_once
from torch import Tensor

from memo.executor.cpu_streams import VirtualStreams
from memo.executor.layer import TokenwiseLayer
from memo.executor.runtime import SwapRuntime
from memo.executor.streams import Event, Stream
from memo.executor.tile_machine import Tile, TileMachine
from memo.parallel.experts import ExpertRows
from memo.program import walk
from memo.program.operations import Operation
from memo.spec.slots import SlotLayout
from memo.train import build as building
from memo.train.parallel_model import ParallelModel

TILES = 4
SWAPS: dict[str, Any] = {"offload_tiles": TILES, "params_dtype": "fp32"}

Fault = Callable[[], AbstractContextManager[object]]


# Faults of the layer, in backward; layer 0 is one of those that come back from the host.


@contextmanager
def in_backward_of_layer_0(name: str, faulty: Callable[..., Any], owner: Any = TokenwiseLayer) -> Iterator[None]:
    """`faulty(right, self, ...)` instead of a method `right(self, ...)` of `owner`."""
    right, run_backward = getattr(owner, name), TokenwiseLayer.run_backward

    def broken_backward(self: TokenwiseLayer, *args: Any) -> Tensor:
        if self.index != 0:
            return run_backward(self, *args)
        with patch.object(owner, name, lambda *given, **more: faulty(right, *given, **more)):
            return run_backward(self, *args)

    with patch.object(TokenwiseLayer, "run_backward", broken_backward):
        yield


def skipped_qkv(tile_index: int) -> AbstractContextManager[None]:
    def skip(right: Callable[..., Any], layer: TokenwiseLayer, kept: Any, tile: Tile, *given: Any, **how: Any) -> None:
        if tile.index != tile_index:
            right(layer, kept, tile, *given, **how)

    return in_backward_of_layer_0("compute_qkv", skip)


def skipped_residual() -> AbstractContextManager[None]:
    def skip(right: Callable[..., Any], machine: TileMachine, step: walk.Step, operation: Operation) -> None:
        right(machine, step, operation)
        if step.makes == ("residual",) and machine.tile.index == TILES - 1:
            machine.live["residual"] = machine.take("input")

    return in_backward_of_layer_0("forward", skip, TileMachine)


def another_tile_recalled(name: str) -> AbstractContextManager[None]:
    """The last tile finds the rows of the first."""

    def recall(right: Callable[..., Any], machine: TileMachine, asked: str) -> Any:
        if (asked, machine.tile.index) == (name, TILES - 1):
            return machine.slot[asked][machine.on.rows_of(asked, machine.on.tiles[0])]
        return right(machine, asked)

    return in_backward_of_layer_0("in_slot", recall, TileMachine)


def weights_of_another_expert() -> AbstractContextManager[None]:
    """Rows meet the matrix of the expert before theirs."""

    def products(
        right: Callable[..., Any], rows: ExpertRows, x: Tensor, matrices: Tensor, *of: Any, **more: Any
    ) -> Any:
        return right(rows, x, matrices.roll(len(matrices) // rows.num_experts, 0), *of, **more)

    return in_backward_of_layer_0("products", products, ExpertRows)


# Faults of the buffers.


def believed_moved() -> AbstractContextManager[object]:
    """Backward takes one tile more of qkv for moved than did."""
    right = SlotLayout.saved_rows

    def saved_rows(layout: SlotLayout, name: str) -> int:
        one_tile = layout.places["qkv"].shape[0] // TILES
        return right(layout, name) + one_tile * (name == "qkv")

    return patch.object(SlotLayout, "saved_rows", saved_rows)


def wrong_slot() -> AbstractContextManager[object]:
    def begin(runtime: SwapRuntime, kind: str, layer: int) -> dict[str, Tensor]:
        slot = runtime.swapper.begin(kind, layer)
        return runtime._views[1 - slot if (kind, layer) == ("B", 0) else slot]

    return patch.object(SwapRuntime, "begin", begin)


@dataclass
class ShortCopy(Forwarding):
    """Copies on one stream leave out the last 64 bytes."""

    stream: Stream

    def copy(self, stream: Stream, dst: Tensor, src: Tensor, dst_name: str, src_name: str) -> None:
        end = dst.numel() - 64 if stream is self.stream and src_name != "poison" else dst.numel()
        self.backend.copy(stream, dst[:end], src[:end], dst_name, src_name)


@dataclass
class NoWait(Forwarding):
    """One stream waits for nothing."""

    stream: Stream

    def wait(self, stream: Stream, event: Event | None) -> None:
        if stream is not self.stream:
            self.backend.wait(stream, event)


def backend(make: Callable[[], Forwarding]) -> AbstractContextManager[object]:
    return patch.object(building, "make_backend", lambda *_, **__: Poisoned(make()))


FAULTS: dict[str, tuple[float, Fault]] = {
    "a tile of qkv is not recomputed into the workspace": (0.0, lambda: skipped_qkv(0)),
    "a tile of qkv is not recomputed beside those that moved": (0.5, lambda: skipped_qkv(2)),
    "a tile of the residual is not recomputed": (0.5, skipped_residual),
    "a tile of the residual comes from another's rows": (1.0, lambda: another_tile_recalled("residual")),
    "a tile of fc1 comes from another's rows": (1.0, lambda: another_tile_recalled("fc1")),
    "a tile more of qkv is believed to have moved": (0.5, believed_moved),
    "backward reads the other slot": (0.5, wrong_slot),
    "offloads stop short": (0.5, lambda: backend(lambda: ShortCopy(VirtualStreams(), Stream.OFFLOAD))),
    "prefetches stop short": (0.0, lambda: backend(lambda: ShortCopy(VirtualStreams(), Stream.PREFETCH))),
    "compute waits for no copy": (0.5, lambda: backend(lambda: NoWait(VirtualStreams("lazy"), Stream.COMPUTE))),
}
EXPERTS, DELTA_NETS, LATENTS = "qwen3-moe-tiny", "qwen3.5-tiny", "deepseek-tiny"
FAULTS_OF_KINDS: dict[str, tuple[str, float, Fault]] = {
    "a tile's choice comes from another's rows": (EXPERTS, 0.0, lambda: another_tile_recalled("routing")),
    "the rows of a tile's experts come from another's": (EXPERTS, 1.0, lambda: another_tile_recalled("fc1")),
    "a tile's latents come from another's rows": (LATENTS, 1.0, lambda: another_tile_recalled("latent")),
    "experts take each other's matrices": (EXPERTS, 0.5, weights_of_another_expert),
    "prefetches stop short, delta nets": (DELTA_NETS, *FAULTS["prefetches stop short"]),
}


@pytest.fixture(scope="module", autouse=True)
def one_profile(one_thread: None) -> Iterator[None]:
    with profiled_once():
        build(4, alpha=0.0)  # no fault may see the layer that is timed
        yield


@functools.cache
def workplace(num_layers: int, model: str) -> Workplace:
    shape: dict[str, Any] = {"hidden_size": 16, "num_attention_heads": 2, "seq_length": 32}
    shape |= {"num_query_groups": 2 if model == LATENTS else 1}
    return Workplace(tiny(model, **shape, num_layers=num_layers, global_batch_size=1), 1)


@functools.cache
def reference(num_layers: int, model: str = "llama-tiny") -> Step:
    return run(num_layers, build(num_layers, 0.0, model), model)


def build(num_layers: int, alpha: float, model: str = "llama-tiny") -> ParallelModel:
    return workplace(num_layers, model).build(**SWAPS, offload_alpha=alpha)


def run(num_layers: int, built: ParallelModel, model: str = "llama-tiny") -> Step:
    of_model = workplace(num_layers, model)
    return of_model.step(built, of_model.batches(TILES))


@pytest.mark.parametrize("name", [*FAULTS, *FAULTS_OF_KINDS])
def test_every_fault_shows(name: str) -> None:
    model, alpha, fault = FAULTS_OF_KINDS[name] if name in FAULTS_OF_KINDS else ("llama-tiny", *FAULTS[name])
    with observed():
        assert differences(run(4, build(4, alpha, model), model), reference(4, model)) == []
    with observed(copies="eager"), fault():
        try:
            found = run(4, build(4, alpha, model), model)
        except RuntimeError as error:  # of a choice that has not come back: no expert has that number
            assert model == EXPERTS and "out of bounds" in str(error)
            return
    assert differences(found, reference(4, model)) != []


# Faults that find the right numbers where the step before, or the forward, left them.


def workspace_trusted(model: ParallelModel) -> AbstractContextManager[None]:
    return skipped_qkv(0)


def offload_forgotten(model: ParallelModel) -> AbstractContextManager[object]:
    assert model.swap is not None
    engine = model.swap.swapper
    return patch.object(engine, "backend", DroppedCopy(engine.backend, Stream.OFFLOAD))


def write_forgotten(model: ParallelModel) -> AbstractContextManager[object]:
    """Forward leaves the residual of the first tile out of the slot."""
    right = TileMachine.keep

    def keep(machine: TileMachine, step: walk.Step) -> None:
        if (step.reads, machine.tile.index) != (("residual",), 0):
            right(machine, step)

    return patch.object(TileMachine, "keep", keep)


# Layers: with one, its forward and its backward share the workspace; with two, each has a slot of its own.
@pytest.mark.parametrize(
    ("num_layers", "alpha", "fault"),
    [(1, 0.0, workspace_trusted), (4, 0.5, offload_forgotten), (2, 1.0, write_forgotten)],
)
def test_only_poison_shows_what_happens_to_be_right(
    num_layers: int, alpha: float, fault: Callable[[ParallelModel], AbstractContextManager[object]]
) -> None:
    for poison in (False, True):
        with observed(poison, copies="eager"):
            model = build(num_layers, alpha)
        assert differences(run(num_layers, model), reference(num_layers)) == []
        with fault(model):
            assert bool(differences(run(num_layers, model), reference(num_layers))) is poison
