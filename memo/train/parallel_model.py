"""The part of a model that one rank trains, and the passes over it: training steps, evaluation and generation."""

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from memo.config import RunConfig
from memo.config.derived import global_batch_size
from memo.data import GlobalBatchSampler, SampleDataset
from memo.executor.coded_weights import CodedWeights
from memo.executor.layer_states import Update
from memo.executor.phases import Phases, unmarked
from memo.executor.runtime import SwapRuntime
from memo.executor.states import StateStreamer
from memo.mesh import Mesh
from memo.model.transformer import Head, Microbatch, TransformerChunk
from memo.parallel.collectives import all_reduce
from memo.parallel.data import ShardedDataParallel
from memo.parallel.pipeline import PipelineStage
from memo.parallel.router_losses import RouterLosses
from memo.parallel.weight_gradients import own_sum
from memo.spec.schedule import Action, Pipeline, forward_only, one_f_one_b
from memo.train.agreement import Agreement
from memo.train.breadth_first import run_breadth_first, tied_weight
from memo.train.feed import Feed
from memo.train.optimizer import Optimizer
from memo.train.planned_memory import Transients
from memo.train.swap import ChosenSwap

ReadHead = Callable[[Head, Tensor, Microbatch, list[int]], None]
"""Called with the head, its input [n, b, h], the microbatch, and the dataset indices of the microbatch's samples."""


