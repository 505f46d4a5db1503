"""All costs that decide the time of a step: the common input of prediction and trace."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TypeVar

from memo.config import RunConfig
from memo.config.derived import forwards_before_step, rank_tokens, resolved_dtype, resolved_sections
from memo.config.grid import AXES, rank_grid
from memo.estimate.attention_rates import has_slow_attention, with_attention_of
from memo.estimate.hardware import Hardware
from memo.planner.solution import SwapSolution
from memo.planner.swap_problem import NO_LIMITS
from memo.simulate.cost import NOTHING, Cost, LayerCost
from memo.simulate.framework import MEMO, Framework
from memo.simulate.kernels import Group, Kernels
from memo.simulate.layer import plain_layer, swapped_layer
from memo.simulate.outside_layers import EndCost, UpdateCost, embedding_cost, loss_cost, update_cost
from memo.simulate.states import StateTimes, state_times
from memo.simulate.streams import LayerTimes
from memo.simulate.swapping import choose, layer_times, machine_limits, modelled_problem, on_disk
from memo.spec.clock import Program, program
from memo.spec.rendezvous import rendezvous_program
from memo.spec.schedule import Action, Pipeline, pipeline_of

_PerStage = TypeVar("_PerStage")


@dataclass(frozen=True, kw_only=True)
class _LayerModel:
    """The costs of a layer: plain, or under a swap plan with its recomputation and copies.

    Attributes:
        layer: cost of an average layer, without the recomputation of skeletal activations under a swap plan.
        recompute: cost of this recomputation in the backward of one layer.
        times: seconds of one layer and of its copies, which take 0 s if nothing moves.
        swap: what moves (planned for the first stage); None if no swap plan runs.
        spared: cost of the recomputation that moving saves in the backward of one layer, compared with moving only the
            activations that always move.
        always_share: bytes that always move, as a share of the moved bytes.
    """

    layer: LayerCost
    times: LayerTimes
    recompute: Cost = NOTHING
    swap: SwapSolution | None = None
    spared: Cost = NOTHING
    always_share: float = 1.0


@dataclass(frozen=True, kw_only=True)
class StepModel(_LayerModel):
    """The costs of one step on every stage.

    Attributes:
        embedding, loss: cost of embedding and loss for one microbatch in training.
        losses: cost of the losses of one microbatch in a forward before the step.
        message_s: seconds of a message between neighbouring stages.
        has_rendezvous: whether stages meet for their messages (memo.spec.rendezvous).
        updates, states: costs by stage; None in `states` for stages whose states are all whole on the device.
        peak_flops: peak of one rank, FLOP/s.
        has_unmeasured_host: as in Framework.
        has_slow_attention: as in StepParts.
        forwards: forwards of the whole batch before the step (--preference).
    """

    pipeline: Pipeline
    num_layers: int
    embedding: EndCost
    loss: EndCost
    losses: Cost
    message_s: float
    has_rendezvous: bool
    updates: tuple[UpdateCost, ...]
    states: tuple[StateTimes | None, ...]
    peak_flops: float
    has_unmeasured_host: bool = False
    has_slow_attention: bool = False
    forwards: int = 0

    def program(self, pipeline: Pipeline) -> Program:
        """Return the schedules of `pipeline` for the clock; it may have fewer microbatches than the step."""
        return rendezvous_program(pipeline) if self.has_rendezvous else program(pipeline)

    @property
    def layers_per_chunk(self) -> int:
        return self.num_layers // (self.pipeline.stages * self.pipeline.chunks)

    @property
    def layers_per_stage(self) -> int:
        return self.num_layers // self.pipeline.stages

    def embedding_s(self, stage: int, action: Action) -> float:
        """Return the seconds of the embedding in an action; 0 if the action does not contain it."""
        return _end_s(self.embedding, action) if self.pipeline.virtual_stage(stage, action.chunk) == 0 else 0.0

    def loss_s(self, stage: int, action: Action) -> float:
        """Return the seconds of the loss in an action of training; 0 if the action does not contain it."""
        is_last = self.pipeline.virtual_stage(stage, action.chunk) == self.pipeline.last_virtual_stage
        return _end_s(self.loss, action) if is_last else 0.0

    def action_s(self, stage: int, action: Action) -> float:
        """Return the seconds of an action that waits for no copy."""
        layers = self.pipeline.layers(stage, action.chunk, self.num_layers)
        layers_s = sum(self.times.computed_s(action.kind, layer) for layer in layers)
        return layers_s + self.embedding_s(stage, action) + self.loss_s(stage, action)

    @property
    def forwards_s(self) -> float:
        """The seconds of the forwards before the step: microbatches follow each other through the slowest stage.

        Not modelled: messages, and weights that stream from host memory and do not hide."""
        if not self.forwards:
            return 0.0
        stages, chunks = self.pipeline.stages, range(self.pipeline.chunks)
        of_stages = [sum(self.action_s(stage, Action("F", 0, chunk)) for chunk in chunks) for stage in range(stages)]
        of_stages[-1] += self.losses.total_s
        slowest_s = max(of_stages)
        return self.forwards * (self.pipeline.microbatches + (stages - 1) / len(chunks)) * slowest_s


def step_model(
    config: RunConfig,
    world_size: int,
    hardware: Hardware,
    alpha: float | Mapping[str, int] | None = None,
    framework: Framework = MEMO,
    layer: LayerCost | None = None,
) -> StepModel:
    """Arguments and errors as in `memo.simulate.predict.predict_step`; --peak-tflops replaces the machine's peak."""
    dtype = resolved_dtype(config.training, hardware.device)
    if framework.fuses:
        config = replace(config, hardware=replace(config.hardware, kernels="triton"))
    if config.hardware.peak_tflops is not None:
        hardware = replace(hardware, peak_tflops={**hardware.peak_tflops, dtype: config.hardware.peak_tflops})
    kernels = Kernels(with_attention_of(hardware, config), dtype)
    made = _layer_model(config, world_size, kernels, alpha, framework, layer)
    from_host = made.swap is not None and config.memory.sweeps and config.memory.offload_hidden_states
    return StepModel(
        **vars(made),
        pipeline=pipeline_of(config, world_size),
        num_layers=config.model.num_layers,
        embedding=embedding_cost(config, kernels),
        loss=loss_cost(config, kernels, framework.makes_logits_again),
        losses=loss_cost(config, kernels, again=True).forward,
        message_s=stage_message_s(config, kernels, world_size, from_host, framework.order),
        has_rendezvous=from_host or framework.waits_for_messages,
        updates=_by_stage(config, lambda stage: update_cost(config, kernels, world_size, stage, framework.order)),
        states=_by_stage(config, lambda stage: state_times(config, kernels, world_size, stage)),
        peak_flops=hardware.peak_flops(dtype),
        has_unmeasured_host=framework.has_unmeasured_host,
        has_slow_attention=has_slow_attention(hardware, config),
        forwards=forwards_before_step(config),
    )


