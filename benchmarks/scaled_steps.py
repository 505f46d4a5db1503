"""The ways of the scaled node (benchmarks/scaled_node.py), and turns of a process, each of which is a step of a way."""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import rivals
from allocated_bytes import AllocatedBytes
from measure import Case, tried
from scaled_link import PacedStreams
from ways import ON_TILES, WAYS, Way

from memo import Trainer
from memo.train import build
from memo.units import GIB

_MEMO = {"offload_backend": "threads"}
_RIVAL = {**ON_TILES, **_MEMO}
SCALED_WAYS = {
    "ideal": Way(_RIVAL, start=rivals.keep_everything),
    "full-recompute": Way(_RIVAL, start=rivals.recompute_layers),
    "layer-input-offload": Way(_RIVAL, start=rivals.offload_layer_inputs),
    "alst": Way(_RIVAL, start=rivals.tile_mlp),
    "full-swap": Way({"offload_alpha": 1.0, "offload_policy": "paper", **_MEMO}),
    "memo-paper": Way({"offload_alpha": "auto", "offload_policy": "paper", **_MEMO}),
    "memo": Way({"offload_alpha": "auto", **_MEMO}),
    "whole-layers": WAYS["none"],
    "whole-layers-recompute": WAYS["full-recompute"],
}
"""All ways but WHOLE_LAYERS compute on the same tiles."""

IDEALS = ("ideal", "whole-layers")
"""Ways that keep everything on the device, without a limit of memory."""

WHOLE_LAYERS = ("whole-layers", "whole-layers-recompute")
"""torch's layers under autograd on the whole sequence at once, as in other trainers: a second reference."""

_LEAST = {"offload_alpha": 0.0, **_MEMO}
LEAST_MEMORY_WAYS = {
    "memo-least": Way(_LEAST),
    "memo-swept": Way(
        {**_LEAST, "offload_granularity": "tile", "offload_slot_tiles": 1, "offload_hidden_states": True}
    ),
}
"""memo's ways if memory is scarce: whole layers, and layers swept along the sequence in tiles of TILE tokens."""

TILE = 512


@dataclass(frozen=True)
class Work:
    """The work of a fresh process.

    Attributes:
        case: a row of benchmarks/measure.py; its number of steps is ignored.
        bytes_per_s: rate of the link in each direction.
        profile: file of the layer's profile, which scaled_pieces.py writes and from which ways on tiles plan; "":
            ways measure their own profile.
        device_bytes: device memory for memo's plan; None: all.
        limit_bytes: memory of the device: a request above it fails, as on a full GPU; None: no limit.
        host_bytes: host memory of a way; None: no limit.
    """

    case: Case
    bytes_per_s: float
    profile: str
    device_bytes: int | None = None
    limit_bytes: int | None = None
    host_bytes: int | None = None

    @property
    def way(self) -> Way:
        return {**SCALED_WAYS, **LEAST_MEMORY_WAYS}[self.case.way]

    @property
    def flags(self) -> dict[str, Any]:
        """Flags of the trainer."""
        flags: dict[str, Any] = {"mock_data": True, "profile_cache": "off", "num_threads": 1, "progress": False}
        flags |= {"seq_length": self.case.seq_length, "train_iters": 1 << 20, "device": "cpu", "params_dtype": "fp32"}
        flags |= self.way.flags | self.case.flags
        if flags.get("offload_granularity") == "tile":
            flags["offload_tiles"] = self.case.seq_length // TILE
        if flags["offload_alpha"] != "off" and self.host_bytes is not None:
            flags["offload_host_memory_gib"] = self.host_bytes / GIB
        if flags["offload_alpha"] != "off" and self.profile and "offload_granularity" not in flags:
            flags["layer_profile"] = self.profile
        if flags["offload_alpha"] == "auto" and self.device_bytes is not None:
            flags["device_memory_gib"] = self.device_bytes / GIB
        return flags


@dataclass(frozen=True)
class Turns:
    """Functions of a process of the scaled node: its turn, and its answer at the end of all turns."""

    turn: Callable[[], dict[str, Any]]
    end: Callable[[], dict[str, Any]]


@contextlib.contextmanager
def way_turns(work: Work) -> Iterator[Turns]:
    """Warm up, and yield turns, each of which is a step of one way."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(build, "make_backend", lambda *_, **__: PacedStreams(work.bytes_per_s)))
        stack.enter_context(tried())
        stack.enter_context(work.way.building())
        counter = AllocatedBytes()
        trainer = stack.enter_context(Trainer(work.case.model, **work.flags))
        if work.limit_bytes is not None:  # set only now: timing the link takes memory that is much for this node
            counter.limit(work.limit_bytes)
        for _ in range(work.case.warmup):
            trainer.step()
        counter.take_peak_bytes()
        last: dict[str, Any] = {"device_peak_bytes": 0}

        def turn() -> dict[str, Any]:
            record = trainer.step()
            peak_bytes = max(last["device_peak_bytes"], counter.take_peak_bytes())
            last.update(loss=record.lm_loss, host_bytes=record.host_records_bytes or 0, device_peak_bytes=peak_bytes)
            hidden_share = record.hidden_share if record.copies_s else None
            return {"step_s": record.step_time_s, "hidden_share": hidden_share, "device_peak_bytes": peak_bytes}

        def end() -> dict[str, Any]:
            solved = None if work.way.start is not None else trainer.parts.chosen_swap
            return {
                **last,
                "moves": None if solved is None else solved.solution.tiles,
                "limit": None if solved is None else str(solved.solution.limit),
                "stays": solved is not None and trainer.parts.swap is None,
            }

        yield Turns(turn, end)
