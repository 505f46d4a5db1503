"""The trainer: owns a run from its first check to its last checkpoint."""

import contextlib
import functools
import math
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist

from memo.checkpoint.owner import Ownership
from memo.checkpoint.run_state import RunState
from memo.config import ModelConfig, RunConfig
from memo.config.derived import global_batch_size
from memo.config.model_name import choose_model
from memo.data import Tokenizer
from memo.errors import ClosedError, ConfigError, MemoError
from memo.mesh import Mesh, World, init_distributed, local_device, refusals_are_heard
from memo.parallel.replicas import check_replicas
from memo.train.agreement import Agreement, on_any_rank
from memo.train.build import ParallelModel, build, build_mesh
from memo.train.console import describe_end, say
from memo.train.data_sources import DataSource, EvalSource, evaluated_now
from memo.train.ending import check_skips, shutdown, stopped
from memo.train.evaluation import LossByPosition, as_record
from memo.train.feed import Feed, run_feed
from memo.train.header import describe_start
from memo.train.history import History
from memo.train.log_probs import Draw
from memo.train.memory_choice import agreed
from memo.train.metrics import BenchmarkResult, Reporter, StepRecord, speed
from memo.train.oom import explained
from memo.train.optimizer import learning_rate
from memo.train.over_log_probs import OverLogProbs
from memo.train.persistence import Persistence, own_directory
from memo.train.planned_memory import batches_to_record, describe_run
from memo.train.preference import draw_of
from memo.train.same_flags import check_same_flags
from memo.train.setup import field_keywords, prepare
from memo.train.stop import GracefulStop
from memo.train.tracing import trace_steps
from memo.train.watchdog import Watchdog
from memo.train.watching import Meter, run_header

Callback = Callable[[StepRecord], None]


@dataclass(frozen=True)
class _Opened:
    """What a Trainer trains with, until close() lets go of it."""

    parts: ParallelModel
    feed: Feed
    persistence: Persistence
    agreement: Agreement
    watchdog: Watchdog
    draw: Draw


