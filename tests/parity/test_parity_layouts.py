"""Models of every family in a run of four ranks, tp 2 x pp 2, compute what transformers computes with them.

fp32 throughout, in both: what differs is rounding. Logits of a published model, and after some training the loss,
and so the perplexity, of the exported one.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from forward import random_batch
from hf_directories import VOCAB, write_model
from hugging_face import needs
from layouts import make, tiny
from ranks import run_ranks
from torch import Tensor

from memo import Trainer
from memo.checkpoint.hugging_face.exporter import export_checkpoint
from memo.config.model_name import choose_model
from memo.data.sample import Sample, cut_sample
from memo.parallel.collectives import all_gather

pytestmark = needs("transformers")
torch.set_num_threads(1)
SEQ_LENGTH, BATCH, STEPS, EVAL_BATCHES = 64, 2, 8, 2
LAYOUT: dict[str, Any] = {"tp": 2, "pp": 2}
RANKS = 4
GROUPS = {
    "here": ["llama", "qwen3", "gpt2", "olmo3"],
    "in full": ["gemma2", "gemma3_text", "gemma4_text", "llama3", "ministral", "qwen2", "smollm3", "starcoder2"],
}
"""Other mathematics each, and what differs from these in settings; test_parity_hugging_face has all in one process."""
FAMILIES = [
    *(pytest.param("here", name, id=name) for name in GROUPS["here"]),
    *(pytest.param("in full", name, marks=pytest.mark.full, id=name) for name in GROUPS["in full"]),
]
LOGITS_BOUND = 2e-6
"""Relative, in the L2 norm; measured: at most 5.4e-7, a few roundings of fp32 (1.2e-7)."""
LOSS_BOUND = 5e-7
"""Relative, of the mean loss in nats; measured: at most 1.1e-7, a rounding of fp32."""


@dataclass(frozen=True)
class Counting:
    """Documents that count up in steps of 1 to 4, from anywhere: a tiny model learns them in a few steps."""

    first: int
    seq_length: int = SEQ_LENGTH

    def sample(self, index: int) -> Sample:
        index += self.first
        tokens = (7 * index + (1 + index % 4) * np.arange(SEQ_LENGTH + 1)) % VOCAB
        return cut_sample(tokens, np.array([], dtype=int))


TRAINING, HELD_OUT = Counting(0), Counting(10_000)


def _logits(directory: Path) -> Tensor | None:
    """This rank's columns, [s, b, v / tp with padding], where the last stage is."""
    flags = {"micro_batch_size": BATCH, "global_batch_size": BATCH, "seq_length": SEQ_LENGTH, **LAYOUT}
    model, _ = make(choose_model(tiny(dtype="fp32", **flags), directory), RANKS)
    head = model.chunks[0].head
    inputs: list[Tensor] = []
    if head is not None:
        head.register_forward_pre_hook(lambda _, args: inputs.append(args[0]))
    model.forward([random_batch(VOCAB, SEQ_LENGTH, BATCH)])
    if head is None:
        return None
    with torch.no_grad():
        found: Tensor = all_gather(head.norm(inputs[0]), model.mesh.tp) @ head.weight.t()
    return head.softcap * torch.tanh(found / head.softcap) if head.softcap else found


def _trained_loss(directory: Path, run: Path) -> tuple[float, float]:
    """Held-out loss of the published model and of the one that STEPS steps made of it; the latter is saved."""
    flags: dict[str, Any] = {"seq_length": SEQ_LENGTH, "micro_batch_size": BATCH, "global_batch_size": 2 * BATCH}
    flags |= {"train_iters": STEPS, "lr": 1e-2, "eval_interval": 1000, "eval_iters": EVAL_BATCHES, "device": "cpu"}
    flags |= {"params_dtype": "fp32", "num_threads": 1, "peak_tflops": 1.0, "progress": False, "log_interval": 1000}
    data = {"train_data": TRAINING, "eval_data": HELD_OUT}
    with Trainer(directory, plan="off", save=str(run), **data, **flags, **LAYOUT) as trainer:
        before = trainer.evaluate()
        trainer.train()
        return before, trainer.evaluate()


def _on_rank(directories: list[Path], runs: Path) -> list[tuple[Tensor | None, tuple[float, float]]]:
    return [(_logits(directory), _trained_loss(directory, runs / directory.name)) for directory in directories]


Outcome = dict[str, tuple[Tensor, tuple[float, float]]]
Outcomes = Callable[[str], Outcome]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("families")


@pytest.fixture(scope="module")
def ours(folder: Path) -> Outcomes:
    """Of a group {family: logits [s, b, v], losses}; one start of four ranks does all, and leaves checkpoints."""

    @functools.cache
    def of_group(group: str) -> Outcome:
        directories = [write_model(name, folder) for name in GROUPS[group]]
        results = run_ranks(RANKS, _on_rank, directories, folder / "runs")
        found: Outcome = {}
        for i, directory in enumerate(directories):
            columns = [rank[i][0] for rank in results if rank[i][0] is not None]
            losses = {rank[i][1] for rank in results}
            assert len(columns) == LAYOUT["tp"] and len(losses) == 1  # all ranks know the loss
            found[directory.name] = torch.cat(columns, dim=-1)[..., :VOCAB], losses.pop()
        return found

    return of_group


@torch.no_grad()
def their_logits(directory: Path, tokens: Tensor) -> Tensor:
    """[b, s, v] fp32, of tokens [b, s]."""
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    logits: Tensor = model(input_ids=tokens, use_cache=False).logits
    return logits


@pytest.mark.parametrize(("group", "name"), FAMILIES)
def test_logits(group: str, name: str, ours: Outcomes, folder: Path) -> None:
    logits, _ = ours(group)[name]
    theirs = their_logits(folder / name, random_batch(VOCAB, SEQ_LENGTH, BATCH).tokens.t()).transpose(0, 1)
    error = float((logits - theirs).norm() / theirs.norm())
    assert theirs.dtype == torch.float32 and error < LOGITS_BOUND


@pytest.mark.parametrize(("group", "name"), FAMILIES)
def test_perplexity_of_a_trained_model(group: str, name: str, ours: Outcomes, folder: Path, tmp_path: Path) -> None:
    before, after = ours(group)[name][1]
    assert after < before - 0.5  # it has learnt: perplexity at least 1.6 times lower
    export_checkpoint(folder / "runs" / name, tmp_path / "out")
    samples = [HELD_OUT.sample(i) for i in range(2 * BATCH * EVAL_BATCHES)]
    tokens, labels = (torch.tensor(np.stack([getattr(s, kind) for s in samples])) for kind in ("tokens", "labels"))
    theirs = float(F.cross_entropy(their_logits(tmp_path / "out", tokens).flatten(0, 1), labels.flatten()))
    assert after == pytest.approx(theirs, rel=LOSS_BOUND)
