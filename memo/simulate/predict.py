"""The time of one training step, predicted from the configuration and the machine alone."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from memo.config import RunConfig
from memo.config.derived import global_batch_size
from memo.estimate.flops import model_flops_per_token
from memo.estimate.hardware import Hardware
from memo.parallel.schedule import Pipeline
from memo.planner.problem import SwapSolution
from memo.simulate.model import StepModel, step_model
from memo.simulate.pipeline import Clock, Op, program, run, steady_microbatches, steady_period_s
from memo.simulate.stage import Stage
from memo.simulate.streams import StageStreams
from memo.simulate.swapping import always_hidden, copies_s, steady_plan


@dataclass(frozen=True)
class StepPrediction:
    """One optimizer step.

    Attributes:
        tflops_per_gpu, mfu_percent, tgs: as training logs them: model FLOPs with the causal half of attention,
            nothing recomputed counted; MFU against the machine's peak; tokens per GPU and second.
        bubble_share: of the time of the pipeline, what its stages spend waiting for each other, on average.
        hidden_share: of the time that copies to host memory and back take, what passes under compute; 1 without.
        seconds: step_time_s by what it is spent on, averaged over the stages; they add up to it: matmul, attention,
            elementwise, tensor and context (collectives of tp and cp), recompute (all of these), copies (waiting
            for them), pipeline (waiting for other stages), data (collectives of dp), optimizer.
        swap: what moves to host memory, planned for the first stage; None where no swap plan runs.
    """

    step_time_s: float
    tflops_per_gpu: float
    mfu_percent: float
    tgs: float
    bubble_share: float
    hidden_share: float
    seconds: dict[str, float]
    swap: SwapSolution | None = None


def predict_step(
    config: RunConfig, world_size: int, hardware: Hardware, alpha: float | Mapping[str, int] | None = None
) -> StepPrediction:
    """Predict one optimizer step of a checked configuration on `world_size` ranks of a machine.

    Only as many microbatches are run through the schedule as its steady phase takes to show, the others add their
    period; where copies always hide, an action is one event. `memo.simulate.trace.simulate_step` runs everything.

    Args:
        alpha: share of the tokens whose activations move, or by group how many tiles, fitting or not; default: what
            config.memory says.

    Known error: measured by benchmarks/simulator_accuracy.py. Not modelled: allocators that reorganize their
    memory, collectives that slow compute down, stragglers, data loading.

    Raises:
        ConfigError: the machine has no peak for the run's dtype.
        HostMemoryError, PlanError: under --offload-alpha auto, what always has to move does not fit in the node's
            host memory, or the rounding buffers not on the device; an alpha outside [0, 1].
    """
    model = step_model(config, world_size, hardware, alpha)
    timed = _time_pipeline(model)
    reduce_s = [update.exposed_s(model.layers_per_stage, model.times.backward_s) for update in model.updates]
    ends_s = [left + update.optimizer_s + update.gather_s for left, update in zip(reduce_s, model.updates, strict=True)]
    step_s = timed.seconds + max(ends_s)
    tokens = config.data.seq_length * global_batch_size(config, world_size)
    flops_per_s = tokens * model_flops_per_token(config.model, config.data.seq_length) / world_size / step_s
    compute_s = _compute_s(model)
    busy_s = sum(compute_s.values()) + timed.stall_s
    stages = len(model.updates)
    data_s = sum(reduce_s) / stages + sum(update.gather_s for update in model.updates) / stages
    compute_s |= {
        "copies": timed.stall_s,
        "pipeline": timed.seconds - busy_s,
        "data": data_s,
        "optimizer": max(ends_s) - data_s,
    }
    return StepPrediction(
        step_time_s=step_s,
        tflops_per_gpu=flops_per_s / 1e12,
        mfu_percent=100.0 * flops_per_s / model.peak_flops,
        tgs=tokens / world_size / step_s,
        bubble_share=max(0.0, 1.0 - busy_s / timed.seconds),
        hidden_share=max(0.0, 1.0 - timed.stall_s / timed.copies_s) if timed.copies_s else 1.0,
        seconds=compute_s,
        swap=model.swap,
    )


@dataclass(frozen=True)
class _Timed:
    """The pipeline of one step: its seconds, and those of waiting for copies and of copies, averaged over stages."""

    seconds: float
    stall_s: float
    copies_s: float


def _time_pipeline(model: StepModel) -> _Timed:
    full = model.pipeline
    short = replace(full, microbatches=steady_microbatches(full))
    stages = range(full.stages)
    copied_s = 0.0
    if model.times.offload_s or model.times.prefetch_s:
        copied_s = sum(copies_s(short, stage, model.num_layers, model.times) for stage in stages)
    if always_hidden(model.times, full):
        seconds = _extended(full, short, run(program(short), _constant(model), model.message_s))
        stall_s = 0.0
    else:
        streams = [StageStreams(steady_plan(short, stage, model.num_layers), model.times) for stage in stages]
        workers = [Stage(stage, model, streams[stage]) for stage in stages]
        clock = run(
            program(short), lambda stage, op, ready_s: workers[stage].execute(op.action, ready_s), model.message_s
        )
        seconds = _extended(full, short, clock)
        stall_s = sum(stream.stall_s for stream in streams) / short.microbatches
    per_stage = full.microbatches / full.stages
    return _Timed(seconds, stall_s * per_stage, copied_s * per_stage)


def _constant(model: StepModel) -> Callable[[int, Op, float], float]:
    """Executes an action in the time that it always takes."""
    durations: dict[tuple[int, str, int], float] = {}

    def execute(stage: int, op: Op, ready_s: float) -> float:
        key = stage, op.action.kind, op.action.chunk
        if key not in durations:
            durations[key] = model.action_s(stage, op.action)
        return ready_s + durations[key]

    return execute


def _extended(full: Pipeline, short: Pipeline, clock: Clock) -> float:
    """The makespan of all microbatches from a run of the first ones."""
    missing = full.microbatches - short.microbatches
    return clock.makespan_s + (missing * steady_period_s(short, clock) if missing else 0.0)


def _compute_s(model: StepModel) -> dict[str, float]:
    """Seconds of compute in one step by component, averaged over the stages."""
    layers = model.layers_per_stage
    total = (model.layer.forward + model.layer.backward) * layers
    for end in (model.embedding, model.loss):
        total += (end.forward + end.backward) * (1.0 / model.pipeline.stages)
    count = model.pipeline.microbatches
    return {
        "matmul": total.matmul * count,
        "attention": total.attention * count,
        "elementwise": total.elementwise * count,
        "tensor": total.tensor * count,
        "context": total.context * count,
        "recompute": model.recompute.total_s * layers * count,
    }