def stage_message_s(
    config: RunConfig,
    kernels: Kernels,
    world_size: int,
    from_host: bool = False,
    order: tuple[str, ...] = AXES,
) -> float:
    """Return the seconds to send one microbatch's hidden states to the next pipeline stage, or their gradient back.

    `from_host`: the message goes from host memory to host memory, section by section; a section is copied while the
    section before it is sent.

    Known error: two copies are not counted: the first section to the sender's device, and the last section from the
    receiver's device.
    """
    parallel, sections = config.parallel, resolved_sections(config) if from_host else 1
    hidden_bytes = rank_tokens(config) // parallel.tp * config.model.hidden_size * kernels.narrow
    wire_bytes = hidden_bytes / sections
    stride = rank_grid(config.parallel, world_size, order).stride("pp")
    sent_s = kernels.message_s(wire_bytes, Group(parallel.pp, stride))
    if not from_host or parallel.pp == 1:
        return sent_s
    copied_s = wire_bytes / (min(kernels.hardware.offload_gb_per_s, kernels.hardware.prefetch_gb_per_s) * 1e9)
    return sections * max(sent_s, copied_s)


def _layer_model(
    config: RunConfig,
    world_size: int,
    kernels: Kernels,
    alpha: float | Mapping[str, int] | None,
    framework: Framework,
    known: LayerCost | None,
) -> _LayerModel:
    asked: float | str | Mapping[str, int] = config.memory.offload_alpha if alpha is None else alpha
    if asked != "off" and (alpha is not None or config.memory.swaps):
        layer = known if known is not None and config.memory.swaps else swapped_layer(config, kernels, framework)
        hardware = kernels.hardware
        limits = machine_limits(config, world_size, hardware) if asked == "auto" else NO_LIMITS
        problem = modelled_problem(config, world_size, hardware, layer, limits)
        swap = choose(problem, asked)
        if not (swap.moves_nothing_is_best and asked == "auto"):
            moved = {name: swap.tiles[name] / problem.tiles for name in layer.recompute}
            recompute = sum((cost * (1.0 - moved[name]) for name, cost in layer.recompute.items()), NOTHING)
            times = layer_times(problem, swap, hardware).of_stack(layer.by_layer)
            return _LayerModel(
                layer=layer,
                times=on_disk(config, world_size, hardware, problem, swap, times),
                recompute=layer.attention_again + recompute,
                swap=swap,
                spared=sum((cost * moved[name] for name, cost in layer.recompute.items()), NOTHING),
                always_share=problem.always_bytes / swap.moved_bytes if swap.moved_bytes else 1.0,
            )
    layer = known if known is not None and not config.memory.swaps else plain_layer(config, kernels, framework)
    overlap = kernels.hardware.copies_overlap
    times = LayerTimes(*layer.computed_s, copies_overlap=overlap, by_layer=layer.by_layer)
    return _LayerModel(layer=layer, times=times)


def _by_stage(config: RunConfig, of_stage: Callable[[int], _PerStage]) -> tuple[_PerStage, ...]:
    """Return a value for each stage; it is computed three times at most, as stages between first and last are alike."""
    stages = config.parallel.pp
    first, last = of_stage(0), of_stage(stages - 1)
    if stages <= 2:
        return (first, last)[:stages]
    return first, *[of_stage(1)] * (stages - 2), last


def _end_s(end: EndCost, action: Action) -> float:
    return (end.forward if action.kind == "F" else end.backward).total_s
