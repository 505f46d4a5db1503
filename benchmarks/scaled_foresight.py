"""Predicts a row of benchmarks/scaled_node.py by memo.simulate and memo's account of memory.

Times come from pieces of a step that were measured alone (benchmarks/scaled_pieces.py). So the errors are those of the
engine and the plans of `memo plan`, which put the pieces together. Bytes come from the configuration alone.
"""

import dataclasses
from dataclasses import dataclass

from rivals import input_layout, kept_tiles
from scaled_pieces import Pieces
from scaled_steps import WHOLE_LAYERS, Work

from memo.config import RunConfig
from memo.estimate.hardware import Hardware
from memo.estimate.program.memory import program_memory
from memo.planner.problem import SwapProblem
from memo.simulate.cost import NOTHING, Cost, LayerCost
from memo.simulate.model import StepModel, step_model
from memo.simulate.outside_layers import EndCost, UpdateCost
from memo.simulate.streams import LayerTimes
from memo.simulate.swapping import choose, layer_times, modelled_problem
from memo.simulate.trace import simulate

_NOTHING_AFTER = UpdateCost(0.0, 0.0, 0.0, False, 0.0, 0.0)


@dataclass(frozen=True)
class Foreseen:
    """Predicted values; `hidden_share`: share of the copies that is hidden, None if nothing moves."""

    step_s: float
    hidden_share: float | None
    device_peak_bytes: int
    host_bytes: int


def foresee(work: Work, node: Hardware, found: Pieces, moves: dict[str, int] | None) -> Foreseen:
    """Return the predicted values of a way.

    Args:
        moves: tiles that the run's swap plan moves, which are known before the first step; None without a plan.
    """
    config = dataclasses.replace(RunConfig(), model=work.case.model).override({**work.flags, "peak_tflops": 1.0})
    link = work.bytes_per_s / 1e9
    node = dataclasses.replace(node, offload_gb_per_s=link, prefetch_gb_per_s=link)
    if work.case.way in WHOLE_LAYERS:
        again_s = found.forward_s if config.memory.recompute_granularity == "full" else 0.0
        step_s, _ = _step(config, node, LayerTimes(found.forward_s, found.backward_s + again_s), found)
        return Foreseen(step_s, None, program_memory(config, 1, 0).total, 0)
    costs = {name: Cost(matmul=seconds) for name, seconds in found.recompute_s.items()}
    layer = LayerCost(Cost(matmul=found.on_tiles_forward_s), Cost(matmul=found.on_tiles_backward_s), costs)
    problem = modelled_problem(config, 1, node, layer)
    if work.way.start is not None:
        return _rival(work, config, node, found, problem)
    assert moves is not None, "memo's ways make a plan"
    solution = choose(problem, moves)
    times = layer_times(problem, solution, node)
    step_s, stall_s = _step(config, node, times, found)
    memory = program_memory(config, 1, 0, moved=moves)
    hidden_share = 1.0 - stall_s / (problem.num_moves * (times.offload_s + times.prefetch_s))
    return Foreseen(step_s, hidden_share, memory.total, solution.host_bytes)


def _rival(work: Work, config: RunConfig, node: Hardware, found: Pieces, problem: SwapProblem) -> Foreseen:
    """Predict a way of benchmarks/rivals.py: its backward makes the requests of memo with the same groups in a slot."""
    rival = work.way.start
    assert rival is not None, f"{work.case.way} has no start of its own"
    again_s = 0.0
    if rival.recomputes:
        tiled_mlp = "fc1" not in rival.groups  # it computes the last product again, and fc1 a third time
        again_s = found.on_tiles_forward_s + (found.recompute_s["fc1"] if tiled_mlp else -found.last_product_s)
    input_bytes = input_layout(config).slot_bytes
    copy_s = input_bytes / work.bytes_per_s if rival.moves else 0.0
    times = LayerTimes(found.on_tiles_forward_s, found.on_tiles_backward_s + again_s, copy_s, copy_s)
    step_s, stall_s = _step(config, node, times, found)
    memory = program_memory(config, 1, 0, moved=kept_tiles(config, rival.groups))
    device_bytes = memory.total - memory.rounding_buffers + rival.buffer_bytes(config)
    if not rival.moves:
        return Foreseen(step_s, None, device_bytes, 0)
    hidden_share = 1.0 - stall_s / (problem.num_moves * 2 * copy_s)
    return Foreseen(step_s, hidden_share, device_bytes, problem.num_records * input_bytes)


def _step(config: RunConfig, node: Hardware, times: LayerTimes, found: Pieces) -> tuple[float, float]:
    """Return the seconds of a step, and those for which its compute waits for copies."""
    model: StepModel = dataclasses.replace(
        step_model(config, 1, node),
        times=times,
        embedding=EndCost(NOTHING, NOTHING),
        loss=EndCost(NOTHING, Cost(elementwise=found.beside_s)),
        updates=(_NOTHING_AFTER,),
        states=(None,),
    )
    simulated = simulate(model)
    return simulated.step_time_s, sum(simulated.stall_s)
