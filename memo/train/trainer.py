"""The trainer: owns a run from its first check to its last checkpoint."""

import contextlib
import functools
import math
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal, TypeVar

import torch
import torch.distributed as dist

from memo.checkpoint.owner import Ownership
from memo.checkpoint.run_state import RunState
from memo.config import ModelConfig, RunConfig
from memo.config.derived import global_batch_size
from memo.config.grid import rank_grid
from memo.config.model_name import choose_model
from memo.data import Tokenizer
from memo.errors import ClosedError, ConfigError, MemoError
from memo.mesh import Mesh, World, init_distributed, local_device, refusals_are_heard
from memo.parallel.replicas import check_replicas
from memo.train.agreement import Agreement, on_any_rank
from memo.train.build import ParallelModel, build, build_mesh
from memo.train.console import Outcome, describe_end, say
from memo.train.data_sources import DataSource, EvalSource, evaluated_now
from memo.train.ending import check_skips, shutdown, stopped
from memo.train.evaluation import as_record
from memo.train.feed import Feed
from memo.train.header import describe_start
from memo.train.history import History
from memo.train.memory_choice import agreed
from memo.train.metrics import BenchmarkResult, Reporter, StepRecord, speed
from memo.train.oom import explained
from memo.train.optimizer import learning_rate
from memo.train.persistence import Persistence, own_directory
from memo.train.planned_memory import batches_to_record, describe_run
from memo.train.questions import Questions
from memo.train.same_flags import check_same_flags
from memo.train.setup import Prepared, field_keywords, prepare
from memo.train.stop import GracefulStop
from memo.train.tracing import trace_steps
from memo.train.watchdog import Watchdog
from memo.train.watching import CopyTimes, Meter, run_header

Callback = Callable[[StepRecord], None]
Part = TypeVar("Part")


