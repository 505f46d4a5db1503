"""The ways of the scaled node (benchmarks/scaled_node.py), and the steps of one of them, a turn each."""

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

from allocated_bytes import AllocatedBytes
from measure import Case, tried
from scaled_link import PacedCopies, PacedStreams
from ways import WAYS, Way

from memo import Trainer
from memo.train import build
from memo.units import GIB

_MEMO = {"offload_backend": "threads"}
_FULL_SWAP = {"offload_alpha": 1.0, "offload_policy": "paper", **_MEMO}
ON_TILES = "ideal-on-tiles"
SCALED_WAYS = {
    "ideal": WAYS["none"],
    ON_TILES: Way(_FULL_SWAP),
    "full-recompute": WAYS["full-recompute"],
    "selective-recompute": WAYS["selective-recompute"],
    "layer-input-offload": WAYS["layer-input-offload"],
    "full-swap": Way(_FULL_SWAP),
    "memo-paper": Way({"offload_alpha": "auto", "offload_policy": "paper", **_MEMO}),
    "memo": Way({"offload_alpha": "auto", **_MEMO}),
}
"""ON_TILES: all activations leave the device, over a link without limit, so its layers are memo's and nothing waits."""

IDEALS = ("ideal", ON_TILES)
PLANNED_WAYS = {
    f"{way}-plan": Way({**SCALED_WAYS[way].flags, "memory_planner": "auto"})
    for way in ("full-recompute", "full-swap", "memo")
}
_LEAST = {"offload_alpha": 0.0, **_MEMO}
LEAST_MEMORY_WAYS = {
    "memo-least": Way(_LEAST),
    "memo-swept": Way(
        {**_LEAST, "offload_granularity": "tile", "offload_slot_tiles": 1, "offload_hidden_states": True}
    ),
}
"""What memo takes where memory binds: layers whole, and swept along the sequence in tiles of TILE tokens."""

TILE = 512


@dataclass(frozen=True)
class Work:
    """What a fresh process is to do.

    Attributes:
        case: a row of benchmarks/measure.py, whose number of steps does not count.
        bytes_per_s: of the link, each way.
        profile: file of the layer's profile, which scaled_pieces.py writes and memo's ways plan from.
        device_bytes: what memo may plan to use of the device; None: all.
        limit_bytes: what the device has: a request above it fails, as on a full GPU; None: no limit.
        host_bytes: what a way may keep in host memory; None: no limit.
    """

    case: Case
    bytes_per_s: float
    profile: str
    device_bytes: int | None = None
    limit_bytes: int | None = None
    host_bytes: int | None = None

    @property
    def way(self) -> Way:
        return {**SCALED_WAYS, **PLANNED_WAYS, **LEAST_MEMORY_WAYS}[self.case.way]

    @property
    def link_bytes_per_s(self) -> float:
        return math.inf if self.case.way == ON_TILES else self.bytes_per_s

    @property
    def flags(self) -> dict[str, Any]:
        """The trainer's."""
        flags: dict[str, Any] = {"mock_data": True, "profile_cache": "off", "num_threads": 1, "progress": False}
        flags |= {"seq_length": self.case.seq_length, "train_iters": 1 << 20, "device": "cpu", "params_dtype": "fp32"}
        flags |= self.way.flags | self.case.flags
        if flags.get("offload_granularity") == "tile":
            flags["offload_tiles"] = self.case.seq_length // TILE
        if flags["offload_alpha"] != "off" and self.host_bytes is not None:
            flags["offload_host_memory_gib"] = self.host_bytes / GIB
        if flags["offload_alpha"] == "auto":
            flags["layer_profile"] = self.profile
            if self.device_bytes is not None:
                flags["device_memory_gib"] = self.device_bytes / GIB
        return flags


@dataclass(frozen=True)
class Turns:
    """What a process of the scaled node does whenever it is its turn, and what it tells at the end of all turns."""

    turn: Callable[[], dict[str, Any]]
    end: Callable[[], dict[str, Any]]


@contextlib.contextmanager
def way_turns(work: Work) -> Iterator[Turns]:
    """Each turn is a step of one way, after those that warm up."""
    case, copies = work.case, PacedCopies(work.link_bytes_per_s, work.host_bytes)
    way = work.way
    with contextlib.ExitStack() as stack:
        stack.enter_context(
            mock.patch.object(build, "make_backend", lambda *args, **more: PacedStreams(work.link_bytes_per_s))
        )
        stack.enter_context(tried())
        counter = AllocatedBytes()
        trainer = stack.enter_context(Trainer(case.model, **work.flags))
        way.prepare(trainer, copies)
        if work.limit_bytes is not None:  # only now: to time a real GPU's link takes memory, which is much on this node
            counter.limit(work.limit_bytes)
        stack.enter_context(way.around(trainer, copies))
        for _ in range(case.warmup):
            trainer.step()
        counter.take_peak_bytes()
        last: dict[str, Any] = {}

        def turn() -> dict[str, Any]:
            record = trainer.step()
            last.update(loss=record.lm_loss, host_bytes=(record.host_records_bytes or 0) + copies.peak_bytes)
            return {"step_s": record.step_time_s, "hidden_share": record.hidden_share}

        def end() -> dict[str, Any]:
            moved = trainer.parts.chosen_swap
            return {
                **last,
                "device_peak_bytes": counter.take_peak_bytes(),
                "moves": None if moved is None else moved.solution.tiles,
                "limit": None if moved is None else str(moved.solution.limit),
                "stays": moved is not None and trainer.parts.swap is None,
            }

        yield Turns(turn, end)