@dataclass
class ParallelModel:
    """Everything that a rank needs to train its part of the model."""

    config: RunConfig
    mesh: Mesh
    pipeline: Pipeline
    stage: PipelineStage
    chunks: list[TransformerChunk]
    data_parallel: ShardedDataParallel
    optimizer: Optimizer
    swap: SwapRuntime | None
    states: StateStreamer | None
    coded: CodedWeights | None
    chosen_swap: ChosenSwap | None
    transients: Transients | None
    phases: Phases
    router_losses: RouterLosses | None
    device: torch.device
    tiles: int
    """Number of tiles of tokens that layers work on."""

    def train_step(
        self, batches: list[Microbatch], lr: float, agreement: Agreement | None = None
    ) -> tuple[Tensor, float, bool]:
        """Run one training step: the gradients of one global batch, then the optimizer. A memory plan covers all of it.

        `agreement` shares the loss and requests among the ranks, with the same wait as the gradient norm. Returns
        (this rank's share of the loss, gradient norm before clipping, whether the weights were updated).
        """
        with self._iteration(), self.optimizer.updating(lr) as update:
            loss_sum = self.forward_backward(batches, update)
            self.phases.begin("optimizer")
            with self.mesh.watch.work("optimizer"):
                if agreement is not None:
                    agreement.send(loss_sum, None if self.router_losses is None else self.router_losses.figures())
                norm, updated = self.optimizer.step(lr, Tensor.item if agreement is None else agreement.read)
                if updated and self.router_losses is not None:  # after the optimizer's wait for checkpoints
                    self.router_losses.update_biases()
                return loss_sum, norm, updated

    def forward_backward(self, batches: list[Microbatch], update: Update | None = None) -> Tensor:
        """Compute and reduce the gradients of one global batch; returns this rank's share of the loss.

        `update`: updates layers with states in host memory during backward.
        """
        self._begin_step(batches, update)
        if self._is_breadth_first:
            (chunk,) = self.chunks
            self.phases.begin("enter_forward")  # RoPE's tables come before the embedding
            loss_sum = run_breadth_first(chunk, batches, self._begin_microbatch)
        else:
            loss_sum = self._run(one_f_one_b(self.pipeline, self.mesh.at.pp), batches)
        self.phases.begin("reduction")
        with self.mesh.watch.work("reduction"):
            if self.router_losses is not None:
                self.router_losses.finish_step(self.mesh.world, self.mesh.at.tp)
            self.data_parallel.main_gradients.finish_reduction(self.states)
        return loss_sum

    def rehearse_attention(self, batches: list[Microbatch]) -> None:
        """Make the requests for memory that attention makes in a step on `batches`; call it in `rehearsing`.

        All microbatches make the same ones, so only the first runs, and the step is dropped as after an exception. With
        several stages or breadth first, microbatches do not run one after the other, and the whole step runs.
        """
        if self.pipeline.stages > 1 or self._is_breadth_first or len(batches) == 1:
            self.train_step(batches, lr=0.0)
            return
        with self._iteration(), self.optimizer.updating(0.0) as update:
            self._begin_step(batches, update)
            forward_and_backward = one_f_one_b(self.pipeline, self.mesh.at.pp)[:2]
            self._run(forward_and_backward, batches)
        self._begin_step(batches, None)  # waits for everything that the dropped step has left running

    def _begin_step(self, batches: list[Microbatch], update: Update | None) -> None:
        if self.states is not None:
            self.states.next_step(update)
        tied = tied_weight(self.chunks[0])
        adds_twice = tied is not None and (self._is_breadth_first or own_sum(tied) is not None)
        self.data_parallel.main_gradients.begin_step(len(batches), tied if adds_twice else None)
        if self.swap is not None:
            self.swap.next_step()
        if self.router_losses is not None:
            self.router_losses.begin_step()

    @contextmanager
    def rehearsing(self) -> Iterator[None]:
        """A context in which a step makes all the memory requests of a real step, and changes no training state
        (memo.train.optimizer.Optimizer.rehearsing)."""
        losses = self.router_losses
        with self.optimizer.rehearsing(), nullcontext() if losses is None else losses.rehearsing():
            yield

    @torch.no_grad()
    def at_head(self, feed: Feed, read: ReadHead) -> None:
        """Run the forward of the next global batch of `feed`, and call `read` for each microbatch instead of the head.

        The loss weights of the microbatches are their loss masks. Collective over all ranks; `read` is called on all
        ranks of the last stage.
        """
        samples, batches = feed.own_samples(), feed.next_global_batch(per_token=True)

        def forward(chunk: TransformerChunk, hidden: Tensor | None, microbatch: int) -> Tensor:
            hidden = chunk.hidden_states(hidden, batches[microbatch])
            if chunk.head is None:
                return hidden
            read(unmarked(chunk.head), hidden, batches[microbatch], samples[microbatch])
            return hidden.new_zeros(())

        with nullcontext() if self.transients is None else self.transients.lent():
            self.stage.run(forward_only(self.pipeline), [functools.partial(forward, chunk) for chunk in self.chunks])

    def feed(self, dataset: SampleDataset) -> Feed:
        """Return a feed of global batches from the first sample on."""
        sampler = GlobalBatchSampler(
            global_batch_size(self.config, self.mesh.grid.world_size), self.config.training.seed
        )
        return Feed(dataset, sampler, self.mesh, self.config, self.device, self.tiles)

    def sum_over_ranks(self, share: Tensor) -> Tensor:
        """The sum over all ranks of the results of `read`; tp ranks have equal results, so only the first counts."""
        return all_reduce(share * (self.mesh.at.tp == 0), self.mesh.world)

    @property
    def _is_breadth_first(self) -> bool:
        return self.config.parallel.gradient_accumulation_order == "breadth_first"

    def _iteration(self) -> AbstractContextManager[None]:
        return nullcontext() if self.transients is None else self.transients.iteration()

    def _begin_microbatch(self, microbatch: int) -> None:
        self.mesh.watch.microbatch = self.phases.microbatch = microbatch

    def _run(self, actions: list[Action], batches: list[Microbatch]) -> Tensor:
        def forward(chunk: TransformerChunk, hidden: Tensor | None, microbatch: int) -> Tensor:
            output: Tensor = chunk(hidden, batches[microbatch])
            return output

        return self.stage.run(actions, [functools.partial(forward, chunk) for chunk in self.chunks], self.phases.enter)
