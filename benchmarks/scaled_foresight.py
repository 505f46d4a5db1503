"""What memo.simulate and memo's account of memory foresee of a row of benchmarks/scaled_node.py.

Times come from pieces that were measured by themselves (benchmarks/scaled_pieces.py): what is judged is how they are
put together, by the engine and the plans of `memo plan`. Bytes come from the configuration alone.
"""

import dataclasses
from dataclasses import dataclass

from scaled_pieces import Pieces
from scaled_steps import ON_TILES, Work

from memo.config import RunConfig
from memo.estimate.hardware import Hardware
from memo.estimate.program.memory import program_memory
from memo.simulate.cost import NOTHING, Cost
from memo.simulate.layer_model import LayerCost
from memo.simulate.model import StepModel, step_model
from memo.simulate.outside_layers import EndCost, UpdateCost
from memo.simulate.streams import LayerTimes
from memo.simulate.swapping import choose, layer_times, modelled_problem
from memo.simulate.trace import simulate
from memo.units import DTYPE_BYTES

_MOST_GB_PER_S = 1e6
"""As good as a link without limit."""

_NOTHING_AFTER = UpdateCost(0.0, 0.0, 0.0, False, 0.0, 0.0)


@dataclass(frozen=True)
class Foreseen:
    """`None`: memo has no account of a way that is not its own."""

    step_s: float
    hidden_share: float | None
    device_peak_bytes: int | None
    host_bytes: int


def foresee(work: Work, node: Hardware, found: Pieces, moves: dict[str, int] | None) -> Foreseen:
    """The row of a way.

    Args:
        moves: what the run's swap plan moves, which is known before its first step; None where nothing moves.
    """
    config = dataclasses.replace(RunConfig(), model=work.case.model).override({**work.flags, "peak_tflops": 1.0})
    link = min(work.link_bytes_per_s / 1e9, _MOST_GB_PER_S)
    node = dataclasses.replace(node, offload_gb_per_s=link, prefetch_gb_per_s=link)
    if moves is None:
        return _without_plan(work, config, node, found)
    costs = {name: Cost(matmul=seconds) for name, seconds in found.recompute_s.items()}
    layer = LayerCost(Cost(matmul=found.on_tiles_forward_s), Cost(matmul=found.on_tiles_backward_s), costs)
    problem = modelled_problem(config, 1, node, layer)
    solution = choose(problem, moves)
    times = layer_times(problem, solution, node)
    step_s, stall_s = _step(config, node, times, found)
    copies_s = problem.num_moves * (times.offload_s + times.prefetch_s)
    memory = program_memory(config, 1, 0, moved=moves)
    hidden_share = None if work.case.way == ON_TILES else 1.0 - stall_s / copies_s
    return Foreseen(step_s, hidden_share, memory.total, solution.host_bytes)


def _without_plan(work: Work, config: RunConfig, node: Hardware, found: Pieces) -> Foreseen:
    again_s, host_bytes = 0.0, 0
    if work.case.way == "full-recompute":
        again_s = found.forward_s
    elif work.case.way == "selective-recompute":
        again_s = found.attention_s
    forward_s, backward_s = found.forward_s, found.backward_s + again_s
    if work.case.way == "layer-input-offload":  # on the stream that computes
        input_bytes = work.case.seq_length * config.model.hidden_size * DTYPE_BYTES["fp32"]
        host_bytes = config.model.num_layers * input_bytes
        forward_s += input_bytes / work.bytes_per_s
        backward_s += found.forward_s + input_bytes / work.bytes_per_s
    step_s, _ = _step(config, node, LayerTimes(forward_s, backward_s), found)
    device_bytes = None if host_bytes else program_memory(config, 1, 0).total
    return Foreseen(step_s, None, device_bytes, host_bytes)


def _step(config: RunConfig, node: Hardware, times: LayerTimes, found: Pieces) -> tuple[float, float]:
    """Seconds of a step, and what its compute waits for copies."""
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
