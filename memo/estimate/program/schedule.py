"""The order of (interleaved) 1F1B, from which follows what is in flight: memo.spec.schedule, which lies higher."""

from typing import NamedTuple


class Action(NamedTuple):
    """Forward ("F") or backward ("B") of one microbatch through one chunk of the stage."""

    kind: str
    microbatch: int
    chunk: int


def actions_of_stage(pp: int, vpp: int, microbatches: int, stage: int) -> list[Action]:
    """Warm-up forwards, one forward and one backward in turn, then the backwards that remain."""
    count = microbatches * vpp
    forwards = [_forward(index, pp, vpp) for index in range(count)]
    backwards = [Action("B", action.microbatch, vpp - 1 - action.chunk) for action in forwards]
    late = pp - 1 - stage
    warmup = min(late if vpp == 1 else 2 * late + (vpp - 1) * pp, count)
    steady = [action for pair in zip(forwards[warmup:], backwards, strict=False) for action in pair]
    return forwards[:warmup] + steady + backwards[count - warmup :]


def _forward(index: int, pp: int, vpp: int) -> Action:
    if vpp == 1:
        return Action("F", index, 0)
    group, within = divmod(index, pp * vpp)
    chunk, offset = divmod(within, pp)
    return Action("F", group * pp + offset, chunk)
