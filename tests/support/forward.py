"""Run the model once, forward and backward, on given tokens and weights: on one rank or on all of tp."""

from dataclasses import dataclass
from functools import partial

import torch
from layouts import assemble, global_pieces, make
from ranks import run_ranks
from torch import Tensor

from memo.config import RunConfig
from memo.executor.phases import unmarked
from memo.model.transformer import Microbatch, TransformerChunk
from memo.parallel.collectives import all_gather
from memo.spec.schedule import forward_only
from memo.train.parallel_model import ParallelModel


@dataclass(frozen=True)
class Result:
    """Results of one microbatch: logits [s, b, v], losses [s, b], and d(sum of weighted losses)/d(global tensor)."""

    logits: Tensor
    losses: Tensor
    loss: Tensor
    gradients: dict[str, Tensor]


def random_batch(vocab_size: int, seq_length: int, batch: int) -> Microbatch:
    """Random tokens and labels, which all count alike."""
    generator = torch.Generator().manual_seed(5)
    tokens, labels = torch.randint(0, vocab_size, (2, seq_length, batch), generator=generator)
    positions = torch.arange(seq_length).unsqueeze(1).expand(-1, batch).contiguous()
    weight = torch.full((seq_length, batch), 1.0 / (seq_length * batch), dtype=torch.float64)
    return Microbatch(tokens, labels, positions, weight, positions, None)


@torch.no_grad()
def loss_of(model: ParallelModel, batches: list[Microbatch]) -> Tensor:
    """This rank's share of the loss of one global batch, outside of training; changes nothing."""
    total = torch.zeros((), dtype=torch.float64)

    def forward(chunk: TransformerChunk, hidden: Tensor | None, at: int) -> Tensor:
        hidden = chunk.hidden_states(hidden, batches[at])
        if chunk.head is not None:
            losses = unmarked(chunk.head).token_losses(hidden, batches[at].labels)
            total.add_((losses * batches[at].loss_weight).sum())
        return hidden

    forwards = [partial(forward, chunk) for chunk in model.chunks]
    model.stage.run(forward_only(model.pipeline), forwards)
    return total


def run_once(
    config: RunConfig, batch: Microbatch, weights: dict[str, Tensor] | None = None, tp: int = 1, passes: int = 1
) -> Result:
    """One forward and backward of `batch` with global `weights` (None: the initial ones of the seed).

    `passes`: number of passes, of which the last counts; from the second on routers know the load of their experts.
    """
    if tp == 1:
        return run_on_rank(config, batch, weights, 1, passes)
    config = config.override({"tp": tp})
    parts = run_ranks(tp, run_on_rank, config, batch, weights, tp, passes)
    for part in parts[1:]:
        assert torch.equal(part.losses, parts[0].losses), "tp ranks disagree about the losses"
    logits = torch.cat([part.logits for part in parts], dim=-1)[..., : config.model.vocabulary]
    return Result(logits, parts[0].losses, parts[0].loss, assemble([part.gradients for part in parts]))


def run_on_rank(
    config: RunConfig, batch: Microbatch, weights: dict[str, Tensor] | None, tp: int, passes: int = 1
) -> Result:
    """Run as run_once on one of tp ranks; return its columns of the logits and its pieces of the gradients."""
    model, _ = make(config, tp)
    if weights is not None:
        load(model, weights)
    (chunk,) = model.chunks
    assert chunk.head is not None
    head_inputs: list[Tensor] = []
    chunk.head.register_forward_pre_hook(lambda _, args: head_inputs.append(args[0].detach().clone()))
    for _ in range(passes):
        loss = model.forward_backward([batch])
    with torch.no_grad():
        losses = chunk.head.token_losses(head_inputs[0], batch.labels)
        logits = all_gather(chunk.head.norm(head_inputs[0]), model.mesh.tp) @ chunk.head.weight.t()
        if cap := config.model.final_logit_softcapping:
            logits = cap * torch.tanh(logits / cap)
    if tp == 1:
        logits = logits[..., : config.model.vocabulary]
    return Result(logits, losses, loss, global_pieces(model, "grad"))


@torch.no_grad()
def load(model: ParallelModel, weights: dict[str, Tensor]) -> None:
    """Give every parameter its part of the global `weights`; raises KeyError for one that is missing."""
    for segment in model.data_parallel.constants:
        segment.weight.copy_(weights[segment.segment.range.name])
    for parameter in model.data_parallel.parameters.values():
        for piece in parameter.shard.pieces:
            source = weights[piece.name]
            assert source.shape == piece.global_shape, f"{piece.name}: {source.shape} {piece.global_shape}"
            piece.of_local(parameter).copy_(piece.of_global(source))
