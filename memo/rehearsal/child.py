"""The process on the emulated GPU that `memo.rehearsal.start` starts: it runs steps of one rank and measures them.

The run is the same as with `memo train`, from its checks to its optimizer. If memory runs out, that is a result; other
refusals end the process as they end memo train.
"""

import dataclasses
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from memo.artifacts.run_log import StepRecord
from memo.config import RunConfig
from memo.config.grid import rank_grid
from memo.emulated_gpu.face import EmulatedGpu
from memo.errors import HostMemoryError, PlanError, ResourceError, exit_on_error
from memo.estimate.host_memory import total_host_bytes
from memo.estimate.memory_account import memory_account
from memo.estimate.rank_memory import RankMemory
from memo.estimate.unseen_memory import communicator_memory, links_of
from memo.mesh import local_device
from memo.rehearsal.profile import layer_profile
from memo.rehearsal.rehearsed import Planned, RehearsalShortage, Rehearsed, Steady, Times, Waits
from memo.rehearsal.request import STEADY_STEPS, RehearsalRequest
from memo.spec.parameters import count_parameters
from memo.train.oom import asked_bytes, is_out_of_memory
from memo.train.setup import Prepared, prepare
from memo.train.tracing import of_rank
from memo.train.trainer import Trainer
from memo.units import format_bytes


