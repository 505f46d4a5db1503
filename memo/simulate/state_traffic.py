"""How often the state plan of a stage copies, gathers and reduces in one step."""

from functools import lru_cache
from typing import NamedTuple

from memo.planner.state_plan import StatePlan, placed_state_plan
from memo.spec.layer_ops import LayerOp, stage_ops
from memo.spec.placement import StatePlacement
from memo.spec.schedule import Pipeline
from memo.spec.steady import of_all_microbatches, repeats_after


class StateTraffic(NamedTuple):
    """Numbers of layers that are moved in one step of a stage.

    Attributes:
        fills: weights that come from host memory.
        gathers: weights that are gathered into a slot, including those that come from host memory.
        sums_out, sums_in: whole gradients that go to host memory, and that come back to be added to.
        reductions: gradients that are reduced out of a slot, or one by one because the CPU updates their layer.
        shards_out, shards_in: reduced gradients that go to host memory, and that come back to be added to.
    """

    fills: int = 0
    gathers: int = 0
    sums_out: int = 0
    sums_in: int = 0
    reductions: int = 0
    shards_out: int = 0
    shards_in: int = 0


def state_traffic(pipeline: Pipeline, stage: int, placement: StatePlacement) -> StateTraffic:
    """Return the traffic of a stage whose states are placed by `placement`.

    Weights and gradients have separate slots, so each is counted as if the other were on the device: a search asks for
    many placements, but these have few different placements of weights, or of gradients. The source of weights (their
    copy or the masters) changes no count.
    """
    weights = placement._replace(gradients=0, shards_gradients=False, weight_copy=True)
    if not placement.shards_weights:  # then only layers whose optimizer is in host memory fetch weights
        weights = weights._replace(optimizer=placement.weights)
    gradients = placement._replace(weights=0, shards_weights=False, weight_copy=True)
    counted = _of_all_microbatches(pipeline, stage, gradients)
    fetched = _of_all_microbatches(pipeline, stage, weights)
    return counted._replace(fills=fetched.fills, gathers=fetched.gathers)


@lru_cache(maxsize=1 << 14)
def _of_all_microbatches(pipeline: Pipeline, stage: int, placement: StatePlacement) -> StateTraffic:
    def count(short: Pipeline) -> StateTraffic:
        return count_traffic(_plan_of_stage(short, stage, placement), placement)

    least = pipeline.stages + 1 + repeats_after(pipeline)
    return StateTraffic(*of_all_microbatches(pipeline, least, count))


@lru_cache(maxsize=32)
def stage_state_plan(pipeline: Pipeline, stage: int, placement: StatePlacement) -> StatePlan:
    """Return the plan that `memo.executor.states` follows on a rank of a stage; a search asks for the last few again
    and again."""
    return _plan_of_stage(pipeline, stage, placement)


def _plan_of_stage(pipeline: Pipeline, stage: int, placement: StatePlacement) -> StatePlan:
    return placed_state_plan(_stage_ops(pipeline, stage, placement.layers * pipeline.stages), placement)


@lru_cache(maxsize=256)
def _stage_ops(pipeline: Pipeline, stage: int, num_layers: int) -> tuple[LayerOp, ...]:
    """Return the operations of a stage, which all placements share."""
    return tuple(stage_ops(pipeline, stage, num_layers))


def count_traffic(plan: StatePlan, placement: StatePlacement) -> StateTraffic:
    """Return the traffic of all steps of a plan."""
    order = sorted({step.op.layer for step in plan.steps})
    on_host = {layer for at, layer in enumerate(order) if placement.of_layer(at).optimizer_on_host}
    weights = [fetch.layer for step in plan.steps for fetch in step.fetches if fetch.kind == "weights"]
    reduced = [step for step in plan.steps if step.end == "reduce"]
    return StateTraffic(
        fills=sum(layer in on_host for layer in weights),
        gathers=len(weights),
        sums_out=sum(step.end == "offload" for step in plan.steps),
        sums_in=plan.num_fetches - len(weights),
        reductions=len(reduced),
        shards_out=sum(step.op.layer in on_host for step in reduced),
        shards_in=sum(step.adds_up and step.op.layer in on_host for step in reduced),
    )
