"""One rank's run: opens it, takes single steps, and closes it with its process groups."""

import functools
import math
import os
import time
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist

from memo.checkpoint.owner import Ownership
from memo.checkpoint.run_state import RunState
from memo.config.derived import global_batch_size
from memo.data import PreferencePairs
from memo.data.pairs_of_run import check_learned
from memo.errors import ClosedError
from memo.mesh import Mesh, World, init_distributed, local_device
from memo.model.transformer import Microbatch
from memo.train.agreement import Agreement, on_any_rank
from memo.train.build import build, build_mesh
from memo.train.console import say
from memo.train.ending import shutdown
from memo.train.feed import Feed
from memo.train.log_probs import Draw, Drawn
from memo.train.memory_choice import agreed
from memo.train.metrics import StepRecord, speed
from memo.train.oom import explained
from memo.train.optimizer import learning_rate
from memo.train.parallel_model import ParallelModel
from memo.train.persistence import Persistence, own_directory
from memo.train.planned_memory import batches_to_record, demanding_batches
from memo.train.preference import PreferenceSteps
from memo.train.same_flags import check_same_flags
from memo.train.setup import Prepared
from memo.train.stop import GracefulStop
from memo.train.watchdog import Watchdog
from memo.train.watching import Meter


@dataclass(frozen=True)
class _Opened:
    """The objects of an open run, which close() drops; `preferences`: only of a run with --preference."""

    parts: ParallelModel
    feed: Feed
    persistence: Persistence
    agreement: Agreement
    watchdog: Watchdog
    preferences: PreferenceSteps | None


