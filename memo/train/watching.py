"""Measurements during training: bytes by component and the times of copies in a step; and their forecasts."""

import contextlib
import dataclasses
import platform
import shlex
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import psutil
import torch

from memo import __version__
from memo.artifacts.run_log import RunHeader, SwapForecast
from memo.estimate.memory_account import PROCESS_BYTES, memory_account
from memo.estimate.program.memory import program_memory
from memo.executor.state_recorder import StateRecorder
from memo.report.timeline import copied_s, hidden_share, stalled_s
from memo.spec.parameters import count_parameters
from memo.train.device import device_name, peak_memory_bytes
from memo.train.parallel_model import ParallelModel
from memo.train.setup import Prepared
from memo.train.swap import ChosenSwap


@dataclass(frozen=True)
class MemoryUse:
    """Bytes that this rank uses now, by component; fields are defined in memo.artifacts.run_log.StepRecord."""

    weights_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    rounding_buffers_bytes: int
    host_records_bytes: int

    @property
    def device_bytes(self) -> int:
        """All bytes that stay on the device between steps."""
        return self.weights_bytes + self.gradients_bytes + self.optimizer_bytes + self.rounding_buffers_bytes

    @classmethod
    def of(cls, parts: ParallelModel) -> "MemoryUse":
        """Measure the bytes of a rank's model; the optimizer's moments exist from its first step on."""
        buckets, swap, states = parts.data_parallel.buckets, parts.swap, parts.states
        weights = [
            x for b in buckets for x in (b.weights, b.source) if x is not None and (b.plan.frozen or x is not b.master)
        ]
        trained = parts.data_parallel.trained_buckets
        gradients = [b.gradients if b.gradients is not None else b.gradient_shard for b in trained]
        weights += [coded.code for unit in parts.data_parallel.units for coded in unit.coded]
        optimizer = [b.master for b in trained if b.has_own_master]
        for part in parts.optimizer.parts:
            if part.adam is not None:
                optimizer += [value for state in part.adam.state.values() for value in state.values()]
        host = parts.data_parallel.host
        arena = [] if host is None else [host.record(0)]
        return cls(
            weights_bytes=_outside_bytes(weights, arena),
            gradients_bytes=_outside_bytes(gradients, arena),
            optimizer_bytes=_outside_bytes([x for x in optimizer if isinstance(x, torch.Tensor)], arena),
            rounding_buffers_bytes=sum(x.device_bytes for x in (swap, states, parts.coded) if x is not None),
            host_records_bytes=sum(x.host_bytes for x in (swap, states) if x is not None),
        )


def _outside_bytes(tensors: list[torch.Tensor], arena: list[torch.Tensor]) -> int:
    """Bytes of the tensors outside `arena`, which holds the states in host memory."""
    inside = [x.untyped_storage().data_ptr() for x in arena]
    return sum(x.nbytes for x in tensors if x.untyped_storage().data_ptr() not in inside)


class Meter:
    """Measures the steps of one rank.

    Make it before the model, because on a CPU it measures the size of the process without a model. torch loads more
    libraries in the first step, so this size counts as at least the estimate's.

    Copies are timed in every interval-th step. Timing puts a few timestamps around each layer and copy and waits for
    nothing. On CUDA they are events; events that are pending at the end of the step are read with the next timed step.
    """

    def __init__(self, device: torch.device, interval: int) -> None:
        self.device, self.interval = device, interval
        self._bare_bytes = 0 if device.type == "cuda" else max(resident_bytes(), PROCESS_BYTES)
        self._states: StateRecorder | None = None  # of the last timed step

    @contextlib.contextmanager
    def step(self, parts: ParallelModel, iteration: int) -> Iterator[dict[str, Any]]:
        """A context around one step; yields a dict for the times of its copies by the names of StepRecord's fields,
        which is filled at the end."""
        times: dict[str, Any] = {}
        if iteration % self.interval:
            yield times
            return
        with contextlib.ExitStack() as stack:
            swaps = None if parts.swap is None else stack.enter_context(parts.swap.swapper.recorded())
            if parts.states is not None:
                self._states = stack.enter_context(parts.states.recorded(self._states))
            yield times
        if swaps is not None:
            spans = swaps.finished()
            times["layers_s"] = sum(span.duration_s for span in spans if span.row == "compute")
            times |= {"copy_wait_s": stalled_s(spans), "copies_s": copied_s(spans), "hidden_share": hidden_share(spans)}
        if self._states is not None:
            times |= {"state_copies_s": self._states.take_copies_s(), "state_wait_s": self._states.take_waited_s()}
            times["host_update_s"] = parts.optimizer.host_update_s

    def figures(self, parts: ParallelModel) -> dict[str, Any]:
        """Memory of this rank, by the names of StepRecord's fields."""
        device_peak_bytes, host_peak_bytes = peak_memory_bytes(self.device)
        use = MemoryUse.of(parts)
        planned = parts.transients.statistics() if parts.transients is not None else None
        return {
            **dataclasses.asdict(use),
            "device_peak_bytes": device_peak_bytes,
            "host_peak_bytes": host_peak_bytes,
            "transient_peak_bytes": max(0, device_peak_bytes - use.device_bytes - self._beside_bytes(use)),
            "planned_peak_bytes": None if planned is None else planned.peak_bytes,
            "fallbacks": None if planned is None else planned.num_fallbacks,
        }

    def device_bytes_now(self, use: MemoryUse) -> int:
        """On a CPU, the bytes of the process that count as device memory; the system reports only the whole process."""
        return resident_bytes() - self._beside_bytes(use)

    def _beside_bytes(self, use: MemoryUse) -> int:
        """On a CPU, the bytes of the resident set that are no device tensors: host records and the process itself."""
        return 0 if self.device.type == "cuda" else use.host_records_bytes + self._bare_bytes


