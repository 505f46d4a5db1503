"""The Trainer that users call, with the training loop."""

import contextlib
import functools
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from memo.artifacts.regular_file import removed_if_unused
from memo.config import ModelConfig, RunConfig
from memo.config.model_name import choose_model
from memo.data import Sample, Tokenizer
from memo.errors import ConfigError, MemoError
from memo.mesh import refusals_are_heard
from memo.parallel.replicas import check_replicas
from memo.train.agreement import on_any_rank
from memo.train.console import say
from memo.train.data_sources import DataSource, EvalSource, evaluated_now
from memo.train.ending import check_skips
from memo.train.evaluation import Evaluated
from memo.train.evaluation_api import EvaluationApi
from memo.train.events import Callback, Events
from memo.train.header import describe_start
from memo.train.history import History
from memo.train.log_probs import GivenSamples, LossOfLogProbs, batches_on_samples, check_samples
from memo.train.metrics import BenchmarkResult, StepRecord
from memo.train.setup import field_keywords, prepare
from memo.train.stop import GracefulStop
from memo.train.tracing import trace_steps
from memo.train.watching import run_header


class Trainer(EvaluationApi):
    """Trains a model under plain python or torchrun; every rank builds one.

    Args:
        model: a preset's name, such as "llama-3.1-8b", a ModelConfig, or a Hugging Face directory, whose
            weights are then the initial ones.
        config: everything else; defaults to RunConfig().
        train_data: prefix of a .bin/.idx corpus, a list of weights and prefixes as after --data-path, a list of texts,
            a Dataset or iterable of token ids, or an object with `seq_length` and `sample(index)`; default: the data
            that config.data names.
        eval_data: data for evaluations, in the forms of train_data; or several by name, evaluated one by one.
        tokenizer: a tokenizer object, for texts or if the corpus does not decide the vocabulary; or the value of
            --tokenizer.
        plan: which activations move to host memory: "auto" leaves it to config.memory.offload_alpha, whose default is
            to plan from a measured layer; "off"; or a share of the tokens, 0 to 1.
        callbacks: called on every rank with each StepRecord.
        stop: an object that already listens for signals, so that none before or after train() is missed; default:
            train() listens, and close() while it waits for a checkpoint.
        **overrides: single fields by their flag's name, such as seq_length=65536 or tp=2; custom_layer also takes a
            class.

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
        self.callbacks = list(callbacks)
        with removed_if_unused(config.checkpoint.save):
            with refusals_are_heard(config.parallel):
                prepared = prepare(config, train_data, eval_data, tokenizer)
            super().__init__(prepared, stop)

    def train(self) -> History:
        """Run until train_iters; save at the end if config.checkpoint.save is set.

        SIGTERM or SIGINT ends training after the current step on all ranks, with a checkpoint; a second signal ends the
        process at once. Returns the records of its steps, none if no step was left. Raises OutOfMemory on the ranks
        whose memory a step exceeds; DivergenceError after --max-consecutive-skips; ReplicaError from
        --check-replicas-interval.
        """
        with self._stop.listening():
            return self._train()

    def _train(self) -> History:
        training, checkpoint = self.config.training, self.config.checkpoint
        began_at = self.iteration
        self.persistence.write_config()
        # Any rank may have got a signal before the first step; later the Agreement shares it in every step's message.
        self._stop.agreed = on_any_rank(self._stop.requested, self.mesh, self.parts.device)
        with self._events() as events:
            while self.iteration < training.train_iters and not self._stop.agreed:
                events.stepped(self.step())
                check_skips(self.config, self.state)
                if self._is_due(training.check_replicas_interval):
                    self.parts.optimizer.finish()
                    check_replicas(self.parts.data_parallel, self.iteration)
                if self._is_due(training.eval_interval):
                    events.evaluated(self.iteration, self._evaluations())
                if (by_steps := self._is_due(checkpoint.save_interval)) or self._saves_by_time():
                    events.saved(self.iteration, self._save(by_time=not by_steps))
            if events.history and not self.was_stopped:
                events.evaluated(self.iteration, self._evaluations(at_end=True), at_end=True)
        if checkpoint.save is not None and self.iteration not in (began_at, events.saved_at):
            events.saved(self.iteration, self.save())
        self.persistence.finish()
        who = self._stop.signal_name or "a signal or stop() on another rank"
        events.ended(self.iteration, stopped_by=who if self.was_stopped else "")
        return events.history

    def _events(self) -> Events:
        events = Events(self.parts, self.callbacks)
        if self.mesh.is_main_rank:
            events.open_all(self.iteration, functools.partial(run_header, self.parts, self._prepared))
        return events

    def _is_due(self, interval: int) -> bool:
        return interval > 0 and self.iteration % interval == 0

    def _saves_by_time(self) -> bool:
        """Whether a checkpoint is due by the clock; false at the end of the run, which is saved anyway."""
        is_last = self._stop.agreed or self.iteration == self.config.training.train_iters
        return self._still_open.agreement.saves and not is_last

    def _evaluations(self, at_end: bool = False) -> dict[str, Evaluated]:
        """The evaluations of the sets that are due, by name."""
        evaluate = self.evaluate_positions if self.config.training.eval_positions else self.evaluate
        return {name: evaluate(name=name) for name in evaluated_now(self.config.data, self.eval_sets, at_end)}

    @property
    def was_stopped(self) -> bool:
        """Whether a signal or stop() ended the last train() before its last step; the same on all ranks."""
        return self._stop.agreed and self.iteration < self.config.training.train_iters

    def stop(self, reason: str = "") -> None:
        """End train() as a signal does: after the next step, on all ranks, with a checkpoint if --save is given.

        For callbacks. It is enough if one rank calls it, because every step's message shares the request. Outside
        train() it does nothing. `reason` appears in the last line of the run.
        """
        self._stop.request(reason or "stop()")

    def step(self) -> StepRecord:
        """Take one optimizer step on the next global batch; collective. Raises OutOfMemory like train()."""
        return self._step(self._draw)

    def step_on(self, samples: Sequence[Sample], loss: LossOfLogProbs) -> StepRecord:
        """Take one optimizer step on your own loss over the log-probs of `samples`; the training data are not read.

        Collective: all ranks give the same samples, at most one global batch. loss(log_probs) gets the result of
        `log_probs(samples)` and returns a scalar tensor computed from it by torch, equal on every rank; the record's
        lm_loss is that number. It costs one forward more than step(). Raises the errors of step() and `log_probs`, and
        ConfigError for a loss that does not depend on its argument.
        """
        own = GivenSamples(check_samples(samples, "step_on", self.global_batch_size), self.config.data.seq_length)
        return self._step(lambda _: batches_on_samples(self.parts, own, loss))

    def benchmark(self, steps: int, warmup: int = 2) -> BenchmarkResult:
        """Time `steps` optimizer steps after `warmup` unmeasured steps; the weights change.

        Raises ConfigError for fewer than one step.
        """
        if steps < 1:
            raise ConfigError(f"benchmark() got steps = {steps}: give at least 1")
        for _ in range(warmup):
            self.step()
        return BenchmarkResult.of([self.step() for _ in range(steps)])

    def trace(self, path: str | os.PathLike[str], steps: int = 1) -> None:
        """Take `steps` training steps and write a trace of the work of each stream and the messages of each axis.

        https://ui.perfetto.dev opens the file. With several ranks each writes its own file, and `path` gets the rank
        before its suffix. Collective. Raises ArtifactError, after the steps, for a path that cannot be written.
        """
        trace_steps(self.parts, self.step, self.iteration + 1, steps, Path(path))

    def save(self, directory: str | os.PathLike[str] | None = None) -> Path:
        """Write a checkpoint (collective); `directory` defaults to config.checkpoint.save.

        Under config.checkpoint.async_save a thread writes it: the next save(), the end of train() and close() wait
        until it is whole, and they or the next step() raise CheckpointError if writing fails. Values that are not
        finite are never saved: DivergenceError names the tensor.
        """
        return self._save(directory)

    def print_header(self) -> None:
        """Print what is about to run: sizes, layout, data and plans."""
        if self.mesh.is_main_rank:  # describing takes seconds
            say(describe_start(self.parts, self._prepared, self._resumed_at))

    def __enter__(self) -> "Trainer":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        # If one rank fails, the launcher sends signals to the other ranks, which shall still say why they end.
        with contextlib.nullcontext() if error is None else self._stop.listening():
            told = error if error is None or self._watchdog is None else self._watchdog.explain(error)
            with contextlib.suppress(*() if kind is None else (MemoError,)):  # the first error is the one to tell
                self.close()
        if told is not None and told is not error:
            raise told from error