class Rehearsal:
    """The run of one rank. `found` is updated while it runs, so that it is useful even if memory runs out."""

    def __init__(self, request: RehearsalRequest, folder: str) -> None:
        """`folder` gets a file that the run reads. Raises the errors of memo train, except for lack of memory."""
        self.begun_s, self.trace_out, self.hardware = time.monotonic(), request.trace_out, request.hardware
        if EmulatedGpu().is_timed:
            EmulatedGpu().model_time(self.hardware)  # the run's part of the machine that the setting `timed` names
        given = request.config.memory.layer_profile  # measured on another machine, so memo train would refuse it here
        prepared, refusal = _prepared(request.config.override({"layer_profile": None}))
        self.config, self.world_size = prepared.config.override({"admission": False}), prepared.world_size
        self.device, rank = local_device("cuda"), self.config.parallel.simulate_rank
        self.stage = rank_grid(self.config.parallel, self.world_size).coordinates(rank).pp
        layer_times = ""
        if self.config.memory.swaps:
            profile = layer_profile(self.config, self.world_size, request.hardware, self.device, given)
            layer_times = f"{request.hardware.name}, modelled" if given is None else f"{given}, measured"
            path = str(Path(folder) / "layer_profile.json")
            profile.save(path)
            self.config = self.config.override({"layer_profile": path})
        self.when = "before the first step"
        self.found = Rehearsed(
            rank=rank,
            stage=self.stage,
            device_bytes=torch.cuda.mem_get_info(self.device)[1],
            host_bytes=total_host_bytes(),
            foreseen=self._foreseen(None),
            parameters=count_parameters(self.config),
            attention=prepared.attention.name,
            took_s=0.0,
            layer_times=layer_times,
            refusal=refusal,
        )

    def run(self) -> Rehearsed:
        """Run the steps; returns the result. Raises all errors except for lack of memory."""
        try:
            self._take_communicators()
            with Trainer(config=self.config) as trainer:
                self._read_plans(trainer)
                self._run_steps(trainer)
        except Exception as error:
            if not (isinstance(error, ResourceError | PlanError) or is_out_of_memory(error)):
                raise
            self._update(shortage=self._shortage(error))
        self._update(took_s=time.monotonic() - self.begun_s)
        return self.found

    def _update(self, **values: object) -> None:
        self.found = dataclasses.replace(self.found, **values)  # type: ignore[arg-type]

    def _foreseen(self, tiles: dict[str, int] | None) -> RankMemory:
        return memory_account(self.config, self.world_size, self.stage, moved=tiles, links=links_of(self.hardware))

    def _take_communicators(self) -> None:
        """Allocate the memory of NCCL's communicators, because a lone rank does not connect any.

        This comes after the run was checked, as memo train checks it before NCCL connects ranks.
        """
        num_bytes = communicator_memory(self.config, self.world_size, links_of(self.hardware)).foreseen
        free_bytes = torch.cuda.mem_get_info(self.device)[0]
        if num_bytes and not EmulatedGpu().take(num_bytes):
            raise ResourceError(
                f"out of memory {self.when}: NCCL's communicators are foreseen to take {format_bytes(num_bytes)}, and "
                f"{format_bytes(free_bytes)} are free"
            )

    def _read_plans(self, trainer: Trainer) -> None:
        """Read the plans that were made before the first step."""
        chosen = trainer.parts.chosen_swap
        tiles = chosen.solution.tiles if chosen is not None and trainer.parts.swap is not None else None
        self.config = trainer.config  # with the placement of states
        self._update(tiles=tiles, foreseen=self._foreseen(tiles))

    def _run_steps(self, trainer: Trainer) -> None:
        gpu = EmulatedGpu()
        transients = trainer.parts.transients
        while transients is not None and transients.is_learning:
            self._step(trainer)
        self._step(trainer)  # torch's allocator has given its cached memory back for the plan's
        gpu.clear()
        torch.cuda.reset_peak_memory_stats(self.device)
        num_retries = torch.cuda.memory_stats(self.device)["num_alloc_retries"]
        for _ in range(STEADY_STEPS - 1):
            self._step(trainer)
        with gpu.host_waits() as waits:
            record = self._step(trainer)
        stats, counts = torch.cuda.memory_stats(self.device), gpu.counts()
        steady = Steady(
            allocated_bytes=stats["allocated_bytes.all.peak"],
            reserved_bytes=stats["reserved_bytes.all.peak"],
            pinned_bytes=gpu.taken_bytes().get("pinned", 0),
            num_device_mallocs=counts.get("cudaMalloc", 0) + counts.get("cuMemCreate", 0),
            num_alloc_retries=stats["num_alloc_retries"] - num_retries,
            waits=tuple(Waits(count, wait.what, wait.functions) for wait, count in waits.items()),
            times=Times(record.step_time_s, record.tgs, record.mfu_percent, record.hidden_share)
            if gpu.is_timed
            else None,
        )
        self._update(steady=steady, planned=_planned(trainer))
        if self.trace_out is not None:
            self.when = "in the traced step"
            trainer.trace(self.trace_out)
            self._update(trace=str(of_rank(Path(self.trace_out), self.found.rank, self.world_size)))

    def _step(self, trainer: Trainer) -> StepRecord:
        self.when = f"in step {trainer.iteration + 1}"
        return trainer.step()

    def _shortage(self, error: BaseException) -> RehearsalShortage:
        """Describe the shortage; call it while the tensors of the failed step are still alive."""
        if isinstance(error, HostMemoryError):
            return RehearsalShortage("host", self.when, str(error))
        asked = asked_bytes(str(error.__cause__ or error))
        free = torch.cuda.mem_get_info(self.device)[0]
        message = str(error)
        if not isinstance(error, ResourceError | PlanError):
            message = f"out of memory {self.when}"
            if asked is not None:
                message += f", which asked for {format_bytes(asked)} where {format_bytes(free)} are free"
        missing = 0 if asked is None else asked - free  # not positive if the free memory is in pieces
        return RehearsalShortage("device", self.when, message, missing if missing > 0 else None)


def _prepared(config: RunConfig) -> tuple[Prepared, str | None]:
    """(the run as memo train checks it, the reason if memo train would refuse it for lack of memory, else None)."""
    try:
        return prepare(config), None
    except ResourceError as error:
        return prepare(config, must_fit=False), str(error)


def _planned(trainer: Trainer) -> Planned | None:
    transients = trainer.parts.transients
    if transients is None:
        return None
    statistics = transients.statistics()
    if statistics is None or transients.planned is None:
        return Planned(reason=transients.reason)
    return Planned(
        hits=statistics.hits,
        fallbacks=statistics.num_fallbacks,
        arena_bytes=statistics.arena_bytes,
        bound_bytes=transients.planned.plan.lower_bound_bytes,
        reason=transients.reason,
    )


def main(argv: Sequence[str] | None = None) -> int:
    request_file, rehearsed_file = sys.argv[1:] if argv is None else argv
    with exit_on_error(), tempfile.TemporaryDirectory() as folder:
        Rehearsal(RehearsalRequest.load(request_file), folder).run().save(rehearsed_file)
    return 0
