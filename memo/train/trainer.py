"""The trainer: owns a run from its first check to its last checkpoint."""

import dataclasses
import gc
import math
import os
import signal
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from memo.checkpoint import RunState, has_checkpoint, load_checkpoint, save_checkpoint
from memo.config import ModelConfig, RunConfig
from memo.config.choose import choose_model
from memo.config.derived import global_batch_size, resolved_offload_tiles
from memo.data import GlobalBatchSampler, SampleDataset, Tokenizer
from memo.errors import ClosedError, ConfigError
from memo.estimate.flops import model_flops_per_token
from memo.estimate.parameters import count_parameters
from memo.executor.recorder import record
from memo.mesh import Mesh, init_distributed, local_device
from memo.parallel.collectives import all_reduce
from memo.report.perfetto import write_perfetto
from memo.train.build import ParallelModel, build, build_mesh
from memo.train.device import peak_memory_bytes
from memo.train.feed import Feed
from memo.train.metrics import BenchmarkResult, Reporter, StepRecord
from memo.train.optimizer import learning_rate
from memo.train.planned_memory import describe_run
from memo.train.setup import DataSource, Prepared, prepare
from memo.units import format_count

Callback = Callable[[StepRecord], None]


class Trainer:
    """Trains a model under plain python or torchrun; every rank builds one.

    Args:
        model: a preset's name, such as "llama-3.1-8b", a ModelConfig, or a Hugging Face directory, whose
            weights are then the initial ones.
        config: everything else; defaults to RunConfig().
        train_data, eval_data: prefix of a .bin/.idx corpus, or an object with `seq_length` and
            `sample(index)`; default: what config.data names.
        tokenizer: decides the vocabulary where the corpus does not.
        plan: what of the activations moves to host memory: "auto" leaves it to config.memory.offload_alpha,
            whose default is to plan it from a measured layer; "off"; or a share of the tokens, 0 to 1.
        callbacks: called on every rank with each StepRecord.
        **overrides: single fields by their flag's name, such as seq_length=65536 or tp=2.

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
        eval_data: DataSource | None = None,
        tokenizer: Tokenizer | None = None,
        plan: Literal["auto", "off"] | float = "auto",
        callbacks: Sequence[Callback] = (),
        **overrides: object,
    ) -> None:
        config = config or RunConfig()
        if model is not None:
            config = choose_model(config, model)
        if plan != "auto":
            overrides = {"offload_alpha": plan, **overrides}
        config = config.override(overrides, source="Trainer")
        prepared = prepare(config, train_data, eval_data, tokenizer)
        self.config, self.peak = prepared.config, prepared.peak
        self.callbacks = list(callbacks)
        device = local_device(prepared.device_type)
        self._owns_groups = not dist.is_initialized()
        self._parts: ParallelModel | None = None
        self._train_feed: Feed | None = None
        try:
            self._build(prepared, device)
        except BaseException:
            self.close()
            raise

    def _build(self, prepared: Prepared, device: torch.device) -> None:
        rank, world_size = init_distributed(device, self.config.parallel.distributed_timeout_minutes)
        self.global_batch_size = global_batch_size(self.config, world_size)
        self._parts = build(self.config, build_mesh(self.config, rank, world_size), prepared.dtype, device)
        tiles = resolved_offload_tiles(self.config) if self.parts.swap is not None else 1
        self._train_feed = self._feed(prepared.train_data, tiles)
        self.eval_data = prepared.eval_data
        self.iteration = self.optimizer_steps = self.skipped = self.nan = 0
        self._stop_requested = self._stopping = False  # this rank was asked; all ranks agreed
        self._load()
        self._plan_transients()

    # What a user calls.

    def train(self) -> StepRecord | None:
        """Run until train_iters; save at the end if config.checkpoint.save is set.

        SIGTERM ends training after the current step on all ranks, with a checkpoint. Returns the last
        step's record, or None if there was nothing left to do.
        """
        record = None
        training, checkpoint = self.config.training, self.config.checkpoint
        self._save_config()
        reporter = Reporter.for_rank(
            self.mesh.rank,
            self.config.logging,
            training.train_iters,
            self.iteration,
            lambda: dataclasses.asdict(self.config),
        )
        saved_at = self.iteration
        with reporter, self._graceful_stop():
            while self.iteration < training.train_iters and not self._stopping:
                record = self.step()
                reporter.write(record)
                for callback in self.callbacks:
                    callback(record)
                if training.eval_interval and self.iteration % training.eval_interval == 0:
                    self._print_evaluation()
                if checkpoint.save_interval and self.iteration % checkpoint.save_interval == 0:
                    self.save()
                    saved_at = self.iteration
        if checkpoint.save is not None and saved_at != self.iteration:
            self.save()
        if self.parts.transients is not None:
            self.print(self.parts.transients.report())
        return record

    def step(self) -> StepRecord:
        """One optimizer step on the next global batch; collective over all ranks."""
        start_s = time.perf_counter()
        batches = self.feed.next_global_batch()
        loss_sum = self.parts.forward_backward(batches)
        self.iteration += 1
        lr = learning_rate(self.config, self.iteration)
        grad_norm, updated = self.parts.optimizer.step(lr)
        self.optimizer_steps += updated
        self.skipped += not updated
        loss = self._agree(loss_sum)
        self.nan += math.isnan(loss)
        return self._record(loss, grad_norm, lr, time.perf_counter() - start_s)

    def evaluate(self, iters: int | None = None) -> float:
        """Mean loss in nats a token over `iters` global batches of the evaluation data, always the same ones.

        Changes no training state. Raises ConfigError without evaluation data.
        """
        if self.eval_data is None:
            raise ConfigError("evaluate() needs evaluation data: give --eval-data-path or eval_data=")
        feed = self._feed(self.eval_data)
        losses = []
        for _ in range(iters or self.config.training.eval_iters):
            losses.append(self._agree(self.parts.forward(feed.next_global_batch())))
        return statistics.fmean(losses)

    def benchmark(self, steps: int, warmup: int = 2) -> BenchmarkResult:
        """Time `steps` optimizer steps after `warmup` unmeasured ones; the weights do change.

        Raises ConfigError for fewer than one step.
        """
        if steps < 1:
            raise ConfigError(f"benchmark() got steps = {steps}: give at least 1")
        for _ in range(warmup):
            self.step()
        records = [self.step() for _ in range(steps)]
        median = statistics.median
        return BenchmarkResult(
            steps=steps,
            step_time_s=median(r.step_time_s for r in records),
            tgs=median(r.tgs for r in records),
            mfu_percent=median(r.mfu_percent for r in records),
            tflops_per_gpu=median(r.tflops_per_gpu for r in records),
            device_peak_bytes=records[-1].device_peak_bytes,
            host_peak_bytes=records[-1].host_peak_bytes,
        )

    def trace(self, path: str | os.PathLike[str], steps: int = 1) -> None:
        """Take `steps` training steps and write what each stream did, for https://ui.perfetto.dev; a file a rank.

        With several ranks `path` gets the rank before its suffix. Raises ConfigError for a run that does not swap.
        """
        if self.parts.swap is None:
            raise ConfigError("trace() shows copies beside compute, and nothing moves here: give plan=0.5, say")
        target = Path(path)
        if self.mesh.grid.world_size > 1:
            target = target.with_name(f"{target.stem}.rank{self.mesh.rank}{target.suffix}")
        with record(self.parts.swap.swapper) as recorder:
            for _ in range(steps):
                self.step()
        write_perfetto(recorder.spans(), target, self.mesh.rank)

    def save(self, directory: str | os.PathLike[str] | None = None) -> Path:
        """Write a checkpoint (collective); `directory` defaults to config.checkpoint.save."""
        target = directory or self.config.checkpoint.save
        if target is None:
            raise ConfigError("save() needs a directory: give --save or save(directory)")
        state = RunState(
            iteration=self.iteration,
            consumed_samples=self.feed.sampler.consumed_samples,
            seed=self.config.training.seed,
            optimizer_steps=self.optimizer_steps,
            skipped_iterations=self.skipped,
            nan_iterations=self.nan,
        )
        path = save_checkpoint(Path(target), state, self.parts.optimizer.segment_states(), self.mesh)
        self.print(f"saved checkpoint {path}")
        return path

    def print(self, text: str) -> None:
        """On rank 0 alone."""
        if self.mesh.rank == 0:
            print(text, flush=True)

    def print_header(self) -> None:
        """What is about to run: sizes, layout, and the peak that MFU refers to."""
        config, grid, model = self.config, self.mesh.grid, self.config.model
        pipeline = self.parts.pipeline
        parameters = count_parameters(config).total
        self.print(
            f"model: {format_count(parameters)} parameters, {model.num_layers} layers, "
            f"h = {model.hidden_size}, "
            f"{model.num_attention_heads} heads ({model.kv_heads} k/v), vocabulary {model.vocabulary}, "
            f"{config.training.params_dtype}\n"
            f"layout: tp {grid.tp} x cp {grid.cp} ({config.parallel.cp_comm_type}) x pp {grid.pp} "
            f"(x {pipeline.chunks} chunks) x dp {grid.dp} on {self.parts.device.type}\n"
            f"batch: {self.global_batch_size} x {config.data.seq_length} tokens a step, "
            f"{pipeline.microbatches} microbatches of {config.training.micro_batch_size} on each model copy\n"
            f"MFU refers to {self.peak}"
        )
        if self.parts.chosen_swap is not None:
            self.print(
                f"\nactivations of one layer and microbatch on this rank:\n{self.parts.chosen_swap.describe()}\n"
            )
        if self.parts.transients is not None and self.mesh.rank == 0:  # describing takes seconds
            self.print(f"memory that a step allocates on this rank:\n{self.parts.transients.describe()}\n")

    def close(self) -> None:
        """Let go of the model, and end the process groups if this Trainer started them; a second call does nothing.

        Where several Trainers live in one process, close the first of them last: it owns the groups.
        """
        self._parts = self._train_feed = None
        if self._owns_groups:
            self._owns_groups = False
            shutdown()

    def __enter__(self) -> "Trainer":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @property
    def parts(self) -> ParallelModel:
        """What this rank trains; as `feed` and `mesh`, it raises ClosedError after close()."""
        if self._parts is None:
            raise _closed()
        return self._parts

    @property
    def feed(self) -> Feed:
        """Microbatches of the training data."""
        if self._train_feed is None:
            raise _closed()
        return self._train_feed

    @property
    def mesh(self) -> Mesh:
        """Where this rank stands, and its process groups."""
        return self.parts.mesh

    # How it is done.

    def _feed(self, dataset: SampleDataset, tiles: int = 1) -> Feed:
        sampler = GlobalBatchSampler(self.global_batch_size, self.config.training.seed)
        return Feed(dataset, sampler, self.mesh, self.config.training.micro_batch_size, self.parts.device, tiles)

    def _agree(self, loss_sum: Tensor) -> float:
        """The loss of the global batch from each rank's share; tp ranks hold the same, so one of them counts.

        In the same message: was any rank asked to stop? Then all do, after the same step.
        """
        counted = loss_sum.double() * (self.mesh.at.tp == 0)
        both = torch.stack([counted, torch.full_like(counted, float(self._stop_requested))])
        loss, stop = all_reduce(both, self.mesh.world).tolist()
        self._stopping = stop > 0
        return float(loss)

    def _record(self, loss: float, grad_norm: float, lr: float, step_time_s: float) -> StepRecord:
        tokens = self.global_batch_size * self.config.data.seq_length
        tgs = tokens / step_time_s / self.mesh.grid.world_size
        flops = tgs * model_flops_per_token(self.config.model, self.config.data.seq_length)
        device_peak, host_peak = peak_memory_bytes(self.parts.device)
        return StepRecord(
            iteration=self.iteration,
            consumed_samples=self.feed.sampler.consumed_samples,
            lm_loss=loss,
            grad_norm=grad_norm,
            lr=lr,
            step_time_s=step_time_s,
            tgs=tgs,
            mfu_percent=100.0 * flops / self.peak.flops,
            tflops_per_gpu=flops / 1e12,
            global_batch_size=self.global_batch_size,
            skipped_iterations=self.skipped,
            nan_iterations=self.nan,
            device_peak_bytes=device_peak,
            host_peak_bytes=host_peak,
        )

    def _load(self) -> None:
        directory = self.config.checkpoint.load
        if directory is None or not has_checkpoint(directory):
            return
        state = load_checkpoint(directory, self.parts.optimizer.segment_states(), self.mesh)
        self.parts.optimizer.resume(state.optimizer_steps)
        self.feed.sampler.load_state_dict({"seed": state.seed, "consumed_samples": state.consumed_samples})
        self.iteration, self.optimizer_steps = state.iteration, state.optimizer_steps
        self.skipped, self.nan = state.skipped_iterations, state.nan_iterations
        self.print(f"loaded checkpoint {directory} at iteration {self.iteration}")

    def _plan_transients(self) -> None:
        """The requests of the next step, planned; gradients are zeroed before it, and no sample is consumed."""
        if self.parts.transients is not None:
            batches = self.feed.peek()
            run = describe_run(self.config, self.mesh.grid.world_size, self.mesh.at.pp)
            self.parts.transients.plan(lambda: self.parts.forward_backward(batches), run)

    def _save_config(self) -> None:
        if self.config.checkpoint.save is not None and self.mesh.rank == 0:
            directory = Path(self.config.checkpoint.save)
            directory.mkdir(parents=True, exist_ok=True)
            (directory / "config.toml").write_text(self.config.to_toml(), encoding="utf-8")

    def _print_evaluation(self) -> None:
        loss = self.evaluate()
        self.print(
            f" validation loss at iteration {self.iteration} | lm loss value: {loss:.6E} | "
            f"lm loss PPL: {math.exp(min(20.0, loss)):.6E} |"
        )

    @contextmanager
    def _graceful_stop(self) -> Iterator[None]:
        """SIGTERM asks for an end after the current step; handlers exist only in the main thread."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def request(_: int, __: FrameType | None) -> None:
            self._stop_requested = True

        self._stop_requested = self._stopping = False
        previous = signal.signal(signal.SIGTERM, request)
        try:
            yield
        finally:
            signal.signal(signal.SIGTERM, previous)


def _closed() -> ClosedError:
    return ClosedError("this Trainer is closed and has no model any more: use it before close(), or make another")


def shutdown() -> None:
    """End the process groups, if any were started; let go before of what holds them (Trainer.close() does both).

    gloo's threads free the tensors of the last messages when they get to it. One that does so while the
    interpreter ends aborts the process (exit status -6), so groups, and with them their threads, end here.
    """
    if dist.is_initialized():
        dist.destroy_process_group()
        gc.collect()  # a model is a reference cycle; threads end with the last reference to their group
