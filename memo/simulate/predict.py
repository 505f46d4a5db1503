"""The time of one training step, predicted from the configuration and the machine alone."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cache
from math import ceil
from typing import NamedTuple

from memo.config import RunConfig
from memo.config.derived import global_batch_size
from memo.estimate.hardware import Hardware
from memo.estimate.time_errors import StepParts
from memo.planner.solution import SwapSolution
from memo.simulate.cost import LayerCost
from memo.simulate.framework import MEMO, Framework
from memo.simulate.model import StepModel, step_model
from memo.simulate.parts import step_parts
from memo.simulate.stage import run_stages, update_stages
from memo.simulate.swapping import always_hidden, copies_s, moves_and_records
from memo.spec.clock import Clock, Op, run
from memo.spec.flops import model_flops_per_token
from memo.spec.schedule import Action, Pipeline
from memo.spec.steady import steady_microbatches, steady_period_s

_MOST_BREADTH_FIRST = 64
"""Most microbatches that are run breadth first; all further ones add the time of the last one."""

_LAG = 6
"""Additional microbatches per stage that are run if actions wait for copies: copies fall behind little by little, until
their rate alone counts."""
_LAG_OF_ONE = 2
"""The same for a single stage, where copies of activations do not fall behind: the last backward of a microbatch waits
for the last prefetch."""


@dataclass(frozen=True)
class StepPrediction:
    """One optimizer step.

    Attributes:
        tflops_per_gpu, mfu_percent, tgs: as training logs them: model FLOPs with the causal half of attention,
            nothing recomputed counted; MFU against the machine's peak; tokens per GPU and second.
        bubble_share: share of the pipeline's time that its stages spend waiting for each other, on average.
        hidden_share: share of the time of copies to and from host memory that passes under compute; 1 without copies.
        seconds: parts of step_time_s, averaged over the stages; they add up to it: matmul, attention, elementwise,
            tensor and context (collectives of tp and cp), host (waiting until the host starts kernels), recompute (all
            recomputation), copies (waiting for copies, and for updates on the CPU), pipeline (waiting for other
            stages), data (collectives of dp), optimizer.
        resources: seconds that each resource is busy in a step, on the stage that uses it most: compute, h2d and d2h
            (copies from and to host memory), cpu optimizer, dp link (collectives of dp), disk if activations lie on a
            disk. They overlap.
        parts: the parts from which its error is estimated (memo.estimate.time_errors).
        swap: what moves to host memory, planned for the first stage; None if no swap plan runs.
    """

    step_time_s: float
    tflops_per_gpu: float
    mfu_percent: float
    tgs: float
    bubble_share: float
    hidden_share: float
    seconds: dict[str, float]
    resources: dict[str, float]
    parts: StepParts = field(repr=False)
    swap: SwapSolution | None = None

    @property
    def binding(self) -> str:
        """The resource that is busy longest; no step can be shorter than its time."""
        return max(self.resources, key=lambda name: self.resources[name])


def predict_step(
    config: RunConfig,
    world_size: int,
    hardware: Hardware,
    alpha: float | Mapping[str, int] | None = None,
    framework: Framework = MEMO,
    layer: LayerCost | None = None,
) -> StepPrediction:
    """Predict one optimizer step of a checked configuration on `world_size` ranks of a machine.

    The schedule runs just enough microbatches to reach its steady phase; each further microbatch adds one period.
    If copies always hide, an action is one event. `memo.simulate.trace.simulate_step` runs every microbatch and layer.

    Args:
        alpha: share of the tokens whose activations move, or number of tiles by group, fitting or not; default: as in
            config.memory.
        framework: the framework that runs the step.
        layer: a result of `memo.simulate.layer`, swapped if config.memory swaps; default: computed.

    Known error: measured by benchmarks/simulator_accuracy.py. Not modelled: allocators that reorganize their
    memory, collectives that slow compute down, stragglers, data loading.

    Raises:
        ConfigError: the machine has no peak for the run's dtype.
        HostMemoryError, DiskError: under --offload-alpha auto, the activations that always move do not fit in the
            node's host memory, or on its disks under --offload-nvme-path.
        PlanError: under --offload-alpha auto, the rounding buffers do not fit on the device.
    """
    model = step_model(config, world_size, hardware, alpha, framework, layer)
    timed = _time_pipeline(model)
    timed = timed._replace(seconds=timed.seconds + model.forwards_s)
    step_s = timed.seconds + timed.data_s + timed.optimizer_s
    tokens = config.data.seq_length * global_batch_size(config, world_size)
    flops_per_s = tokens * model_flops_per_token(config.model, config.data.seq_length) / world_size / step_s
    compute_s = _compute_s(model)
    computing_s = sum(compute_s.values())
    stall_s = max(0.0, timed.seconds - computing_s)
    if model.pipeline.stages > 1 or not timed.stall_s:  # a single stage waits for no other one
        stall_s = min(timed.stall_s, stall_s)  # a first copy is waited for only once
    busy_s = computing_s + stall_s
    compute_s |= {
        "copies": stall_s,
        "pipeline": max(0.0, timed.seconds - busy_s),  # of one stage the difference is rounding
        "data": timed.data_s,
        "optimizer": timed.optimizer_s,
    }
    resources = _resources(model, timed, computing_s)
    return StepPrediction(
        step_time_s=step_s,
        tflops_per_gpu=flops_per_s / 1e12,
        mfu_percent=100.0 * flops_per_s / model.peak_flops,
        tgs=tokens / world_size / step_s,
        bubble_share=max(0.0, 1.0 - busy_s / timed.seconds),
        hidden_share=max(0.0, 1.0 - stall_s / timed.copies_s) if timed.copies_s else 1.0,
        seconds=compute_s,
        resources=resources,
        parts=step_parts(compute_s, resources, model, config),
        swap=model.swap,
    )


class _Timed(NamedTuple):
    """The times of one step.

    Attributes:
        seconds: the pipeline, with forwards before the step.
        data_s, optimizer_s: reductions, and the update with the new weights, after the pipeline.
        stall_s, copies_s: waiting for copies, and copies in both directions, averaged over stages.
        activations_s: copies of activations by direction (offload, prefetch), on the busiest stage.
    """

    seconds: float
    data_s: float
    optimizer_s: float
    stall_s: float = 0.0
    copies_s: float = 0.0
    activations_s: tuple[float, float] = (0.0, 0.0)


def _time_pipeline(model: StepModel) -> _Timed:
    full, timed = model.pipeline, _constantly
    if any(model.states) or not always_hidden(model.times, full):
        timed = _simulated
    if full.breadth_first:
        found = _breadth_first(model, timed)
    else:
        lag = _LAG * full.stages if full.stages > 1 else _LAG_OF_ONE
        steady = steady_microbatches(full) + (lag if timed is _simulated else 0)
        found = timed(model, full._replace(microbatches=min(full.microbatches, steady)))
    if not (model.times.offload_s or model.times.prefetch_s):
        return found
    moved_s = [copies_s(full, stage, model.num_layers, model.times) for stage in range(full.stages)]
    share = max(moved_s) / (model.times.offload_s + model.times.prefetch_s)
    return found._replace(
        copies_s=found.copies_s + sum(moved_s) / full.stages,
        activations_s=(share * model.times.offload_s, share * model.times.prefetch_s),
    )


def _breadth_first(model: StepModel, timed: Callable[[StepModel, Pipeline], _Timed]) -> _Timed:
    """Run as many microbatches as hide the states of a layer; each further one adds as much as the last one added."""
    full, times = model.pipeline, model.times
    state_s = max((max(states.most_of_a_layer_s) for states in model.states if states is not None), default=0.0)
    spare_s = max(1e-9, times.forward_s - max(times.offload_s, times.prefetch_s))
    short = full._replace(microbatches=min(full.microbatches, _MOST_BREADTH_FIRST, 3 + ceil(state_s / spare_s)))
    found = timed(replace(model, pipeline=short), short)
    missing = full.microbatches - short.microbatches
    if not missing:
        return found
    fewer = short._replace(microbatches=short.microbatches - 1)
    before = timed(replace(model, pipeline=fewer), fewer)
    return _Timed(
        found.seconds + missing * (found.seconds - before.seconds),
        found.data_s,
        found.optimizer_s,
        found.stall_s + missing * (found.stall_s - before.stall_s),
        found.copies_s + missing * (found.copies_s - before.copies_s),
    )


def _constantly(model: StepModel, short: Pipeline) -> _Timed:
    """Time the pipeline with one event for each action, if no action waits for a copy."""
    action_s = cache(lambda stage, kind, chunk: model.action_s(stage, Action(kind, 0, chunk)))  # as in all microbatches

    def execute(stage: int, op: Op, ready_s: float) -> float:
        return ready_s + action_s(stage, op.executed_action.kind, op.executed_action.chunk)

    return _with_update(model, _extended(model.pipeline, short, run(model.program(short), execute, model.message_s)))


def _with_update(model: StepModel, pipeline_s: float, stall_s: float = 0.0) -> _Timed:
    """Add reductions and update in closed form."""
    reduce_s = [update.exposed_s(model.layers_per_stage, model.times.backward_s) for update in model.updates]
    gather_s = [update.gather_s for update in model.updates]
    ends_s = [left + update.optimizer_s + update.gather_s for left, update in zip(reduce_s, model.updates, strict=True)]
    data_s = sum(reduce_s) / len(reduce_s) + sum(gather_s) / len(gather_s)
    return _Timed(pipeline_s, data_s, max(ends_s) - data_s, stall_s)


def _simulated(model: StepModel, short: Pipeline) -> _Timed:
    """Time the pipeline layer by layer, on the streams of each stage."""
    full, stages = model.pipeline, range(model.pipeline.stages)
    workers, clock = run_stages(model, short)
    streams = [worker.streams for worker in workers]
    stall_s = sum(stream.stall_s for stream in streams) / short.microbatches * full.microbatches / full.stages
    pipeline_s = _extended(full, short, clock, skip=1 if any(model.states) else 0)
    if not any(model.states):
        return _with_update(model, pipeline_s, stall_s)
    reduced_s, end_s = update_stages(workers, clock)
    copied_s = sum(stream.rows.busy_s.get(row, 0.0) for stream in streams for row in ("offload", "prefetch"))
    moved_s = sum(copies_s(short, stage, model.num_layers, model.times) for stage in stages)
    states_s = max(0.0, copied_s - moved_s) / short.microbatches * full.microbatches / full.stages
    return _Timed(pipeline_s, reduced_s - clock.makespan_s, end_s - reduced_s, stall_s, states_s)


def _resources(model: StepModel, timed: _Timed, compute_s: float) -> dict[str, float]:
    states = [times for times in model.states if times is not None]
    offload_s, prefetch_s = timed.activations_s
    reduced = [
        update.bucket_s * (model.layers_per_stage if times is None else times.num_reduced_apart)
        for update, times in zip(model.updates, model.states, strict=True)
    ]
    data_s = [whole + update.rest_s + update.gather_s for whole, update in zip(reduced, model.updates, strict=True)]
    times = model.times
    moves, records = moves_and_records(model.pipeline, 0, model.num_layers) if times.write_s else (0, 1)
    disk_s = moves * times.num_on_disk(records) / max(1, records) * (times.write_s + times.read_s)
    return {
        **({"disk": disk_s} if disk_s else {}),
        "compute": compute_s + max(update.optimizer_s for update in model.updates),
        "h2d": prefetch_s + max((times.h2d_s for times in states), default=0.0),
        "d2h": offload_s + max((times.d2h_s for times in states), default=0.0),
        "cpu optimizer": max((times.cpu_s for times in states), default=0.0),
        "dp link": max(data_s) + max((times.dp_s for times in states), default=0.0),
    }


def _extended(full: Pipeline, short: Pipeline, clock: Clock, skip: int = 0) -> float:
    """Return the makespan of all microbatches from a run of the first ones; `skip` as in `steady_period_s`."""
    missing = full.microbatches - short.microbatches
    return clock.makespan_s + (missing * steady_period_s(short, clock, skip) if missing else 0.0)


def _compute_s(model: StepModel) -> dict[str, float]:
    """Return the seconds of compute in one step by component, averaged over the stages."""
    layers, forwards = model.layers_per_stage, 1 + model.forwards
    total = (model.layer.forward * forwards + model.layer.backward) * layers
    ends = model.embedding.forward * forwards + model.embedding.backward
    ends += model.losses * model.forwards + model.loss.forward + model.loss.backward
    total += ends * (1.0 / model.pipeline.stages)
    count = model.pipeline.microbatches
    kinds = {kind.name: getattr(total, kind.name) * count for kind in fields(total)}
    return {**kinds, "recompute": model.recompute.total_s * layers * count}
