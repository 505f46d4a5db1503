"""Records the work of a rank and its messages, for a model that is already built.

    with record_work(mesh.watch, chunks, backend) as recorder:
        ...  # training steps
    spans = recorder.spans()

During the recording, embedding, layers and loss have hooks, and process groups notify the recorder of messages
(memo.mesh.group). Both take timestamps of the compute stream. On CUDA these are events, which only `spans` reads, so
that recording never makes the host wait for the device. The time of a message is measured on the compute stream, from
its issue to the end of the wait for it.
"""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from memo.executor.marks import on_backward
from memo.executor.streams import Stream, StreamBackend, Timestamp
from memo.mesh import Watch
from memo.report.timeline import WorkSpan


@dataclass
class _OpenSpan:
    """A span that has begun; `waited_from` is None until the rank waits for its end."""

    recorder: "WorkRecorder"
    row: str
    name: str
    num_bytes: int
    begun: Timestamp
    waited_from: Timestamp | None = None
    ended: Timestamp | None = None

    def waits(self) -> None:
        if self.waited_from is None:
            self.waited_from = self.recorder.now()

    def end(self) -> None:
        self.ended = self.recorder.now()


class WorkRecorder:
    """A listener that keeps all spans; see `record_work`."""

    def __init__(self, backend: StreamBackend) -> None:
        self.backend = backend
        self.origin = self.now()
        self._seen: list[_OpenSpan] = []

    def now(self) -> Timestamp:
        return self.backend.timestamp(Stream.COMPUTE)

    def begin(self, row: str, name: str, num_bytes: int = 0) -> _OpenSpan:
        span = _OpenSpan(self, row, name, num_bytes, self.now())
        self._seen.append(span)
        return span

    def spans(self) -> list[WorkSpan]:
        """All spans that have ended, in the order of their begin; waits for the device."""
        self.backend.synchronize()
        return [self._span(seen, seen.ended) for seen in self._seen if seen.ended is not None]

    def _span(self, seen: _OpenSpan, ended: Timestamp) -> WorkSpan:
        start_s, end_s = (at.seconds_since(self.origin) for at in (seen.begun, ended))
        still_s = 0.0 if seen.waited_from is None else ended.seconds_since(seen.waited_from)
        return WorkSpan(seen.row, seen.name, start_s, end_s, seen.num_bytes, still_s)


@contextlib.contextmanager
def record_work(
    watch: Watch, chunks: Sequence[Any], backend: StreamBackend, layers: bool = True
) -> Iterator[WorkRecorder]:
    """Record one rank's work until the end of the block, which must begin and end between two training steps.

    Args:
        chunks: the chunks of the model on this rank (memo.model.transformer), possibly with wrapped modules.
        backend: used only for its timestamps.
        layers: False if memo.executor.recorder records the layers.

    Recording does not change any result: it only adds views to the graph of autograd.
    """
    recorder = WorkRecorder(backend)
    handles: list[RemovableHandle] = []
    watch.listener = recorder
    try:
        for module, name in _parts(chunks, layers):
            handles += _Hooks(recorder, watch, name).attach(module)
        yield recorder
    finally:
        watch.listener = None
        for handle in handles:
            handle.remove()


def _parts(chunks: Sequence[Any], layers: bool) -> Iterator[tuple[nn.Module, str]]:
    for chunk in chunks:
        if chunk.embedding is not None:
            yield chunk.embedding, " embedding"
        if layers:
            for index, layer in zip(chunk.layer_indices, chunk.layers, strict=True):
                yield layer, f":{index}"
        if chunk.head is not None:
            yield chunk.head, " loss"


class _Hooks:
    """Records begin and end of one module's forwards and backwards; evaluation is not recorded."""

    def __init__(self, recorder: WorkRecorder, watch: Watch, name: str) -> None:
        self.recorder, self.watch, self.name = recorder, watch, name
        self._forward: _OpenSpan | None = None
        self._backward: _OpenSpan | None = None

    def attach(self, module: nn.Module) -> list[RemovableHandle]:
        return [module.register_forward_pre_hook(self._before), module.register_forward_hook(self._after)]

    def _before(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        if not torch.is_grad_enabled():
            return None
        first = args[0]
        if isinstance(first, Tensor) and first.requires_grad:
            first = on_backward(first, self._end_backward)
        self._forward = self.recorder.begin("compute", f"F{self.watch.microbatch}{self.name}")
        return first, *args[1:]

    def _after(self, module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor | None:
        if self._forward is None:
            return None
        self._forward.end()
        self._forward = None
        return on_backward(output, self._begin_backward)

    def _begin_backward(self) -> None:
        self._backward = self.recorder.begin("compute", f"B{self.watch.microbatch}{self.name}")
        # A module without a gradient to pass on, such as the embedding, ends with the whole backward.
        engine = torch.autograd.Variable._execution_engine
        engine.queue_callback(self._end_backward)

    def _end_backward(self) -> None:
        if self._backward is not None:
            self._backward.end()
            self._backward = None
