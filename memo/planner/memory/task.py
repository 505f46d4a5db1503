"""The task of an exact solver in a process of its own, and the form of its answers."""

import json
import time
from dataclasses import dataclass
from typing import Any

import numpy as np

from memo.planner.memory.dsa import Instance, Ints


@dataclass(frozen=True)
class Task:
    """A problem for an exact solver, with everything in units.

    Attributes:
        offsets: the best offsets so far.
        bound: a proven bound of the peak.
        goal: a peak that is good enough, at least the bound.
        end_s: the time.time() at which the process is killed.
    """

    instance: Instance
    offsets: Ints
    bound: int
    goal: int
    end_s: float

    @property
    def peak(self) -> int:
        return self.instance.peak(self.offsets)

    def seconds_left(self) -> float:
        """The time for the solver; a twentieth is left for its answer."""
        return max(0.0, 0.95 * (self.end_s - time.time()))

    def as_json(self) -> str:
        arrays = {name: getattr(self.instance, name).tolist() for name in ("sizes", "lower", "upper")}
        rest = {"offsets": self.offsets.tolist(), "bound": self.bound, "goal": self.goal, "end_s": self.end_s}
        return json.dumps({**arrays, **rest})

    @classmethod
    def from_json(cls, text: str) -> "Task":
        body = json.loads(text)
        sizes, lower, upper, offsets = (
            np.array(body[name], dtype=np.int64) for name in ("sizes", "lower", "upper", "offsets")
        )
        instance = Instance(tuple(range(len(sizes))), sizes, lower, upper, int(upper.max()), unit_bytes=1)
        return cls(instance, offsets, body["bound"], body["goal"], body["end_s"])


def answer(**fields: Any) -> None:
    """Write one line for the parent process."""
    print(json.dumps(fields), flush=True)