def resident_bytes() -> int:
    """The resident set of this process now."""
    return int(psutil.Process().memory_info().rss)


def memory_forecast(parts: ParallelModel) -> dict[str, int]:
    """Foreseen bytes of this rank by component at the peak of a step, from the second step on.

    They are the requests to torch's allocator (memo.estimate.program.memory) under the swap plan. On a CPU `runtime` is
    the process itself. On CUDA `context` is memory outside torch's allocator (memo.estimate.memory_account).
    """
    config, chosen = parts.config, parts.chosen_swap
    stage, world_size = parts.mesh.at.pp, parts.mesh.grid.world_size
    solution = None if chosen is None or chosen.solution.moves_nothing_is_best else chosen.solution
    moved = None if solution is None else solution.tiles
    buffers, host = (0, 0) if solution is None else (solution.device_bytes, solution.host_bytes)
    plain = config if solution is not None else config.override({"offload_alpha": "off"})
    if parts.device.type == "cuda":
        rank = memory_account(plain, world_size, stage, moved=moved)
        states = {"weights": rank.weights, "gradients": rank.gradients, "optimizer": rank.optimizer}
        transient = rank.skeletal + rank.transient + rank.communication
        other = {"context": rank.context}
    else:
        cpu = program_memory(plain, world_size, stage, moved)
        held = cpu.states
        states = {"weights": held.weights, "gradients": held.gradients, "optimizer": held.optimizer}
        transient = cpu.moment.num_bytes
        other = {"runtime": PROCESS_BYTES}
    return {**states, "rounding_buffers": buffers, "host_records": host, "transient": transient, **other}


def swap_forecast(chosen: ChosenSwap) -> SwapForecast:
    """The times and bytes that the swap plan of this rank foresees for a step."""
    problem, solution = chosen.problem, chosen.solution
    moved, moves = solution.moved_bytes, 0 if solution.moves_nothing_is_best else problem.num_moves
    copies_s = problem.offload.copy_s(moved, 0.0) + problem.prefetch.copy_s(moved, 0.0) if moves else 0.0
    wait_s = moves * solution.exposed_s
    return SwapForecast(
        moves=not solution.moves_nothing_is_best,
        origin=chosen.origin,
        limit=str(solution.limit),
        shares={name: tiles / problem.tiles for name, tiles in solution.tiles.items()},
        forward_s=problem.forward_s,
        backward_s=problem.backward_s,
        recompute_s=solution.recompute_s,
        layers_s=problem.num_passes * problem.computed_s(solution.tiles),
        copies_s=moves * copies_s,
        copy_wait_s=wait_s,
        hidden_share=solution.hidden_share,
        device_bytes=solution.device_bytes,
        host_bytes=solution.host_bytes,
    )


def run_header(parts: ParallelModel, prepared: Prepared) -> RunHeader:
    """Make the header of the run's log, from the view of this rank."""
    config, grid = parts.config, parts.mesh.grid
    layout = {"tp": grid.tp, "cp": grid.cp, "pp": grid.pp, "dp": grid.dp, "world_size": grid.world_size}
    planned = parts.transients.planned if parts.transients is not None else None
    plan = planned.plan if planned is not None else None
    return RunHeader(
        started_at=datetime.now().astimezone().isoformat(timespec="seconds"),
        versions={"memo": __version__, "torch": torch.__version__, "python": platform.python_version()},
        device=device_name(parts.device),
        parameters=count_parameters(config),
        layout={**layout, "microbatches": parts.pipeline.microbatches},
        peak_flops=prepared.peak.flops,
        config=dataclasses.asdict(config),
        attention=dataclasses.asdict(prepared.attention),
        host=platform.node(),
        command=shlex.join(sys.orig_argv),
        memory_forecast=memory_forecast(parts),
        swap=None if parts.chosen_swap is None else swap_forecast(parts.chosen_swap),
        memory_plan=None
        if plan is None
        else {name: getattr(plan, name) for name in ("planner", "proof", "arena_bytes", "lower_bound_bytes")},
    )