class Trainer(Questions):
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
        self.config, self.peak, self.attention = prepared.config, prepared.peak, prepared.attention
        self._prepared = prepared
        self.callbacks = list(callbacks)
        device = local_device(prepared.device_type)
        self.meter = Meter(device, self.config.logging.log_interval)
        self._stop = stop or GracefulStop()
        self._owns_groups = not dist.is_initialized()
        self._parts: ParallelModel | None = None
        self._train_feed: Feed | None = None
        self._owned: Ownership | None = None
        self._persistence: Persistence | None = None
        self._agreement: Agreement | None = None
        self._watchdog: Watchdog | None = None
        try:
            world = init_distributed(device, self.config.parallel)
            self._watchdog = Watchdog(self.config, world, rank_grid(self.config, world.size))
            with self._watchdog.reporting_errors(has_started=False):
                check_same_flags(self.config, world)
                self._build(prepared, device, world)
        except BaseException:
            self.close()
            raise

    def _build(self, prepared: Prepared, device: torch.device, world: World) -> None:
        self.global_batch_size = global_batch_size(self.config, world.size)
        mesh = build_mesh(self.config, world.rank, world.size, self.watchdog.watch)
        self.config = agreed(self.config, mesh, device)
        self._owned = own_directory(self.config, mesh)
        self._parts = build(self.config, mesh, prepared.dtype, device)
        self._train_feed = self._feed(prepared.train_data, self.parts.tiles)
        # Layers that slots hold whole are plain ones in an evaluation, which work on all tokens at once.
        self._eval_tiles = self.parts.tiles if self.config.memory.sweeps else 1
        self.eval_sets = prepared.eval_data
        self.eval_data = next(iter(self.eval_sets.values()), None)
        self.iteration = self.optimizer_steps = self.skipped = self.consecutive_skips = self.nan = 0
        self._persistence = Persistence(self.config, self.parts, self.feed, self._owned)
        self._agreement = Agreement(mesh, self._stop, lambda: self.persistence.failed, lambda: self.persistence.is_due)
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
        """One optimizer step on the next global batch; collective over all ranks."""
        start_s = time.perf_counter()
        self.watchdog.begin(f"step {self.iteration + 1}")
        batches, agreement = self.feed.next_global_batch(), _open(self._agreement)
        lr = learning_rate(self.config, self.iteration + 1)
        with self.meter.step(self.parts, self.iteration + 1) as copies:
            _, grad_norm, updated = self.parts.train_step(batches, lr, agreement)
        self.iteration += 1
        self.optimizer_steps += updated
        self.skipped += not updated
        self.consecutive_skips = 0 if updated else self.consecutive_skips + 1
        loss, self._stop.agreed = agreement.loss, agreement.stops
        if agreement.failed:
            self.persistence.finish()
        self.nan += math.isnan(loss)
        self.watchdog.complete(self.iteration)
        return self._record(loss, grad_norm, lr, time.perf_counter() - start_s, copies)

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
        return self.persistence.save(self._state(), directory)

    def print(self, text: str) -> None:
        """On rank 0 alone (or the only rank there is)."""
        if self.mesh.is_main_rank:
            say(text)

    def print_header(self) -> None:
        """What is about to run: sizes, layout, data and plans."""
        if self.mesh.is_main_rank:  # describing takes seconds
            sizes = (self.feed.dataset, self.global_batch_size)
            text = describe_start(self.config, self.parts, *sizes, self._prepared, self._resumed_at)
            say(text)

    def close(self) -> None:
        """Let go of the model, and end the process groups if this Trainer started them; a second call does nothing.

        Waits for a checkpoint that is being written, and raises CheckpointError, when all is closed, if it cannot be.
        Where several Trainers live in one process, close the first of them last: it owns the groups.
        """
        persistence, self._persistence = self._persistence, None
        watchdog, self._watchdog = self._watchdog, None
        try:
            if persistence is not None and watchdog is not None:
                with watchdog.reporting_errors(), self._stop.listening():
                    persistence.finish()
        finally:
            persistence = self._parts = self._train_feed = self._agreement = None
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
        return _open(self._parts)

    @property
    def feed(self) -> Feed:
        """Microbatches of the training data."""
        return _open(self._train_feed)

    @property
    def persistence(self) -> Persistence:
        """What of this run is on disk, or on its way."""
        return _open(self._persistence)

    @property
    def watchdog(self) -> Watchdog:
        """Over this rank and the others."""
        return _open(self._watchdog)

    @property
    def mesh(self) -> Mesh:
        """Where this rank stands, and its process groups."""
        return self.parts.mesh

    # How it is done.

    def _train(self) -> History:
        history, saved, outcome = History(), None, Outcome()
        training, checkpoint = self.config.training, self.config.checkpoint
        self.persistence.write_config()
        header = functools.partial(run_header, self.config, self.parts, self.peak, self.attention)
        reporter = Reporter.for_rank(self.mesh.is_main_rank, self.config, self.iteration, header)
        saved_at = self.iteration
        # Of any rank, before the first step; later the Agreement asks in a message that every step sends.
        self._stop.agreed = on_any_rank(self._stop.requested, self.mesh, self.parts.device)
        with reporter:
            while self.iteration < training.train_iters and not self._stop.agreed:
                with explained(self.config, self.parts, self.meter, self.iteration + 1):
                    record = self.step()
                reporter.write(record)
                outcome.add(record, self.global_batch_size * self.config.data.seq_length)
                history.add(record)
                for callback in self.callbacks:
                    callback(record)
                check_skips(self.config, self.iteration, self.consecutive_skips)
                if training.check_replicas_interval and self.iteration % training.check_replicas_interval == 0:
                    check_replicas(self.parts.data_parallel, self.iteration)
                if training.eval_interval and self.iteration % training.eval_interval == 0:
                    outcome.validation_loss = self._report_evaluation(reporter)[0]
                    history.evaluations.append((self.iteration, outcome.validation_loss))
                by_steps = checkpoint.save_interval > 0 and self.iteration % checkpoint.save_interval == 0
                is_last = self._stop.agreed or self.iteration == training.train_iters  # which is saved below
                if by_steps or (_open(self._agreement).saves and not is_last):
                    saved, saved_at = self.persistence.save(self._state(by_time=not by_steps)), self.iteration
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
            self.print(describe_end(self.config, outcome, self.iteration, self.parts.device.type == "cpu", saved))
        return history

    def _record(self, loss: float, grad_norm: float, lr: float, step_time_s: float, copies: CopyTimes) -> StepRecord:
        return StepRecord(
            iteration=self.iteration,
            consumed_samples=self.feed.sampler.consumed_samples,
            lm_loss=loss,
            grad_norm=grad_norm,
            lr=lr,
            step_time_s=step_time_s,
            **speed(self.config, self.global_batch_size / self.mesh.grid.world_size / step_time_s, self.peak.flops),
            global_batch_size=self.global_batch_size,
            skipped_iterations=self.skipped,
            nan_iterations=self.nan,
            **self.meter.figures(self.parts, copies),
        )

    def _state(self, by_time: bool = False) -> RunState:
        return RunState(
            iteration=self.iteration,
            consumed_samples=self.feed.sampler.consumed_samples,
            seed=self.config.training.seed,
            optimizer_steps=self.optimizer_steps,
            skipped_iterations=self.skipped,
            nan_iterations=self.nan,
            global_batch_size=self.global_batch_size,
            consecutive_skips=self.consecutive_skips,
            by_time=by_time,
        )

    def _load(self) -> None:
        state = self.persistence.load()
        self._resumed_at = None if state is None else state.iteration
        if state is not None:
            self.iteration, self.optimizer_steps = state.iteration, state.optimizer_steps
            self.skipped, self.nan = state.skipped_iterations, state.nan_iterations
            self.consecutive_skips = state.consecutive_skips
        self.watchdog.complete(self.iteration)

    def _plan_transients(self) -> None:
        """The requests of the next step, planned: nothing is updated, and no sample is consumed."""
        transients = self.parts.transients
        if transients is None:
            return
        if not on_any_rank(transients.allocator is not None, self.mesh, self.parts.device):
            return  # steps would be run for nothing
        run = describe_run(self.config, self.mesh.grid.world_size, self.mesh.at.pp)
        agreement = _open(self._agreement)
        steps = [
            functools.partial(self.parts.train_step, batches, 0.0, agreement)
            for batches in batches_to_record(self.config, self.feed.peek())
        ]
        with self.parts.optimizer.rehearsing(), explained(self.config, self.parts, self.meter, self.iteration + 1):
            transients.plan(steps, run)

    def _report_evaluation(self, reporter: Reporter, at_end: bool = False) -> list[float]:
        """Tell the losses of the sets that are due, in nats a token, and return them."""
        return [self._report_set(reporter, name) for name in evaluated_now(self.config.data, self.eval_sets, at_end)]

    def _report_set(self, reporter: Reporter, name: str) -> float:
        if not self.config.training.eval_positions:
            loss = self.evaluate(name=name)
            reporter.write_evaluation(self.iteration, as_record(loss, name))
            return loss
        found = self.evaluate_positions(name=name)
        reporter.write_evaluation(self.iteration, as_record(found, name))
        self.print(found.table())
        return found.loss


def _open(part: Part | None) -> Part:
    if part is None:
        raise ClosedError("this Trainer is closed and has no model any more: use it before close(), or make another")
    return part
