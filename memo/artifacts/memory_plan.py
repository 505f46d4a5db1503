"""The address of every memory request of one training iteration, as the planned allocator serves them.

The arena is one block of memory. Within a phase requests are served in order; where a phase begins, the
allocator finds its place again. Requests below `min_bytes` are not planned, and neither planned nor counted.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

from memo.artifacts import files
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

    num_bytes: int
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
                PlannedPhase(str(p["kind"]), int(p["layer"]), int(p["microbatch"]), tuple(map(_request, p["requests"])))
                for p in body["phases"]
            )
            return cls(**{name: _scalar(name, body[name]) for name in _SCALARS}, phases=phases)
        except (KeyError, TypeError, ValueError) as error:
            raise ArtifactError(f"{path}: a field is missing or wrong ({error!r}): solve the trace again") from None


_SCALARS = ("device", "planner", "alignment_bytes", "min_bytes", "arena_bytes", "lower_bound_bytes", "proof")


def _scalar(name: str, value: Any) -> Any:
    if (type(value) is not int) if name.endswith("_bytes") else (type(value) is not str):
        raise ValueError(f"{name} is {value!r}")
    if name == "proof" and value not in get_args(Proof):
        raise ValueError(f"proof is {value!r}")
    return value


def _request(entry: list[Any]) -> PlannedRequest:
    if len(entry) != 3 or any(type(number) is not int for number in entry):
        raise ValueError(f"{entry} is not a size, an offset and an end")
    return PlannedRequest(*entry)


def _names(phase: PlannedPhase) -> dict[str, str | int]:
    return {"kind": phase.kind, "layer": phase.layer, "microbatch": phase.microbatch}
