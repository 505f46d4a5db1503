"""The parts of a predicted step, from which its error is estimated (memo.estimate.time_errors)."""

from collections.abc import Mapping

from memo.config import RunConfig
from memo.estimate.time_errors import Copies, StepParts
from memo.simulate.model import StepModel
from memo.simulate.swapping import moves_and_records


def step_parts(
    seconds: Mapping[str, float], resources: Mapping[str, float], model: StepModel, config: RunConfig
) -> StepParts:
    """Return the parts of a step; `seconds` and `resources` as in `memo.simulate.predict.StepPrediction`."""
    passes = model.layers_per_stage * model.pipeline.microbatches
    again = model.recompute * passes
    return StepParts(
        attention=seconds["attention"] + again.attention,
        products=seconds["matmul"] + again.matmul,
        messages=seconds["tensor"] + seconds["context"] + seconds["data"] + again.tensor + again.context,
        token_wise=seconds["elementwise"] + again.elementwise + seconds["optimizer"],
        waiting=seconds["pipeline"],
        host=seconds["host"],
        copies=seconds["copies"],
        of_activations=_copies(model, config, passes),
        link=max(resources["h2d"], resources["d2h"]),
        has_unmeasured_host=model.has_unmeasured_host,
        has_experts=config.model.num_experts > 0,
        has_slow_attention=model.has_slow_attention,
    )


def _copies(model: StepModel, config: RunConfig, passes: int) -> Copies:
    """Return the copies of the first stage, which moves most.

    If states move too, or alpha is given, moved activations count as always moved: the plan would not drop any.
    """
    times = model.times
    moves, _ = moves_and_records(model.pipeline, 0, model.num_layers) if times.offload_s or times.prefetch_s else (0, 0)
    plans_anew = config.memory.offload_alpha == "auto" and not any(model.states)
    return Copies(
        offload=moves * times.slowest_offload_s,
        prefetch=moves * times.slowest_prefetch_s,
        forward=moves * times.forward_s,
        backward=moves * times.backward_s,
        always_share=model.always_share if plans_anew else 1.0,
        spared=model.spared.total_s * passes,
    )