class Trainer(OverLogProbs):
    """Trains a model under plain python or torchrun; every rank builds one.

    Args:
        model: a preset's name, such as "llama-3.1-8b", a ModelConfig, or a Hugging Face directory, whose
            weights are then the initial ones.
        config: everything else; defaults to RunConfig().
        train_data: prefix of a .bin/.idx corpus, a list of weights and prefixes of several, as after --data-path, a
            list of texts, a Dataset or iterable of token ids, or an object with `seq_length` and `sample(index)`;
            default: what config.data names.
        eval_data: the same, for evaluations; or several by name, each of which is evaluated for itself.
        tokenizer: of texts, or where the corpus does not decide the vocabulary; or what --tokenizer names.
        plan: what of the activations moves to host memory: "auto" leaves it to config.memory.offload_alpha,
            whose default is to plan it from a measured layer; "off"; or a share of the tokens, 0 to 1.
        callbacks: called on every rank with each StepRecord.
        stop: listens for signals already, so that none is missed before train() or after it; default: train() listens,
            and close() while it waits for a checkpoint.
        **overrides: single fields by their flag's name, such as seq_length=65536 or tp=2; custom_layer takes the class,
            too.

    Use it as a context manager, or call close() at the end: under torchrun the first Trainer of a process starts
    process groups, whose threads must end before the interpreter does.

    Raises ConfigError, DataError, CheckpointError or ResourceError before any process group starts.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | ModelConfig | None = None,
        config: RunConfig | None = None,
        *,
        train_data: DataSource | None = None,
        eval_data: EvalSource | None = None,
        tokenizer: Tokenizer | str | None = None,
        plan: Literal["off", "auto"] | float = "auto",
        callbacks: Sequence[Callback] = (),
        stop: GracefulStop | None = None,
        **overrides: object,
    ) -> None:
        config = config or RunConfig()
        if model is not None:
            config = choose_model(config, model)
        if plan != "auto":
            overrides = {"offload_alpha": plan, **overrides}
        if isinstance(tokenizer, str):
            overrides, tokenizer = {"tokenizer": tokenizer, **overrides}, None
        config = config.override(field_keywords(overrides), source="Trainer")
        with refusals_are_heard(config.parallel):
            prepared = prepare(config, train_data, eval_data, tokenizer)
        self.config, self.peak = prepared.config, prepared.peak
        self._prepared = prepared
        self.callbacks = list(callbacks)
        device = local_device(prepared.device_type)
        self.meter = Meter(device, self.config.logging.log_interval)
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
                self._build(device, world, watchdog)
        except BaseException:
            self.close()
            raise

    def _build(self, device: torch.device, world: World, watchdog: Watchdog) -> None:
        self.global_batch_size = global_batch_size(self.config, world.size)
        mesh = build_mesh(self.config, world.rank, world.size, watchdog.watch)
        self.config = agreed(self.config, mesh, device)
        self._owned = own_directory(self.config, mesh)
        parts = build(self.config, mesh, self._prepared.dtype, device)
        feed = run_feed(self.config, mesh, device, self._prepared.train_data, parts.tiles)
        self.eval_sets = self._prepared.eval_data
        self.eval_data = next(iter(self.eval_sets.values()), None)
        persistence = Persistence(self.config, parts, feed, self._owned)
        agreement = Agreement(mesh, self._stop, lambda: persistence.failed, lambda: persistence.is_due)
        draw = draw_of(self.config, parts, feed, self._feed, self.print, watchdog.begin)
        self._opened = _Opened(parts, feed, persistence, agreement, watchdog, draw)
        self._load()
        self._plan_transients()

    # What a user calls.

    def train(self) -> History:
        """Run until train_iters; save at the end if config.checkpoint.save is set.

        SIGTERM or SIGINT ends training after the current step on all ranks, with a checkpoint; a second one ends the
        process at once. Returns the records of its steps, none if there was nothing left to do. Raises OutOfMemory,
        on the ranks that meet it, for a step that memory does not suffice for; DivergenceError after
        --max-consecutive-skips; ReplicaError from --check-replicas-interval.
        """
        with self._stop.listening():
            return self._train()

    @property
    def was_stopped(self) -> bool:
        """Whether a signal or stop() ended the last train() before its last step; the same on all ranks."""
        return self._stop.agreed and self.iteration < self.config.training.train_iters

    def stop(self, reason: str = "") -> None:
        """End train() as a signal does: after the next step, on all ranks, with a checkpoint if one is to be saved.

        For callbacks. One rank that calls it is enough, because the ranks tell each other in the message of each step;
        outside of train() it does nothing. `reason` stands in the last line of the run.
        """
        self._stop.request(reason or "stop()")

    def step(self) -> StepRecord:
        """One optimizer step on the next global batch; collective over all ranks. Raises OutOfMemory as train()."""
        return self._step(self._still_open.draw)

    def _step(self, draw: Draw) -> StepRecord:
        start_s, opened, iteration = time.perf_counter(), self._still_open, self.iteration + 1
        parts, feed, agreement = opened.parts, opened.feed, opened.agreement
        opened.watchdog.begin(f"step {iteration}")
        with explained(self.config, parts, self.meter, iteration):
            (batches, figures), lr = draw(self.iteration), learning_rate(self.config, iteration)
            with self.meter.step(parts, iteration) as copies:
                _, grad_norm, updated = parts.train_step(batches, lr, agreement)
        self._stop.agreed = agreement.stops
        before = self.state
        self.state = state = replace(
            before,
            iteration=iteration,
            consumed_samples=feed.sampler.consumed_samples,
            optimizer_steps=before.optimizer_steps + updated,
            skipped_iterations=before.skipped_iterations + (not updated),
            nan_iterations=before.nan_iterations + math.isnan(agreement.loss),
            consecutive_skips=0 if updated else before.consecutive_skips + 1,
        )
        if agreement.failed:
            opened.persistence.finish()
        opened.watchdog.complete(iteration)
        step_time_s = time.perf_counter() - start_s
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
            **self.meter.figures(parts, copies),
            **({} if parts.router_losses is None else parts.router_losses.as_fields(agreement.figures)),
        )

    def benchmark(self, steps: int, warmup: int = 2) -> BenchmarkResult:
        """Time `steps` optimizer steps after `warmup` unmeasured ones; the weights do change.

        Raises ConfigError for fewer than one step.
        """
        if steps < 1:
            raise ConfigError(f"benchmark() got steps = {steps}: give at least 1")
        for _ in range(warmup):
            self.step()
        return BenchmarkResult.of([self.step() for _ in range(steps)])

    def trace(self, path: str | os.PathLike[str], steps: int = 1) -> None:
        """Take `steps` training steps and write what each stream did and which messages went over which axis.

        https://ui.perfetto.dev opens the file; with several ranks each writes its own, and `path` gets the rank before
        its suffix. Collective. Raises ArtifactError for a path that cannot be written, after the steps.
        """
        trace_steps(self.parts, self.step, self.iteration + 1, steps, Path(path))

    def save(self, directory: str | os.PathLike[str] | None = None) -> Path:
        """Write a checkpoint (collective); `directory` defaults to config.checkpoint.save.

        Under config.checkpoint.async_save a thread goes on writing it: the next save(), the end of train() and
        close() wait until it is whole, and they or the next step() raise CheckpointError if it cannot be. What is not
        finite is never saved: DivergenceError names the tensor.
        """
        return self._save(directory)

    def print(self, text: str) -> None:
        """On rank 0 alone (or the only rank there is)."""
        if self.mesh.is_main_rank:
            say(text)

    def print_header(self) -> None:
        """What is about to run: sizes, layout, data and plans."""
        if self.mesh.is_main_rank:  # describing takes seconds
            say(describe_start(self.config, self.parts, self._prepared, self._resumed_at))

    def close(self) -> None:
        """Let go of the model, and end the process groups if this Trainer started them; a second call does nothing.

        Waits for a checkpoint that is being written, and raises CheckpointError, when all is closed, if it cannot be.
        Where several Trainers live in one process, close the first of them last: it owns the groups.
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

    def __enter__(self) -> "Trainer":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        # Where one rank fails, a launcher ends the others, which are still to say why they end.
        with contextlib.nullcontext() if error is None else self._stop.listening():
            told = error if error is None or self._watchdog is None else self._watchdog.explain(error)
            with contextlib.suppress(*() if kind is None else (MemoError,)):  # the first error is the one to tell
                self.close()
        if told is not None and told is not error:
            raise told from error

    @property
    def parts(self) -> ParallelModel:
        """What this rank trains; as `feed` and `mesh`, it raises ClosedError after close()."""
        return self._still_open.parts

    @property
    def feed(self) -> Feed:
        """Microbatches of the training data."""
        return self._still_open.feed

    @property
    def persistence(self) -> Persistence:
        """What of this run is on disk, or on its way."""
        return self._still_open.persistence

    @property
    def mesh(self) -> Mesh:
        """Where this rank stands, and its process groups."""
        return self.parts.mesh

    # How it is done.

    @property
    def _still_open(self) -> _Opened:
        if self._opened is None:
            raise ClosedError(
                "this Trainer is closed and has no model any more: use it before close(), or make another"
            )
        return self._opened

    def _train(self) -> History:
        history, saved, saved_at = History(), None, self.iteration
        training, checkpoint, agreement = self.config.training, self.config.checkpoint, self._still_open.agreement
        self.persistence.write_config()
        header = functools.partial(run_header, self.config, self.parts, self._prepared)
        reporter = Reporter.for_rank(self.mesh.is_main_rank, self.config, self.iteration, header)
        # Of any rank, before the first step; later the Agreement asks in a message that every step sends.
        self._stop.agreed = on_any_rank(self._stop.requested, self.mesh, self.parts.device)

        def is_due(interval: int) -> bool:
            return interval > 0 and self.iteration % interval == 0

        with reporter:
            while self.iteration < training.train_iters and not self._stop.agreed:
                record = self.step()
                reporter.write(record)
                history.add(record)
                for callback in self.callbacks:
                    callback(record)
                check_skips(self.config, self.state)
                if is_due(training.check_replicas_interval):
                    check_replicas(self.parts.data_parallel, self.iteration)
                if is_due(training.eval_interval):
                    history.evaluations.append((self.iteration, self._report_evaluation(reporter)[0]))
                by_steps = is_due(checkpoint.save_interval)
                is_last = self._stop.agreed or self.iteration == training.train_iters  # which is saved below
                if by_steps or (agreement.saves and not is_last):
                    saved, saved_at = self._save(by_time=not by_steps), self.iteration
            if history and not self.was_stopped:
                self._report_evaluation(reporter, at_end=True)
        if checkpoint.save is not None and saved_at != self.iteration:
            saved = self.save()
        self.persistence.finish()
        if self.parts.transients is not None:
            self.print(self.parts.transients.report())
        if self.was_stopped:
            self.print(stopped(self.config, self._stop.signal_name, self.iteration, saved))
        else:
            self.print(describe_end(self.config, history, self.iteration, self.parts.device.type == "cpu", saved))
        return history

    def _save(self, directory: str | os.PathLike[str] | None = None, by_time: bool = False) -> Path:
        state = replace(self.state, consumed_samples=self.feed.sampler.consumed_samples, by_time=by_time)
        return self.persistence.save(state, directory)

    def _load(self) -> None:
        found = self.persistence.load()
        self._resumed_at = None if found is None else found.iteration
        seed = self.config.training.seed  # may be another one where the checkpoint has read no data
        state = found or RunState(0, 0, seed, 0, 0, 0)
        self.state = replace(state, seed=seed, global_batch_size=self.global_batch_size)
        self._still_open.watchdog.complete(self.iteration)

    def _plan_transients(self) -> None:
        """The requests of the next step, planned: nothing is updated, and no sample is consumed."""
        transients = self.parts.transients
        if transients is None:
            return
        if not on_any_rank(transients.allocator is not None, self.mesh, self.parts.device):
            return  # steps would be run for nothing
        run = describe_run(self.config, self.mesh.grid.world_size, self.mesh.at.pp)
        steps = [
            functools.partial(self.parts.train_step, batches, 0.0, self._still_open.agreement)
            for batches in batches_to_record(self.config, self.feed.peek(), transients.on_cuda)
        ]
        with self.parts.rehearsing(), explained(self.config, self.parts, self.meter, self.iteration + 1):
            transients.plan(steps, run)

    def _report_evaluation(self, reporter: Reporter, at_end: bool = False) -> list[float]:
        """Tell the losses of the sets that are due, in nats a token, and return them."""
        losses = []
        for name in evaluated_now(self.config.data, self.eval_sets, at_end):
            by_position = self.config.training.eval_positions
            found = self.evaluate_positions(name=name) if by_position else self.evaluate(name=name)
            reporter.write_evaluation(self.iteration, as_record(found, name))
            if isinstance(found, LossByPosition):
                self.print(found.table())
            losses.append(found.loss if isinstance(found, LossByPosition) else found)
        return losses
