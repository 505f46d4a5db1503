"""The trainer: what a user calls, and the training loop."""

import contextlib
import functools
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

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
from memo.train.events import Callback, Events
from memo.train.header import describe_start
from memo.train.history import History
from memo.train.log_probs import GivenSamples, LossOfLogProbs, batches_on_samples, check_samples
from memo.train.metrics import BenchmarkResult, StepRecord
from memo.train.questions import Questions
from memo.train.setup import field_keywords, prepare
from memo.train.stop import GracefulStop
from memo.train.tracing import trace_steps
from memo.train.watching import run_header


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
        self.callbacks = list(callbacks)
        super().__init__(prepared, stop)

    def train(self) -> History:
        """Run until train_iters; save at the end if config.checkpoint.save is set.

        SIGTERM or SIGINT ends training after the current step on all ranks, with a checkpoint; a second one ends the
        process at once. Returns the records of its steps, none if there was nothing left to do. Raises OutOfMemory,
        on the ranks that meet it, for a step that memory does not suffice for; DivergenceError after
        --max-consecutive-skips; ReplicaError from --check-replicas-interval.
        """
        with self._stop.listening():
            return self._train()

    def _train(self) -> History:
        training, checkpoint = self.config.training, self.config.checkpoint
        began_at = self.iteration
        self.persistence.write_config()
        # Of any rank, before the first step; later the Agreement asks in a message that every step sends.
        self._stop.agreed = on_any_rank(self._stop.requested, self.mesh, self.parts.device)
        with self._events() as events:
            while self.iteration < training.train_iters and not self._stop.agreed:
                events.stepped(self.step())
                check_skips(self.config, self.state)
                if self._is_due(training.check_replicas_interval):
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
        """Whether it is time for a checkpoint by the clock, and not the end of the run, which is saved anyhow."""
        is_last = self._stop.agreed or self.iteration == self.config.training.train_iters
        return self._still_open.agreement.saves and not is_last

    def _evaluations(self, at_end: bool = False) -> dict[str, Evaluated]:
        """Of the sets that are due, by name."""
        evaluate = self.evaluate_positions if self.config.training.eval_positions else self.evaluate
        return {name: evaluate(name=name) for name in evaluated_now(self.config.data, self.eval_sets, at_end)}

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
        return self._step(self._draw)

    def step_on(self, samples: Sequence[Sample], loss: LossOfLogProbs) -> StepRecord:
        """One optimizer step on a loss of your own over the log-probs of `samples`; no sample of the data is consumed.

        Collective: all ranks give the same samples, at most one global batch. loss(log_probs) gets what `log_probs`
        returns of them, and returns a number that torch has computed from it, on every rank alike; the record's lm_loss
        is that number. Costs one forward more than step(), and raises as it and `log_probs`, and ConfigError for a loss
        that does not depend on its argument.
        """
        own = GivenSamples(check_samples(samples, "step_on", self.global_batch_size), self.config.data.seq_length)
        return self._step(lambda _: batches_on_samples(self.parts, own, loss))

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

    def print_header(self) -> None:
        """What is about to run: sizes, layout, data and plans."""
        if self.mesh.is_main_rank:  # describing takes seconds
            say(describe_start(self.parts, self._prepared, self._resumed_at))

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
