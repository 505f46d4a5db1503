"""What the rehearsal of one rank found, as its process hands it on."""

import dataclasses
from dataclasses import dataclass
from typing import Literal

from memo.artifacts import files
from memo.artifacts.fields import Count, NonNegativeFloat, PositiveFloat, build
from memo.artifacts.reading import Source
from memo.errors import ArtifactError
from memo.estimate.rank_memory import RankMemory

SCHEMA, VERSION = "rehearsed", 1


@dataclass(frozen=True)
class Waits:
    """How often the host waits for the device in one step at one place.

    Attributes:
        what: the call of CUDA's runtime.
        where: functions of memo, innermost first.
    """

    count: Count
    what: str
    where: tuple[str, ...]


@dataclass(frozen=True)
class Times:
    """Of one step, as memo.artifacts.run_log.StepRecord has them, on the clock of the emulated GPU: all modelled."""

    step_time_s: PositiveFloat
    tgs: NonNegativeFloat
    mfu_percent: NonNegativeFloat
    hidden_share: NonNegativeFloat | None


@dataclass(frozen=True)
class Steady:
    """Of the steps after the first.

    Attributes:
        allocated_bytes, reserved_bytes: of the device, the most at any time, as torch.cuda.memory_stats tells.
        num_device_mallocs: calls that take memory of the device.
        num_alloc_retries: how often torch's allocator found no memory and gave back what it held unused.
        waits: in the last step.
        times: of the last step; None where the emulated GPU has no clock.
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
    """How a plan of --memory-planner went, in all steps; `reason`: why there is none, or what is not as planned."""

    hits: Count = 0
    fallbacks: Count = 0
    arena_bytes: Count = 0
    bound_bytes: Count = 0
    reason: str = ""


@dataclass(frozen=True)
class Shortage:
    """Memory ran out, which is an answer.

    Attributes:
        when: such as "in step 1".
        missing_bytes: what the request that failed lacked at least; None where it is not told.
        message: memo's own, with what helps.
    """

    memory: Literal["device", "host"]
    when: str
    message: str
    missing_bytes: Count | None = None


@dataclass(frozen=True)
class Rehearsed:
    """One rank.

    Attributes:
        device_bytes: of the emulated GPU, as torch tells it.
        host_bytes: of the emulated node that are this rank's.
        foreseen: memo's account of the same rank (memo.estimate.own_memory).
        tiles: what a swap plan moves, by group; None: nothing.
        layer_times: where the times come from that --offload-alpha auto decides by; "" where nothing asks for them.
        refusal: why `memo train` would not start it without --no-admission.
        steady: None where memory ran out before.
        trace: the file of one more step.
        took_s: on this machine, all in all.
    """

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
    shortage: Shortage | None = None
    trace: str | None = None

    def save(self, path: str) -> None:
        """Raises ArtifactError for a path that cannot be written."""
        files.write(path, SCHEMA, VERSION, dataclasses.asdict(self))

    @classmethod
    def load(cls, path: str) -> "Rehearsed":
        """Raises ArtifactError for what `save` did not write."""
        return build(cls, files.read(path, SCHEMA, VERSION), Source(path, ArtifactError, "rehearse again"))
