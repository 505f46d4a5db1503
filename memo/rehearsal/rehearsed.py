"""The result of the rehearsal of one rank, as a file that its process writes."""

from dataclasses import dataclass
from typing import Literal

from memo.artifacts.artifact import Artifact
from memo.artifacts.fields import Count, NonNegativeFloat, PositiveFloat
from memo.estimate.rank_memory import RankMemory


@dataclass(frozen=True)
class Waits:
    """The number of the host's waits for the device in one step at one place: `what` is the call of CUDA's runtime that
    waits, `where` the functions of memo on the stack, innermost first."""

    count: Count
    what: str
    where: tuple[str, ...]


@dataclass(frozen=True)
class Times:
    """Modelled times of one step, on the clock of the emulated GPU; see memo.artifacts.run_log.StepRecord."""

    step_time_s: PositiveFloat
    tgs: NonNegativeFloat
    mfu_percent: NonNegativeFloat | None
    hidden_share: NonNegativeFloat | None


@dataclass(frozen=True)
class Steady:
    """Measurements of the steps after the first ones, in which memory is allocated for good and planned.

    Attributes:
        allocated_bytes, reserved_bytes: peaks of device memory, from torch.cuda.memory_stats.
        pinned_bytes: pinned host memory.
        num_device_mallocs: number of calls that allocate device memory.
        num_alloc_retries: how often torch's allocator found no memory and gave back cached blocks.
        waits: waits of the host in the last step.
        times: times of the last step; None if the emulated GPU has no virtual clock.
    """

    allocated_bytes: Count
    reserved_bytes: Count
    pinned_bytes: Count
    num_device_mallocs: Count
    num_alloc_retries: Count
    waits: tuple[Waits, ...]
    times: Times | None = None


@dataclass(frozen=True)
class Planned:
    """How well all steps followed a plan of --memory-planner; `reason`: why there is none, or what differed from it."""

    hits: Count = 0
    fallbacks: Count = 0
    arena_bytes: Count = 0
    bound_bytes: Count = 0
    reason: str = ""


@dataclass(frozen=True)
class RehearsalShortage:
    """A rehearsal in which memory ran out.

    Attributes:
        memory: which memory ran out.
        when: the time, such as "in step 1".
        missing_bytes: the least that the failed request lacked; None if it is not known, or if enough memory is free
            but in pieces.
        message: memo's message, with a remedy.
    """

    memory: Literal["device", "host"]
    when: str
    message: str
    missing_bytes: Count | None = None


@dataclass(frozen=True)
class Rehearsed(Artifact):
    """The result for one rank.

    Attributes:
        device_bytes: memory of the emulated GPU, as torch reports it.
        host_bytes: the rank's share of the host memory of the emulated node.
        foreseen: memo's forecast for this rank (memo.estimate.memory_account).
        tiles: tiles that a swap plan moves, by group; None if nothing moves.
        layer_times: source of the times on which --offload-alpha auto is based; "" if none are needed.
        refusal: why `memo train` would not start the run without --no-admission; None if it would.
        steady: measurements; None if memory ran out before.
        trace: the file of the traced step.
        took_s: seconds of the whole rehearsal on this machine.
    """

    schema = "rehearsed"
    remedy = "rehearse again"

    rank: Count
    stage: Count
    device_bytes: Count
    host_bytes: Count
    foreseen: RankMemory
    parameters: Count
    attention: str
    took_s: NonNegativeFloat
    tiles: dict[str, int] | None = None
    layer_times: str = ""
    refusal: str | None = None
    steady: Steady | None = None
    planned: Planned | None = None
    shortage: RehearsalShortage | None = None
    trace: str | None = None
