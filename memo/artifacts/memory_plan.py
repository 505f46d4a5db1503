"""The address of every memory request of one training iteration, for the planned allocator.

The arena is one block of memory. Within a phase requests are served in order. At the beginning of a phase the allocator
resumes at the phase's first request, even if requests of earlier phases differed from the plan. Requests below
`min_bytes` are neither planned nor counted.
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple

from memo.artifacts.artifact import Artifact
from memo.artifacts.fields import Count, PositiveInt

NATIVE = -1
"""The offset of a request that the native allocator serves, because it outlives the iteration."""

OUTLIVES = -1

Proof = Literal["optimal", "feasible", "timed out"]


class PlannedRequest(NamedTuple):
    """A block of the arena, alive from its request until `end` requests of the plan have been made.

    `end` is for drawings; the allocator uses only order and address. It is OUTLIVES for a block that is not freed in
    the iteration.
    """

    num_bytes: Count
    offset_bytes: int
    end: int = OUTLIVES


@dataclass(frozen=True)
class PlannedPhase:
    """The requests of at least min_bytes of one phase, in order; fields: see memo.artifacts.memory_trace.Phase."""

    kind: str
    layer: int
    microbatch: int
    requests: tuple[PlannedRequest, ...]


@dataclass(frozen=True)
class MemoryPlan(Artifact):
    """The plan of one rank; memo.planner.memory.plan_check checks its addresses.

    Attributes:
        device: "cpu" or "cuda".
        planner: how the addresses were found: "paper" (in two levels), "sections" (in two levels, with phases cut) or
            "flat" (all at once).
        alignment_bytes: alignment of every offset.
        arena_bytes: the planned peak, which is reserved before training.
        lower_bound_bytes: a proven lower bound of the arena of any plan: the most bytes alive at once, or a solver's
            bound.
        proof: "optimal" if the arena equals the bound; "feasible" if it does not and no search was cut short; "timed
            out" if it does not and a longer search might find a better plan.
    """

    schema = "memory_plan"
    remedy = "solve the trace again"

    device: str
    planner: str
    alignment_bytes: PositiveInt
    min_bytes: Count
    arena_bytes: Count
    lower_bound_bytes: Count
    proof: Proof
    phases: tuple[PlannedPhase, ...]
