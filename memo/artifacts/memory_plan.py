"""The address of every memory request of one training iteration, as the planned allocator serves them.

The arena is one block of memory. Within a phase requests are served in order; where a phase begins, the
allocator finds its place again. Requests below `min_bytes` are not planned, and neither planned nor counted.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

from memo.artifacts import files
from memo.errors import ArtifactError

SCHEMA, VERSION = "memory_plan", 1
NATIVE = -1
"""Offset of a request that the native allocator serves, because it outlives the iteration."""

Proof = Literal["optimal", "feasible", "timed out"]


class PlannedRequest(NamedTuple):
    num_bytes: int
    offset_bytes: int


@dataclass(frozen=True)
class PlannedPhase:
    """The requests of at least min_bytes of one phase, in order; fields as in memo.artifacts.trace.Phase."""

    kind: str
    layer: int
    microbatch: int
    requests: tuple[PlannedRequest, ...]


@dataclass(frozen=True)
class MemoryPlan:
    """One rank.

    Attributes:
        device: "cpu" or "cuda".
        planner: "paper" (two levels), "auto" or "flat".
        alignment_bytes: of every offset.
        arena_bytes: the planned peak, what is reserved before training.
        lower_bound_bytes: no plan can take less: the most bytes that live at once.
        proof: optimal: none takes less; feasible: at most arena - lower bound less; timed out: as feasible, and
            the solver was stopped.
    """

    device: str
    planner: str
    alignment_bytes: int
    min_bytes: int
    arena_bytes: int
    lower_bound_bytes: int
    proof: Proof
    phases: tuple[PlannedPhase, ...]

    def save(self, path: str | Path) -> None:
        body = {name: getattr(self, name) for name in _SCALARS}
        phases = [{**_names(phase), "requests": [list(r) for r in phase.requests]} for phase in self.phases]
        files.write(path, SCHEMA, VERSION, {**body, "phases": phases})

    @classmethod
    def load(cls, path: str | Path) -> "MemoryPlan":
        """Raises ArtifactError for anything but a memory plan; memo.planner checks the addresses."""
        body = files.read(path, SCHEMA, VERSION)
        try:
            phases = tuple(
                PlannedPhase(p["kind"], p["layer"], p["microbatch"], tuple(PlannedRequest(*r) for r in p["requests"]))
                for p in body["phases"]
            )
            return cls(**{name: body[name] for name in _SCALARS}, phases=phases)
        except (KeyError, TypeError) as error:
            raise ArtifactError(f"{path}: a field is missing or wrong ({error!r}): solve the trace again") from None


_SCALARS = ("device", "planner", "alignment_bytes", "min_bytes", "arena_bytes", "lower_bound_bytes", "proof")


def _names(phase: PlannedPhase) -> dict[str, str | int]:
    return {"kind": phase.kind, "layer": phase.layer, "microbatch": phase.microbatch}
