"""The pipeline runtime: how much is in flight, and what is kept.

Losses and gradients of pipelines are those of one process in tests/distributed/test_layouts.py.
"""

import weakref
from collections import Counter
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from memo.mesh import Watch
from memo.parallel.pipeline import PipelineStage
from memo.parallel.stage_messages import Wire
from memo.spec.schedule import Pipeline, forward_only, one_f_one_b

SHAPE = (3, 1, 2)
WIRE = Wire(SHAPE, torch.float64, torch.device("cpu"))


class FakeLinks:
    """Takes the place of torch.distributed and counts what is in flight."""

    def __init__(self) -> None:
        self.in_flight: Counter[Any] = Counter()
        self.most: Counter[Any] = Counter()
        self.posted = 0

    def irecv(self, buffer: Tensor, group: str, group_src: int) -> "FakeWork":
        buffer.fill_(1.0)
        return self._start("receive")

    def isend(self, tensor: Tensor, group: str, group_dst: int) -> "FakeWork":
        assert tensor.shape == SHAPE and not tensor.requires_grad
        return self._start(("send", group_dst, group))

    def _start(self, kind: Any) -> "FakeWork":
        self.posted += 1
        self.in_flight[kind] += 1
        self.most[kind] = max(self.most[kind], self.in_flight[kind])
        return FakeWork(self, kind)


class FakeWork:
    def __init__(self, links: FakeLinks, kind: Any) -> None:
        self.links, self.kind = links, kind

    def wait(self) -> None:
        self.links.in_flight[self.kind] -= 1


def fake_mesh(stage: int) -> Any:
    names = ("pp_forward", "pp_backward", "pp_wrap_forward", "pp_wrap_backward")
    return SimpleNamespace(at=SimpleNamespace(pp=stage), watch=Watch(), **{name: name for name in names})


@pytest.mark.parametrize("make_schedule", [one_f_one_b, lambda pipeline, stage: forward_only(pipeline)])
@pytest.mark.parametrize("pipeline", [Pipeline(4, 1, 16), Pipeline(3, 2, 12), Pipeline(2, 3, 8)], ids=str)
def test_buffers_in_flight_do_not_grow_with_microbatches(
    monkeypatch: pytest.MonkeyPatch, pipeline: Pipeline, make_schedule: Any
) -> None:
    for stage in range(pipeline.stages):
        links = FakeLinks()
        monkeypatch.setattr("memo.parallel.collectives.dist", links)
        scale = torch.ones((), dtype=torch.float64, requires_grad=True)
        graphs = set[bool]()

        def chunk(hidden: Tensor | None, microbatch: int, scale: Tensor = scale, graphs: set[bool] = graphs) -> Tensor:
            out = (torch.ones(SHAPE, dtype=torch.float64) if hidden is None else hidden) * scale
            graphs.add(out.requires_grad)
            return out

        def last(hidden: Tensor | None, microbatch: int, chunk: Any = chunk) -> Tensor:
            return chunk(hidden, microbatch).sum()

        is_last = stage == pipeline.stages - 1
        chunks = [chunk] * (pipeline.chunks - 1) + [last if is_last else chunk]
        actions = make_schedule(pipeline, stage)
        PipelineStage(pipeline, fake_mesh(stage), WIRE).run(actions, chunks)
        ends = (pipeline.source, pipeline.target)
        assert links.posted == sum(end(stage, a) is not None for a in actions for end in ends)
        # The receive of the next action is posted before this action waits for its own: one message travels while
        # another is used. Where no two actions in a row receive, there is one at a time, or none.
        receives = [pipeline.source(stage, action) is not None for action in actions]
        assert links.most["receive"] == max(sum(pair) for pair in pairwise(receives))
        assert all(count == 1 for kind, count in links.most.items() if kind != "receive")
        assert not any(links.in_flight.values())  # all waited for
        assert graphs == {make_schedule is one_f_one_b}  # forwards alone keep no graph


def test_outputs_go_once_they_are_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Backward needs the node that made an output, not its [n, b, h]: only the message in flight keeps one."""
    pipeline = Pipeline(4, 1, 16)
    monkeypatch.setattr("memo.parallel.collectives.dist", FakeLinks())
    scale = torch.ones((), dtype=torch.float64, requires_grad=True)
    outputs: list[weakref.ref[torch.UntypedStorage]] = []
    most = 0

    def chunk(hidden: Tensor | None, microbatch: int) -> Tensor:
        nonlocal most
        most = max(most, sum(output() is not None for output in outputs))
        output = torch.ones(SHAPE, dtype=torch.float64) * scale
        outputs.append(weakref.ref(output.untyped_storage()))
        return output

    PipelineStage(pipeline, fake_mesh(0), WIRE).run(one_f_one_b(pipeline, 0), [chunk])
    assert most == 1
