"""Measures the pieces of steps on the scaled node, from which benchmarks/scaled_foresight.py predicts whole steps."""

import contextlib
import dataclasses
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from measure import tried
from scaled_steps import Turns, Work
from torch import Tensor, nn

from memo import Trainer
from memo.artifacts.layer_profile import LayerProfile
from memo.config.derived import resolved_offload_tiles
from memo.executor.pieces import row_forward
from memo.model.layer import TransformerLayer
from memo.profiler.layer import median_s
from memo.train import layer_profile

_LAYERS = 3
"""Layers of the measured model: with a single layer, too much would still be in the cache when its backward begins."""


@dataclass(frozen=True)
class Pieces:
    """Seconds of the pieces of a step.

    Attributes:
        forward_s, backward_s: passes of a layer without tiles.
        beside_s: embedding, loss and optimizer.
        on_tiles_forward_s, on_tiles_backward_s: passes of a layer on tiles that recomputes no group of activations.
        last_product_s: the last matrix product in the forward of a layer on tiles.
        recompute_s: recomputation by group of activations, in a layer on tiles.
    """

    forward_s: float
    backward_s: float
    beside_s: float
    on_tiles_forward_s: float
    on_tiles_backward_s: float
    last_product_s: float
    recompute_s: dict[str, float]

    @classmethod
    def median(cls, found: Sequence["Pieces"]) -> "Pieces":
        """Return the median of each piece."""
        names = [field.name for field in dataclasses.fields(cls) if field.name != "recompute_s"]
        groups = {
            group: statistics.median(pieces.recompute_s[group] for pieces in found) for group in found[0].recompute_s
        }
        return cls(**{name: statistics.median(getattr(p, name) for p in found) for name in names}, recompute_s=groups)


@contextlib.contextmanager
def piece_turns(work: Work) -> Iterator[Turns]:
    """Yield turns; each measures the pieces of one step of a model with few layers, and profiles a layer under a plan.

    The first profile is kept as `work.profile`, from which runs plan. It gets the rates of the slowed link, which the
    profiler cannot measure.
    """
    profile = _profiler(work)
    rates = dict.fromkeys(layer_profile.RATES, work.bytes_per_s)
    dataclasses.replace(profile(), **rates).save(work.profile)
    case = dataclasses.replace(work.case, way="whole-layers", shape={**work.case.shape, "num_layers": _LAYERS})
    with tried(), Trainer(case.model, **dataclasses.replace(work, case=case).flags) as trainer:
        seconds: dict[str, list[float]] = defaultdict(list)
        for layer in trainer.parts.chunks[0].layers:
            _time(layer, seconds)
        last_product = _last_product(layer.layer, resolved_offload_tiles(trainer.config), work.case.seq_length)
        trainer.step()  # makes the moments

        def turn() -> dict[str, Any]:
            seconds.clear()
            step_s = trainer.step().step_time_s
            forward_s, backward_s = (sum(seconds[name]) / _LAYERS for name in ("forward", "backward"))
            beside_s = step_s - _LAYERS * (forward_s + backward_s)
            tiled = profile()
            found = Pieces(
                *(forward_s, backward_s, beside_s),
                *(tiled.forward_s, tiled.backward_s, last_product()),
                tiled.recompute_s,
            )
            return dataclasses.asdict(found)

        yield Turns(turn, dict)


def _profiler(work: Work) -> Callable[[], LayerProfile]:
    """Return a function that measures the profile of a layer of the way `memo`."""
    asked: list[Callable[[], LayerProfile]] = []
    measure = layer_profile.measure

    def note(*args: Any, **more: Any) -> LayerProfile:
        asked.append(lambda: measure(*args, **more))
        return measure(*args, **more)

    memo = dataclasses.replace(work, case=dataclasses.replace(work.case, way="memo"))
    with tried(), mock.patch("memo.train.swap.measure", note):
        Trainer(memo.case.model, **{**memo.flags, "layer_profile": None}).close()
    return asked[0]


def _last_product(layer: TransformerLayer, tiles: int, seq_length: int) -> Callable[[], float]:
    """Return a function that measures the seconds of the last product of a layer's forward, on all tiles."""
    active = torch.randn(seq_length // tiles, 1, layer.mlp.fc2.weight.shape[1])

    @torch.no_grad()
    def measure() -> float:
        return tiles * median_s(lambda: row_forward(active, layer.mlp.fc2, None), active.device)

    return measure


def _time(layer: nn.Module, seconds: dict[str, list[float]]) -> None:
    """Let each forward and backward of a layer add its seconds to `seconds` from now on."""
    began: dict[str, float] = {}

    def begin(name: str) -> None:
        began[name] = time.perf_counter()

    def end(name: str) -> None:
        seconds[name].append(time.perf_counter() - began[name])

    def before(module: nn.Module, inputs: tuple[Any, ...]) -> None:
        inputs[0].register_hook(lambda grad: end("backward"))
        begin("forward")

    def after(module: nn.Module, inputs: tuple[Any, ...], y: Tensor) -> None:
        end("forward")
        y.register_hook(lambda grad: begin("backward"))

    layer.register_forward_pre_hook(before)
    layer.register_forward_hook(after)
