"""One step of a configuration twice: simulated on the engine, and run by the executor on virtual streams.

Both give the copies of one pipeline stage in the order of their issue, stream by stream. Layers of the run are stubs.
The layer of a copy is read from the copied bytes, so a copy of a wrong layer's bytes is found.
"""

import re
from dataclasses import dataclass, field, replace

import torch
from state_runs import StateRun
from swap_runs import CPU, Forwarding
from torch import Tensor

from memo.config import RunConfig
from memo.estimate.hardware_files import HARDWARE
from memo.executor.cpu_streams import VirtualStreams
from memo.executor.host_records import HostRecords
from memo.executor.streams import Stream, StreamBackend
from memo.executor.swapper import Swapper
from memo.mesh import Mesh, RankGrid
from memo.planner.swap import swap_plan
from memo.simulate.model import StepModel, step_model
from memo.simulate.trace import Span, simulate
from memo.spec.layer_ops import LayerOp, stage_ops
from memo.spec.parameters import layer_parameters
from memo.spec.placement import placement_of

MACHINE = replace(HARDWARE["a800-80"], offload_gb_per_s=1e-9, prefetch_gb_per_s=1e-9)
"""One byte a second in each direction: seconds of copies are their bytes."""


@dataclass(frozen=True)
class Copied:
    """One copy. `of`: its layer; for activations its microbatch and layer."""

    kind: str
    of: int | tuple[int, int]
    num_bytes: int


Copies = dict[str, list[Copied]]
"""Copies by stream: offload, prefetch."""


def on_engine(model: StepModel) -> list[Copies]:
    """Return the copies that the simulator issues, by stage, without those of embedding and head."""
    found: list[Copies] = [{"offload": [], "prefetch": []} for _ in range(model.pipeline.stages)]
    for span in sorted(simulate(model).spans, key=lambda span: span.start_s):
        if span.row in ("offload", "prefetch") and not span.name.endswith(" ends"):
            found[span.stage][span.row].append(_of_span(span))
    return found


def _of_span(span: Span) -> Copied:
    num_bytes = round(span.end_s - span.start_s)
    if ":" in span.name:
        microbatch, layer = map(int, span.name.split(":"))
        return Copied("activations", (microbatch, layer), num_bytes)
    kind, layer_name = span.name.split()
    return Copied(kind, int(layer_name), num_bytes)


def on_streams(config: RunConfig, world_size: int, stage: int, model: StepModel) -> Copies:
    """Return the copies that the executor issues on a rank of a stage; data parallelism is simulated."""
    ops = stage_ops(model.pipeline, stage, config.model.num_layers)
    return _Run(config, world_size, ops, round(model.times.offload_s)).copies()


@dataclass
class _Logged(Forwarding):
    """A backend that keeps the copies between host and device."""

    run: "_Run"
    log: Copies = field(default_factory=lambda: {"offload": [], "prefetch": []})

    def copy(self, stream: Stream, dst: Tensor, src: Tensor, dst_name: str, src_name: str) -> None:
        self.backend.copy(stream, dst, src, dst_name, src_name)
        is_cast = re.fullmatch(r"masters \d+", src_name) is not None  # from one place of the device to another
        is_end = ".embedding." in src_name + dst_name
        if src_name != "poison" and not (is_cast or is_end):
            self.log[stream.value].append(self.run.copied(dst_name, src_name, src))


class _Run(StateRun):
    """Stub layers, which write their number into their slot of activations, and into the gradient that they add to."""

    def __init__(self, config: RunConfig, world_size: int, ops: list[LayerOp], moved_bytes: int) -> None:
        shards, per_layer = world_size // config.parallel.pp, layer_parameters(config.model)
        size = per_layer.split + per_layer.replicated
        backend: StreamBackend = VirtualStreams()
        self.logged = _Logged(backend, self)
        super().__init__(
            ops,
            placement_of(config, world_size),
            self.logged,
            Mesh(RankGrid(dp=shards), 0),
            sizes=(size,),
            bucket_size=size,
            training=config.training,
        )
        self.layers = sorted(self.positions)
        self.swapper: Swapper | None = None
        if moved_bytes:
            plan = swap_plan(ops)
            slots = [torch.zeros(moved_bytes, dtype=torch.uint8) for _ in range(plan.num_slots)]
            records = HostRecords(plan, moved_bytes, CPU, self.logged)
            self.swapper = Swapper(plan, slots, moved_bytes, records, self.logged)

    def copies(self) -> Copies:
        """Of the second step, which begins with the weights that the first one has updated."""
        self.step()
        self.logged.log = {"offload": [], "prefetch": []}
        if self.swapper is not None:
            self.swapper.reset()
        self.step()
        return self.logged.log

    def copied(self, dst_name: str, src_name: str, src: Tensor) -> Copied:
        if src_name.startswith(("slot", "record")):
            return Copied("activations", (int(src[0]), int(src[1])), src.nbytes)
        weights = re.fullmatch(r"(?:host weights|masters) of \d+\.layers\.(\d+)\..*", src_name)
        uploaded = re.fullmatch(r"weights of \d+\.layers\.(\d+)\..*", dst_name)
        named = weights or uploaded
        if named:
            return Copied("weights", self.layers[int(named[1])], src.nbytes)
        return Copied("gradient", round(float(src[0] / src[1])) - 1, src.nbytes)

    def _run(self, op: LayerOp) -> None:
        if self.swapper is not None:
            slot = self.swapper.slots[self.swapper.begin(op.kind, op.layer)]
            if op.kind == "F":
                slot[0], slot[1] = op.microbatch, op.layer
            assert (int(slot[0]), int(slot[1])) == op.key
            self.swapper.end(op.kind, op.layer)
        if op.kind == "B":
            for weight in self._layer(op.layer).weights:
                gradient = self.data_parallel.main_gradients.main_gradient(weight)
                gradient[0] += op.layer + 1
                gradient[1] += 1
                self.data_parallel.main_gradients.gradient_done(weight)


def modelled(config: RunConfig, world_size: int) -> StepModel:
    return step_model(config, world_size, MACHINE)
