"""The reference for a swapped run: the same layers on the same tiles, without copies."""

from memo import Trainer
from memo.executor.layer import TokenwiseLayer
from memo.executor.runtime import SwapRuntime
from memo.executor.select import make_backend
from memo.planner.swap import swap_plan


def keep_everything(trainer: Trainer) -> None:
    """Give every layer and microbatch a slot of its own, so that nothing moves."""
    parts = trainer.parts
    assert parts.swap is not None
    ops = [step.op for step in parts.swap.plan.steps]
    plan = swap_plan(ops, max_slots=len(ops))
    assert plan.num_offloads == 0
    backend = make_backend("auto", parts.device)
    parts.swap = SwapRuntime(plan, parts.swap.layout, backend, parts.device, host=None)
    for chunk in parts.chunks:
        for layer in chunk.layers:
            assert isinstance(layer, TokenwiseLayer)
            layer.memory = parts.swap
