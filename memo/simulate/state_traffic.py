"""How often the state plan of a stage copies, gathers and reduces in one step.

A plan repeats itself from microbatch to microbatch once a pipeline is full, so a search counts on a shortened one:

    microbatches    | fill | .. | period | period | period | drain |
    counted         | fill | .. | period |                 | drain |    and what one period more adds, twice
"""

from dataclasses import astuple, dataclass, replace
from functools import lru_cache

from memo.planner.state_plan import StatePlan, placed_state_plan
from memo.spec.layer_ops import stage_ops
from memo.spec.placement import StatePlacement
from memo.spec.schedule import Pipeline
from memo.spec.steady import repeats_after


@dataclass(frozen=True)
class StateTraffic:
    """Layers that are moved in one step of a stage.

    Attributes:
        fills: weights that come from host memory.
        gathers: weights that are gathered into a slot, those among them.
        sums_out, sums_in: whole gradients to host memory, and back to be added to.
        reductions: gradients that are reduced out of a slot, or by themselves because the CPU updates their layer.
        shards_out, shards_in: reduced gradients to host memory, and back to be added to.
    """

    fills: int = 0
    gathers: int = 0
    sums_out: int = 0
    sums_in: int = 0
    reductions: int = 0
    shards_out: int = 0
    shards_in: int = 0

    def extended(self, shorter: "StateTraffic", periods: int) -> "StateTraffic":
        """With `periods` more of what this step has beyond a shorter one."""
        pairs = zip(astuple(self), astuple(shorter), strict=True)
        return StateTraffic(*(count + periods * (count - less) for count, less in pairs))


def state_traffic(pipeline: Pipeline, stage: int, placement: StatePlacement) -> StateTraffic:
    """Of a stage whose layers have the places of `placement`."""
    placement = replace(placement, weight_copy=True)  # where weights come from changes no count
    period = repeats_after(pipeline)
    least = pipeline.stages + 1 + period
    periods = max(0, pipeline.microbatches - least) // period
    short = replace(pipeline, microbatches=pipeline.microbatches - periods * period)
    found = _counted(short, stage, placement)
    if not periods:
        return found
    return found.extended(_counted(replace(short, microbatches=short.microbatches - period), stage, placement), periods)


@lru_cache(maxsize=1024)
def stage_state_plan(pipeline: Pipeline, stage: int, placement: StatePlacement) -> StatePlan:
    """The plan that `memo.executor.states` obeys on a rank of a stage."""
    return placed_state_plan(stage_ops(pipeline, stage, placement.layers * pipeline.stages), placement)


@lru_cache(maxsize=1 << 14)
def _counted(pipeline: Pipeline, stage: int, placement: StatePlacement) -> StateTraffic:
    return count_traffic(stage_state_plan(pipeline, stage, placement), placement)


def count_traffic(plan: StatePlan, placement: StatePlacement) -> StateTraffic:
    """Of all steps of a plan."""
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
