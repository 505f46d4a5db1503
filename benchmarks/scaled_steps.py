"""In a fresh process: the steps of one way on the scaled node, or the pieces from which they are foreseen.

What benchmarks/scaled_node.py starts, and explains; `python benchmarks/scaled_steps.py JSON` prints a row.
"""

import contextlib
import dataclasses
import json
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar
from unittest import mock

import torch
from allocated_bytes import AllocatedBytes
from measure import Case, tried
from torch import Tensor, nn
from ways import WAYS, HostCopies, Way

from memo import Trainer
from memo.artifacts.layer_profile import LayerProfile
from memo.artifacts.run_log import StepRecord
from memo.executor.streams import Stream, ThreadStreams
from memo.model.layer import TransformerLayer
from memo.train import build, layer_profile
from memo.units import GIB

Result = TypeVar("Result")

_PROFILES = 5
"""Of which the quickest counts, as of steps; a quickest time of each part would be below that of any whole layer."""

_PIECES_LAYERS = 3
"""Of one layer alone, too much would still lie in the cache when its backward begins."""

_MEMO = {"offload_backend": "threads"}
SCALED_WAYS = {
    "ideal": WAYS["none"],
    "full-recompute": WAYS["full-recompute"],
    "selective-recompute": WAYS["selective-recompute"],
    "layer-input-offload": WAYS["layer-input-offload"],
    "full-swap": Way({"offload_alpha": 1.0, "offload_policy": "paper", **_MEMO}),
    "memo-paper": Way({"offload_alpha": "auto", "offload_policy": "paper", **_MEMO}),
    "memo": Way({"offload_alpha": "auto", **_MEMO}),
}
_LEAST = {"offload_alpha": 0.0, **_MEMO}
LEAST_MEMORY_WAYS = {
    "memo-least": Way(_LEAST),
    "memo-swept": Way(
        {**_LEAST, "offload_granularity": "tile", "offload_slot_tiles": 1, "offload_hidden_states": True}
    ),
}
"""What memo takes where memory binds: layers whole, and swept along the sequence."""


@dataclass(frozen=True)
class Work:
    """What a fresh process is to do.

    Attributes:
        case: a row of benchmarks/measure.py; its steps are the least that count.
        bytes_per_s: of the link, each way.
        profile: file of the layer's profile, which `pieces` writes and memo's ways plan from.
        device_bytes: what memo may use of the device; None: all.
        steps_s: steps are run until they took so long.
        pieces: whether to measure pieces, instead of steps.
    """

    case: Case
    bytes_per_s: float
    profile: str
    device_bytes: int | None = None
    steps_s: float = 0.0
    pieces: bool = False

    @property
    def way(self) -> Way:
        return {**SCALED_WAYS, **LEAST_MEMORY_WAYS}[self.case.way]

    @property
    def flags(self) -> dict[str, Any]:
        """The trainer's."""
        flags: dict[str, Any] = {"mock_data": True, "profile_cache": "off", "num_threads": 1, "progress": False}
        flags |= {"seq_length": self.case.seq_length, "train_iters": 1 << 20, "device": "cpu", "params_dtype": "fp32"}
        flags |= self.way.flags | self.case.flags
        if flags["offload_alpha"] == "auto":
            flags["layer_profile"] = self.profile
            if self.device_bytes is not None:
                flags["device_memory_gib"] = self.device_bytes / GIB
        return flags


class PacedStreams(ThreadStreams):
    """A link of so many bytes a second in each direction, for the copies of a plan."""

    def __init__(self, bytes_per_s: float) -> None:
        super().__init__()
        self.bytes_per_s = bytes_per_s

    def copy(self, stream: Stream, dst: Tensor, src: Tensor, dst_name: str, src_name: str) -> None:
        self._issue(stream, lambda: paced(lambda: dst.copy_(src), src.nbytes, self.bytes_per_s))


class PacedCopies(HostCopies):
    """The same link for ways that copy on the stream that computes."""

    def __init__(self, bytes_per_s: float) -> None:
        super().__init__()
        self.bytes_per_s = bytes_per_s

    def take(self, x: Tensor) -> Tensor:
        return paced(lambda: super(PacedCopies, self).take(x), x.nbytes, self.bytes_per_s, spin)

    def bring(self, waiting: Tensor, device: torch.device) -> Tensor:
        return paced(lambda: super(PacedCopies, self).bring(waiting, device), waiting.nbytes, self.bytes_per_s, spin)


def paced(
    copy: Callable[[], Result], num_bytes: int, bytes_per_s: float, wait: Callable[[float], None] = time.sleep
) -> Result:
    begin_s = time.perf_counter()
    result = copy()
    wait(max(0.0, num_bytes / bytes_per_s - (time.perf_counter() - begin_s)))
    return result


def spin(seconds: float) -> None:
    """Wait as the core that computes, which after a sleep would begin with cold caches and a lower clock."""
    end_s = time.perf_counter() + seconds
    while time.perf_counter() < end_s:
        pass


