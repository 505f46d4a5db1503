"""The order in which a stage issues its messages, under NCCL's rules: no stage waits for ever.

torch has one stream for each process group that it connected at once, as those of memo are: messages of a group run one
after the other, whoever they go to. A message begins when what its rank had computed at its issue is done, and ends
together with its other end, so a rank may wait within a group for another neighbour. The calls are those that
memo.parallel.pipeline really makes; `simulate` (memo.spec.schedule) knows nothing of streams.
"""

from collections import Counter, defaultdict, deque
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from memo.mesh import Watch
from memo.parallel.pipeline import PipelineStage
from memo.parallel.stage_messages import Wire
from memo.spec.schedule import Pipeline, forward_only, one_f_one_b

SHAPE = (1, 1, 1)
WIRE = Wire(SHAPE, torch.float32, torch.device("cpu"))
LINKS = ("pp_forward", "pp_backward", "pp_wrap_forward", "pp_wrap_backward")
COMPUTE = "compute"
PIPELINES = [
    *(Pipeline(stages, 1, count) for stages in (2, 3, 4, 8) for count in (1, 2, 4, 8, 16)),
    *(Pipeline(stages, chunks, stages * rounds) for stages in (2, 4) for chunks in (2, 3) for rounds in (1, 2, 4)),
]


@dataclass
class Item:
    """One entry of a stream: a message, with its end at another stage, or what the rank computes."""

    stream: str
    end: tuple[Any, ...] | None = None
    """(source stage, target stage, group, number among these) of a message."""
    after: "Item | None" = None
    """Must be done before."""
    begun: bool = False
    done: bool = False


@dataclass
class Recorder:
    """Takes the place of torch.distributed for one stage, and notes what lies on each of its streams."""

    stage: int
    streams: dict[str, deque[Item]] = field(default_factory=lambda: defaultdict(deque))
    counts: Counter[Any] = field(default_factory=Counter)

    def compute(self, after: Item | None = None) -> None:
        self.streams[COMPUTE].append(Item(COMPUTE, after=after))

    def irecv(self, buffer: Tensor, group: str, group_src: int) -> Any:
        buffer.fill_(1.0)
        return self._message(group, (group_src, self.stage, group))

    def isend(self, tensor: Tensor, group: str, group_dst: int) -> Any:
        return self._message(group, (self.stage, group_dst, group))

    def _message(self, group: str, way: tuple[int, int, str]) -> Any:
        queued = self.streams[COMPUTE]
        item = Item(group, (*way, self.counts[way]), queued[-1] if queued else None)
        self.counts[way] += 1
        self.streams[group].append(item)
        return SimpleNamespace(wait=lambda: self.compute(after=item))


def issued(
    pipeline: Pipeline, stage: int, make_schedule: Any, groups: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> Recorder:
    """What a stage puts on its streams in one step."""
    recorder, scale = Recorder(stage), torch.ones((), requires_grad=True)
    backward = torch.autograd.backward

    def forward(hidden: Tensor | None, microbatch: int) -> Tensor:
        recorder.compute()
        return (torch.ones(SHAPE) if hidden is None else hidden) * scale

    def counted(*args: Any) -> None:
        recorder.compute()
        backward(*args)

    chunks: list[Any] = [forward] * pipeline.chunks
    if stage == pipeline.stages - 1:
        chunks[-1] = lambda hidden, microbatch: forward(hidden, microbatch).sum()
    mesh: Any = SimpleNamespace(at=SimpleNamespace(pp=stage), watch=Watch(), **groups)
    with monkeypatch.context() as patch:
        patch.setattr("memo.parallel.collectives.dist", recorder)
        patch.setattr(torch.autograd, "backward", counted)
        PipelineStage(pipeline, mesh, WIRE).run(make_schedule(pipeline, stage), chunks)
    return recorder


def stuck(recorders: list[Recorder]) -> list[Item]:
    """What is left where nothing can go on."""
    streams = [stream for recorder in recorders for stream in recorder.streams.values()]
    met: dict[Any, list[Item]] = defaultdict(list)  # both ends of each message, once they have begun
    while any(_advance(stream, met) for stream in streams):
        pass
    return [item for stream in streams for item in stream]


def _advance(stream: deque[Item], met: dict[Any, list[Item]]) -> bool:
    """Whether something of the stream began or ended."""
    moved = False
    while stream:
        head = stream[0]
        if not head.begun and (head.after is None or head.after.done):
            head.begun = moved = True
            met[head.end].append(head)
        if not head.begun or (head.end is not None and len(met[head.end]) < 2):
            return moved
        head.done = moved = True
        stream.popleft()
    return moved


@pytest.mark.parametrize("make_schedule", [one_f_one_b, lambda pipeline, stage: forward_only(pipeline)])
@pytest.mark.parametrize("pipeline", PIPELINES, ids=str)
def test_every_message_ends(monkeypatch: pytest.MonkeyPatch, pipeline: Pipeline, make_schedule: Any) -> None:
    groups = {name: name for name in LINKS}
    stages = range(pipeline.stages)
    assert stuck([issued(pipeline, stage, make_schedule, groups, monkeypatch) for stage in stages]) == []


def test_both_directions_on_one_stream_would_wait_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the test above could not fail."""
    groups = dict.fromkeys(LINKS, "pp")
    left = stuck([issued(Pipeline(2, 1, 4), stage, one_f_one_b, groups, monkeypatch) for stage in (0, 1)])
    assert {item.stream for item in left} == {COMPUTE, "pp"}