class Run:
    """The part of a Trainer that opens and closes a run, and takes its steps. `state` has the contents of a checkpoint
    besides tensors, `eval_sets` the evaluation sets by name, and `eval_data` is the first of them."""

    def __init__(self, prepared: Prepared, stop: GracefulStop | None) -> None:
        self._prepared, self.config, self.peak = prepared, prepared.config, prepared.peak
        self.eval_sets = prepared.eval_data
        self.eval_data = next(iter(self.eval_sets.values()), None)
        device = local_device(prepared.device_type)
        self._meter = Meter(device, self.config.logging.log_interval)
        self._stop = stop or GracefulStop()
        self._owns_groups = not dist.is_initialized()
        self._opened: _Opened | None = None
        self._owned: Ownership | None = None
        self._watchdog: Watchdog | None = None
        try:
            world = init_distributed(device, self.config.parallel)
            watchdog = self._watchdog = Watchdog(self.config, world)
            with watchdog.reporting_errors(has_started=False):
                check_same_flags(self.config, world)
                self._open(device, world, watchdog)
        except BaseException:
            self.close()
            raise

    def _open(self, device: torch.device, world: World, watchdog: Watchdog) -> None:
        self.global_batch_size = global_batch_size(self.config, world.size)
        mesh = build_mesh(self.config, world.rank, world.size, watchdog.watch)
        self.config = config = agreed(self.config, mesh, device)
        self._owned = own_directory(config, mesh)
        parts = build(config, mesh, self._prepared.dtype, device)
        feed = parts.feed(self._prepared.train_data)
        persistence = Persistence(config, parts, feed, self._owned)
        agreement = Agreement(mesh, self._stop, lambda: persistence.failed, lambda: persistence.is_due)
        preferences = None
        if config.training.preference is not None:
            preferences = PreferenceSteps(parts, feed, self.print, watchdog.begin)
        self._opened = _Opened(parts, feed, persistence, agreement, watchdog, preferences)
        found = persistence.load()
        self._resumed_at = None if found is None else found.iteration
        seed = config.training.seed  # may differ from the checkpoint's seed if the checkpoint has read no data
        self.state = replace(
            found or RunState(0, 0, seed, 0, 0, 0), seed=seed, global_batch_size=self.global_batch_size
        )
        watchdog.complete(self.iteration)
        self._plan_transients()

    def _plan_transients(self) -> None:
        """Plan the memory requests of steps, from steps of training that are still to come or from rehearsed ones.

        In a rehearsal nothing is updated, and no sample is consumed.
        """
        parts, transients = self.parts, self.parts.transients
        if transients is None or not on_any_rank(transients.allocator is not None, parts.mesh, parts.device):
            return  # no rank has an allocator to plan for
        if self.config.memory.memory_planner_from == "training":
            transients.learn()
            return
        recorded = batches_to_record(self.config, self.feed.peek(), transients.on_cuda)
        steps = [functools.partial(parts.train_step, each, 0.0, self._still_open.agreement) for each in recorded]
        with parts.rehearsing(), explained(parts, self._meter, self.iteration + 1):
            transients.plan(steps)

    def _plan_learned_transients(self, batches: list[Microbatch]) -> None:
        """Plan the memory requests of steps from those of the last one, which trained on `batches`."""
        parts = self.parts
        assert parts.transients is not None
        packed = demanding_batches(self.config, batches)
        with parts.rehearsing(), explained(parts, self._meter, self.iteration + 1):
            parts.transients.plan_learned([functools.partial(parts.rehearse_attention, each) for each in packed])

    def _draw(self, iteration: int) -> Drawn:
        """Draw this rank's microbatches of the next step, from texts or (--preference) from pairs."""
        opened = self._still_open
        check_learned(self.config, isinstance(opened.feed.dataset, PreferencePairs), "train_data")
        if opened.preferences is not None:
            return opened.preferences.draw(iteration)
        return opened.feed.next_global_batch(), {}

    def _step(self, draw: Draw) -> StepRecord:
        """Take one step on the microbatches of `draw`, which also gives fields of the step's record."""
        start_s, opened, iteration = time.perf_counter(), self._still_open, self.iteration + 1
        parts, agreement = opened.parts, opened.agreement
        opened.watchdog.begin(f"step {iteration}")
        with explained(parts, self._meter, iteration):
            (batches, figures), lr = draw(self.iteration), learning_rate(self.config, iteration)
            with self._meter.step(parts, iteration) as copies:
                _, grad_norm, updated = parts.train_step(batches, lr, agreement)
        self._stop.agreed = agreement.stops
        before = self.state
        self.state = state = replace(
            before,
            iteration=iteration,
            consumed_samples=opened.feed.sampler.consumed_samples,
            optimizer_steps=before.optimizer_steps + updated,
            skipped_iterations=before.skipped_iterations + (not updated),
            nan_iterations=before.nan_iterations + math.isnan(agreement.loss),
            consecutive_skips=0 if updated else before.consecutive_skips + 1,
        )
        if agreement.failed:
            opened.persistence.finish()
        opened.watchdog.complete(iteration)
        step_time_s = time.perf_counter() - start_s
        is_last = iteration >= self.config.training.train_iters
        if parts.transients is not None and parts.transients.stepped(updated) and not is_last:
            self._plan_learned_transients(batches)
        return StepRecord(
            iteration=iteration,
            consumed_samples=state.consumed_samples,
            grad_norm=grad_norm,
            lr=lr,
            step_time_s=step_time_s,
            **speed(self.config, self.global_batch_size / parts.mesh.grid.world_size / step_time_s, self.peak.flops),
            global_batch_size=self.global_batch_size,
            skipped_iterations=state.skipped_iterations,
            nan_iterations=state.nan_iterations,
            **{"lm_loss": agreement.loss, **figures},
            **self._meter.figures(parts),
            **copies,
            **({} if parts.router_losses is None else parts.router_losses.as_fields(agreement.figures)),
        )

    def _save(self, directory: str | os.PathLike[str] | None = None, by_time: bool = False) -> Path:
        state = replace(self.state, consumed_samples=self.feed.sampler.consumed_samples, by_time=by_time)
        return self.persistence.save(state, directory)

    def close(self) -> None:
        """Drop the model, and end the process groups if this Trainer started them; a second call does nothing.

        Waits for a checkpoint that is being written; if writing fails, raises CheckpointError after all is closed. If
        one process has several Trainers, close the first one last, because it owns the groups.
        """
        opened, self._opened = self._opened, None
        watchdog, self._watchdog = self._watchdog, None
        try:
            if opened is not None:
                with opened.watchdog.reporting_errors(), self._stop.listening():
                    opened.persistence.finish()
        finally:
            opened = None
            if self._owned is not None:
                self._owned.release()
            if self._owns_groups:
                self._owns_groups = False
                shutdown()
            if watchdog is not None:
                watchdog.close()

    @property
    def _still_open(self) -> _Opened:
        if self._opened is None:
            raise ClosedError(
                "this Trainer is closed and has no model any more: use it before close(), or make another"
            )
        return self._opened

    @property
    def iteration(self) -> int:
        """Number of complete training steps."""
        return self.state.iteration

    @property
    def parts(self) -> ParallelModel:
        """The part of the model that this rank trains. Like `feed` and `mesh` it raises ClosedError after close()."""
        return self._still_open.parts

    @property
    def feed(self) -> Feed:
        """Microbatches of the training data."""
        return self._still_open.feed

    @property
    def persistence(self) -> Persistence:
        """Saves and loads the checkpoints of this run."""
        return self._still_open.persistence

    @property
    def mesh(self) -> Mesh:
        """This rank's coordinates and process groups."""
        return self.parts.mesh

    def print(self, text: str) -> None:
        """Print a line, on rank 0 only (or on the only rank of a simulated world)."""
        if self.mesh.is_main_rank:
            say(text)