def take(work: Work) -> dict[str, Any]:
    """Steps of one way."""
    case, copies = work.case, PacedCopies(work.bytes_per_s)
    way = work.way
    with contextlib.ExitStack() as stack:
        stack.enter_context(
            mock.patch.object(build, "make_backend", lambda *args, **more: PacedStreams(work.bytes_per_s))
        )
        stack.enter_context(tried())
        counter = AllocatedBytes()
        trainer = stack.enter_context(Trainer(case.model, **work.flags))
        way.prepare(trainer, copies)
        stack.enter_context(way.around(trainer, copies))
        for _ in range(case.warmup):
            trainer.step()
        counter.take_peak_bytes()
        records = _steps(trainer, work)
        moved = trainer.parts.chosen_swap
        return {
            "steps_s": [record.step_time_s for record in records],
            "device_peak_bytes": counter.take_peak_bytes() - copies.peak_bytes,
            "host_bytes": (records[-1].host_records_bytes or 0) + copies.peak_bytes,
            "hidden_shares": [record.hidden_share for record in records if record.hidden_share is not None],
            "moves": None if moved is None else moved.solution.tiles,
            "limit": None if moved is None else str(moved.solution.limit),
            "stays": moved is not None and trainer.parts.swap is None,
            "loss": records[0].lm_loss,
        }


def _steps(trainer: Trainer, work: Work) -> list[StepRecord]:
    records = [trainer.step() for _ in range(work.case.steps)]
    while sum(record.step_time_s for record in records) < work.steps_s:
        records.append(trainer.step())
    return records


@dataclass(frozen=True)
class Pieces:
    """Seconds of what steps consist of, without a plan, each of the quickest step of a model with a few layers.

    Attributes:
        forward_s, backward_s, attention_s: of a layer: its passes, and the forward of its attention; the mean of all.
        beside_s: embedding, loss and optimizer.
    """

    forward_s: float
    backward_s: float
    attention_s: float
    beside_s: float


def pieces(work: Work) -> Pieces:
    """Measure them, and write the profile of a layer under a plan, with the rates of a link that it cannot see."""
    _write_profile(work)
    shape = {**work.case.shape, "num_layers": _PIECES_LAYERS}
    case = dataclasses.replace(work.case, way="ideal", shape=shape)
    with tried(), Trainer(case.model, **dataclasses.replace(work, case=case).flags) as trainer:
        seconds: dict[str, list[float]] = defaultdict(list)
        for layer in trainer.parts.chunks[0].layers:
            assert isinstance(layer, TransformerLayer)
            _time(layer, seconds)
        trainer.step()
        seconds.clear()  # the first step makes the moments
        records = _steps(trainer, work)
    of_steps = {name: [sum(found) for found in batched(values, _PIECES_LAYERS)] for name, values in seconds.items()}
    quickest = min(range(len(records)), key=lambda at: records[at].step_time_s)
    forward_s, backward_s, attention_s = (of_steps[name][quickest] for name in ("forward", "backward", "attention"))
    beside_s = records[quickest].step_time_s - forward_s - backward_s
    return Pieces(*(layers_s / _PIECES_LAYERS for layers_s in (forward_s, backward_s, attention_s)), beside_s)


def batched(values: list[float], size: int) -> list[list[float]]:
    return [values[at : at + size] for at in range(0, len(values), size)]


def _write_profile(work: Work) -> None:
    found: list[LayerProfile] = []
    measure = layer_profile.measure

    def note(*args: Any, **more: Any) -> LayerProfile:
        found.extend(measure(*args, **more) for _ in range(_PROFILES))
        return found[-1]

    memo = dataclasses.replace(work, case=dataclasses.replace(work.case, way="memo"))
    with tried(), mock.patch("memo.train.swap.measure", note):
        Trainer(memo.case.model, **{**memo.flags, "layer_profile": None}).close()
    quickest = min(found, key=lambda profile: profile.forward_s + profile.backward_s)
    rates = dict.fromkeys(layer_profile.RATES, work.bytes_per_s)
    dataclasses.replace(quickest, **rates).save(work.profile)


def _time(layer: TransformerLayer, seconds: dict[str, list[float]]) -> None:
    """Add to `seconds` those of each forward, backward and forward of attention of a layer, from now on."""
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

    def attention(*args: Any) -> Tensor:
        begin("attention")
        y = core(*args)
        end("attention")
        return y

    core, layer.attention.core = layer.attention.core, attention
    layer.register_forward_pre_hook(before)
    layer.register_forward_hook(after)


def main() -> None:
    given = json.loads(sys.argv[1])
    work = Work(Case(**given.pop("case")), **given)
    print(json.dumps(dataclasses.asdict(pieces(work)) if work.pieces else take(work)))


if __name__ == "__main__":
    main()
