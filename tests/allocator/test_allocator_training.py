"""Real training on planned addresses on the CPU: the same bits, everything served, and no accident does harm.

The allocator is the process's, so every scenario runs in a process of its own.
"""

import gc
import threading
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from first_fit import first_fit
from planned_training import WARMUP_STEPS, Training
from ranks import run_ranks

from memo.allocator.planned import PlannedAllocator
from memo.allocator.statistics import Statistics
from memo.artifacts.memory_plan import MemoryPlan

STEPS = 50
FIRST_STEPS = WARMUP_STEPS + 2
NUM_ACTS = 5

Act = Callable[[Training, int], float]


def plan_of(training: Training) -> MemoryPlan:
    assert training.allocator._plan is not None
    return training.allocator._plan


def _planned_training() -> tuple[Training, list[float]]:
    """Warmed up, recorded twice with the same result, and planned."""
    training = Training(PlannedAllocator.install("cpu"))
    losses, trace = training.record()
    with training.allocator.record() as recording:
        losses.append(training.step())
    assert recording.trace == trace
    training.allocator.use(first_fit(trace))
    training.allocator.set_poison(True)
    return training, losses


def _passthrough(num_steps: int, act: Act | None = None) -> list[float]:
    """Losses of training when the allocator passes everything on."""
    training = Training(PlannedAllocator.install("cpu"))
    losses = [training.step() for _ in range(FIRST_STEPS)]
    return losses + [act(training, i) if act else training.step() for i in range(num_steps)]


@pytest.fixture(scope="module")
def reference() -> list[float]:
    found: list[float] = run_ranks(1, _passthrough, STEPS)[0]
    assert len(set(found)) == len(found)  # it learns: equal losses say something
    return found


def _planned(num_steps: int, act: Act) -> tuple[list[float], Statistics]:
    training, losses = _planned_training()
    losses += [act(training, i) for i in range(num_steps)]
    gc.collect()  # a kept traceback is a circle
    return losses, training.allocator.statistics


def _other_length(training: Training, i: int) -> float:
    return training.step(seq_length=40 if i == 2 else 48)


def test_another_sequence_length_falls_back_and_is_named() -> None:
    losses, statistics = run_ranks(1, _planned, NUM_ACTS, _other_length)[0]
    assert losses == run_ranks(1, _passthrough, NUM_ACTS, _other_length)[0]
    assert statistics.fallbacks["size"] > 0
    assert statistics.unasked > 0
    first = statistics.mismatches[0]
    assert first.reason == "size"
    assert first.phase.kind == "embedding"
    assert first.expected_bytes > first.found_bytes
    sizes = f"{first.found_bytes:,} bytes, planned {first.expected_bytes:,} bytes"
    assert str(first) == f"embedding, request {first.position}: size: {sizes}"


def _keep_across(training: Training, i: int) -> float:
    """Activations of a planned iteration are kept through the whole next one."""
    kept = []
    handles = [layer.register_forward_hook(lambda *args: kept.append(args[-1])) for layer in training.model.layers]
    with training.allocator.iteration():
        training.allocator.mark("embedding")
        training.loss(training.tokens(48))
    for handle in handles:
        handle.remove()
    copies = [tensor.clone() for tensor in kept]
    loss = training.step()
    assert all(map(torch.equal, kept, copies))
    return loss


def test_tensors_kept_from_an_earlier_iteration_are_never_overwritten(reference: list[float]) -> None:
    losses, statistics = run_ranks(1, _planned, NUM_ACTS, _keep_across)[0]
    assert losses == reference[: len(losses)]
    assert statistics.fallbacks["overlap"] > 0
    assert statistics.live_blocks == 0


class _Neighbour(threading.Thread):
    """Allocates, writes and checks tensors of planned sizes for as long as it is told to."""

    def __init__(self, sizes: list[int]) -> None:
        super().__init__()
        self.sizes, self.is_over, self.num_wrong, self.num_tensors = sizes, threading.Event(), 0, 0

    def run(self) -> None:
        while not self.is_over.is_set():
            tensors = [torch.full((n,), i, dtype=torch.uint8) for i, n in enumerate(self.sizes)]
            self.num_wrong += sum(not bool((t == i).all()) for i, t in enumerate(tensors))
            self.num_tensors += len(tensors)


def _beside_a_thread() -> tuple[list[float], Statistics, int, int]:
    training, losses = _planned_training()
    neighbour = _Neighbour([r.num_bytes for r in plan_of(training).phases[1].requests])
    neighbour.start()
    while training.allocator.statistics.fallbacks["thread"] < 100 and len(losses) < STEPS:
        losses.append(training.step())
    neighbour.is_over.set()
    neighbour.join()
    return losses, training.allocator.statistics, neighbour.num_tensors, neighbour.num_wrong


def test_another_thread_is_served_natively(reference: list[float]) -> None:
    losses, statistics, num_tensors, num_wrong = run_ranks(1, _beside_a_thread)[0]
    assert num_tensors > 0
    assert num_wrong == 0
    assert losses == reference[: len(losses)]
    assert statistics.fallbacks["thread"] > 0
    others = {reason: count for reason, count in statistics.fallbacks.items() if reason != "thread"}
    assert not any(others.values())
    assert statistics.unasked == 0


def _all_at_one_address() -> tuple[list[float], Statistics]:
    """A plan that gives one address to everything, and to gradients, which outlive the iteration."""
    training = Training(PlannedAllocator.install("cpu"))
    losses, trace = training.record()
    plan = first_fit(trace)
    phases = tuple(
        replace(phase, requests=tuple(r._replace(offset_bytes=0) for r in phase.requests)) for phase in plan.phases
    )
    training.allocator.use(replace(plan, phases=phases))
    training.allocator.set_poison(True)
    losses += [training.step() for _ in range(NUM_ACTS)]
    return losses, training.allocator.statistics


def test_a_wrong_plan_costs_memory_and_nothing_else(reference: list[float]) -> None:
    losses, statistics = run_ranks(1, _all_at_one_address)[0]
    assert losses == reference[: len(losses)]
    assert statistics.hits > 0
    assert statistics.fallbacks["overlap"] > statistics.hits


def _lend_and_take_back() -> tuple[list[float], list[int], list[int]]:
    training, losses = _planned_training()
    plan = plan_of(training)
    arenas, hits = [], []
    for act in (lambda: None, training.allocator.lend, lambda: training.allocator.take_back(plan)):
        act()
        arenas.append(training.allocator.statistics.arena_bytes)
        losses += [training.step(), training.step()]
        hits.append(training.allocator.statistics.hits)
    return losses, [bytes_ // plan.arena_bytes for bytes_ in arenas], hits


def test_memory_of_a_plan_is_lent_and_taken_back(reference: list[float]) -> None:
    """The counts of requests go on."""
    losses, arenas, (before, lent, after) = run_ranks(1, _lend_and_take_back)[0]
    assert losses == reference[: len(losses)]
    assert arenas == [1, 0, 1]
    assert after == 2 * before == 2 * lent > 0
