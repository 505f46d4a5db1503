"""The pipeline runtime: how much is in flight, results against a plain loop, and failures."""

import weakref
from collections import Counter
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch import Tensor

from memo.mesh import Mesh, RankGrid, Watch
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

        def chunk(hidden: Tensor | None, microbatch: int, scale: Tensor = scale) -> Tensor:
            return (torch.ones(SHAPE, dtype=torch.float64) if hidden is None else hidden) * scale

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


def _loss_and_gradients(pipeline: Pipeline, training: bool) -> tuple[float, list[Tensor | None], bool]:
    """Virtual stage i multiplies by w[i] and takes the sine; the loss is the sum. Also: was a graph kept?"""
    mesh = Mesh(RankGrid(pp=pipeline.stages), dist.get_rank())
    weights = [torch.tensor(1.0 + 0.1 * mesh.rank + i, dtype=torch.float64) for i in range(pipeline.chunks)]
    graphs = []

    def forward(chunk: int, hidden: Tensor | None, microbatch: int) -> Tensor:
        x = first_input(microbatch) if hidden is None else hidden
        out = torch.sin(x * weights[chunk].requires_grad_())
        graphs.append(out.requires_grad)
        is_last = pipeline.virtual_stage(mesh.rank, chunk) == pipeline.last_virtual_stage
        return out.sum() if is_last else out

    chunks = [lambda x, m, c=c: forward(c, x, m) for c in range(pipeline.chunks)]
    schedule = one_f_one_b if training else lambda pipeline, stage: forward_only(pipeline)
    loss = PipelineStage(pipeline, mesh, WIRE).run(schedule(pipeline, mesh.rank), chunks)
    return float(loss), [w.grad for w in weights], any(graphs)


def first_input(microbatch: int) -> Tensor:
    return torch.arange(6.0, dtype=torch.float64).view(SHAPE) + microbatch


@pytest.mark.parametrize("pipeline", [Pipeline(3, 1, 5), Pipeline(2, 2, 6)], ids=str)
def test_pipeline_gives_loss_and_gradients_of_a_plain_loop(pipeline: Pipeline) -> None:
    stages = [(s, c) for c in range(pipeline.chunks) for s in range(pipeline.stages)]
    weights = [torch.tensor(1.0 + 0.1 * s + c, dtype=torch.float64, requires_grad=True) for s, c in stages]
    total = torch.zeros((), dtype=torch.float64)
    for microbatch in range(pipeline.microbatches):
        x = first_input(microbatch)
        for weight in weights:
            x = torch.sin(x * weight)
        total = total + x.sum()
    total.backward()
    results = run_ranks(pipeline.stages, _loss_and_gradients, pipeline, True)
    assert [result[0] for result in results[:-1]] == [0.0] * (pipeline.stages - 1)
    assert results[-1][0] == pytest.approx(total.item(), rel=1e-14)
    for (stage, chunk), weight in zip(stages, weights, strict=True):
        torch.testing.assert_close(results[stage][1][chunk], weight.grad, rtol=1e-13, atol=0)


def test_forward_only_keeps_no_graph() -> None:
    results = run_ranks(2, _loss_and_gradients, Pipeline(2, 2, 4), False)
    assert results[-1][0] != 0.0
    assert not any(kept for _, _, kept in results)
    assert all(gradient is None for _, gradients, _ in results for gradient in gradients)
