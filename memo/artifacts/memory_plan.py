"""The address of every memory request of one training iteration, as the planned allocator serves them.

The arena is one block of memory. Within a phase requests are served in order; where a phase begins, the
allocator finds its place again. Requests below `min_bytes` are not planned, and neither planned nor counted.
"""

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

from memo.artifacts import files
from memo.artifacts.fields import Count, PositiveInt, build
from memo.artifacts.reading import Source
from memo.errors import ArtifactError

SCHEMA, VERSION = "memory_plan", 1
NATIVE = -1
"""Offset of a request that the native allocator serves, because it outlives the iteration."""

OUTLIVES = -1

Proof = Literal["optimal", "feasible", "timed out"]


class PlannedRequest(NamedTuple):
    """A block of the arena, from its turn among all requests of the plan until `end` of them were made.

    `end` is for drawings: the allocator serves by order and address alone. OUTLIVES: not freed in the iteration.
    """

    num_bytes: Count
    offset_bytes: int
    end: int = OUTLIVES


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
        planner: whose addresses these are: "paper" (in two levels), "sections" (likewise, with phases cut) or "flat"
            (all at once).
        alignment_bytes: of every offset.
        arena_bytes: the planned peak, what is reserved before training.
        lower_bound_bytes: proven: no plan takes less. The most bytes that live at once, or what a solver proved.
        proof: optimal: the arena meets the bound; feasible: it does not, and no search was cut short; timed out: it
            does not, and a longer search might do better.
    """

    device: str
    planner: str
    alignment_bytes: PositiveInt
    min_bytes: Count
    arena_bytes: Count
    lower_bound_bytes: Count
    proof: Proof
    phases: tuple[PlannedPhase, ...]

    def save(self, path: str | Path) -> None:
        files.write(path, SCHEMA, VERSION, dataclasses.asdict(self))

    @classmethod
    def load(cls, path: str | Path) -> "MemoryPlan":
        """Raises ArtifactError for anything but a memory plan; memo.planner checks the addresses."""
        source = Source(str(path), ArtifactError, "solve the trace again")
        return build(cls, files.read(path, SCHEMA, VERSION), source)
