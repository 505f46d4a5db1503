"""trainer.log_probs and trainer.step_on: memory, what completions are, and what is refused. Parity has the numbers."""

from typing import Any

import numpy as np
import pytest
import torch
from memory_peaks import counted, run_config
from ranks import run_ranks
from torch import Tensor
from trainers import tiny_trainer

import memo
from memo.data import Sample, pack_completions
from memo.errors import ConfigError, DataError
from memo.train.log_probs import completion_numbers, sums_by_completion

VOCAB, CHUNK, WIDTH = 150_000, 256, 16


def _peak(num_tokens: int) -> int:
    """Bytes that log-probs of one sample take at most."""
    config = run_config(
        "llama-tiny",
        num_layers=1,
        hidden_size=WIDTH,
        num_attention_heads=2,
        num_query_groups=2,
        ffn_hidden_size=2 * WIDTH,
        vocab_size=VOCAB,
        seq_length=num_tokens,
        global_batch_size=1,
        loss_chunk_size=CHUNK,
    )
    ids = np.random.default_rng(1).integers(0, VOCAB, num_tokens + 1)
    bounds = np.arange(0, num_tokens + 1, 1024, dtype=np.int32)  # so that attention is quick
    ones, positions = np.ones(num_tokens, dtype=np.float32), np.arange(num_tokens) % 1024
    sample = Sample(ids[:-1], ids[1:], ones, positions, bounds)
    counter = counted()
    with memo.Trainer(config=config) as trainer:
        counter.take_peak_bytes()
        before = int(counter.live_bytes)
        found = trainer.log_probs([sample])
        assert found.shape == (1, num_tokens) and (found < 0).all()
        return int(counter.take_peak_bytes()) - before


@pytest.mark.parametrize("num_tokens", [1024, pytest.param(65536, marks=pytest.mark.full)])
def test_log_probs_take_at_most_one_chunk_beside_the_hidden_states(num_tokens: int) -> None:
    """fp32, and a vocabulary of 150K: one chunk of logits takes 154 MB, and all of 64K tokens would take 39 GB.
    Measured beside the hidden states of 64K: 79 MB, the logits of half a chunk and 32 bytes a token."""
    (peak_bytes,) = run_ranks(1, _peak, num_tokens)
    chunk_bytes, hidden_bytes = 4 * CHUNK * VOCAB, 4 * WIDTH * num_tokens
    assert chunk_bytes // 2 <= peak_bytes - hidden_bytes <= chunk_bytes


PROMPTS = [([5, 6, 7, 8], [0, 0, 1, 1]), ([9, 10, 11], [0, 1, 1]), ([12, 13, 14, 15, 16], [0, 0, 0, 0, 1])]


def test_completions_are_packed_in_order_and_numbered() -> None:
    """Nine tokens a window: the third document does not fit behind the first two. Labels stand one place before."""
    first, second = pack_completions(PROMPTS, 8, fill=3)
    assert first.tokens.tolist() == [5, 6, 7, 8, 9, 10, 11, 3] and first.labels.tolist() == [6, 7, 8, 9, 10, 11, 3, 3]
    assert first.loss_mask.tolist() == [0, 1, 1, 0, 1, 1, 0, 0] and first.cu_seqlens.tolist() == [0, 4, 7, 8]
    assert first.positions.tolist() == [0, 1, 2, 3, 0, 1, 2, 0] and second.cu_seqlens.tolist() == [0, 5, 8]
    numbers = completion_numbers([first, second])
    assert numbers.tolist() == [[-1, 0, 0, -1, 1, 1, -1, -1], [-1, -1, -1, 2, -1, -1, -1, -1]]
    values = torch.arange(16.0, dtype=torch.float64).view(2, 8).requires_grad_()
    sums = sums_by_completion(values, numbers)
    assert sums.tolist() == [3.0, 9.0, 11.0]
    (grad,) = torch.autograd.grad(sums @ torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64), values)
    assert grad.tolist() == [[0, 1, 1, 0, 2, 2, 0, 0], [0, 0, 0, 3, 0, 0, 0, 0]]


def test_a_document_may_end_with_the_window() -> None:
    """Of a document of seq_length + 1 tokens the last is a label alone."""
    (sample,) = pack_completions([([1, 2, 3, 4, 5], [0, 0, 0, 0, 1])], 4)
    assert sample.labels[-1] == 5 and sample.loss_mask.tolist() == [0, 0, 0, 1] and sample.cu_seqlens.tolist() == [0, 4]


@pytest.mark.parametrize(
    ("document", "told"),
    [
        (([1, 2], [0]), "has 2 tokens and 1 marks, of which 0 behind the first count"),
        (([1, 2], [1, 0]), "of which 0 behind the first count"),
        ((list(range(10)), [1] * 10), "10 tokens and 10 marks.*at most seq_length \\+ 1 = 9 tokens"),
    ],
)
def test_what_cannot_be_packed_is_refused(document: Any, told: str) -> None:
    with pytest.raises(DataError, match=f"documents\\[1\\] .*{told}"):
        pack_completions([PROMPTS[0], document], 8)


@pytest.fixture(scope="module")
def trainer() -> Any:
    with tiny_trainer(global_batch_size=2) as made:
        yield made


SAMPLES = pack_completions(PROMPTS, 64)


@pytest.mark.parametrize(
    ("loss", "told"),
    [
        (lambda x: x, r"a tensor of shape \(1, 64\): return one number"),
        (lambda x: x.detach().sum(), r"a tensor of shape \(\) without a gradient: return one number"),
        (lambda x: 1.5, r"a float: return one number, a tensor that torch has computed from the log-probs"),
    ],
)
def test_a_loss_must_be_a_number_of_the_log_probs(trainer: memo.Trainer, loss: Any, told: str) -> None:
    with pytest.raises(ConfigError, match=f"the loss over log-probs has returned {told}"):
        trainer.step_on(SAMPLES, loss)
    assert trainer.iteration == 0


def test_numbers_of_samples_that_cannot_be(trainer: memo.Trainer) -> None:
    with pytest.raises(ConfigError, match=r"log_probs\(\) got 0 samples: give at least one"):
        trainer.log_probs([])
    with pytest.raises(ConfigError, match=r"step_on\(\) got 3 samples: give 1 to 2, as --global-batch-size is 2"):
        trainer.step_on(3 * SAMPLES, Tensor.sum)
    with pytest.raises(DataError, match=r"GivenSamples.sample\(0\).tokens has shape \(8,\).*must have shape \(64,\)"):
        trainer.log_probs(pack_completions(PROMPTS[:1], 8))


def test_a_model_without_adapters_has_no_reference(trainer: memo.Trainer) -> None:
    with pytest.raises(ConfigError, match="--lora-rank 0 leaves no reference in memory, which is the model without"):
        trainer.log_probs(SAMPLES, reference=True)
    with (
        tiny_trainer(lora_rank=2, train_only="final_norm.weight") as made,
        pytest.raises(ConfigError, match=r"--train-only final_norm\.weight leaves no reference"),
    ):
        made.log_probs(SAMPLES, reference=True)
