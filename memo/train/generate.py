"""Generates text, to see what a model has learnt; it is too slow to serve a model.

Each new token takes a forward over all --seq-length tokens, run like an evaluation in the layout of the training;
nothing is cached between tokens. All ranks draw the same tokens, from the same numbers with the same seed.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from memo.config.flag_table import dashed
from memo.data import Sample, Tokenizer
from memo.data.sample import cut_sample
from memo.errors import ConfigError
from memo.model.transformer import Head, Microbatch
from memo.train.feed import Feed
from memo.train.log_probs import GivenSamples
from memo.train.parallel_model import ParallelModel

Prompt = str | Sequence[int]
"""A text, or its token ids."""


@dataclass(frozen=True)
class Sampling:
    """Options for drawing the next token; `Trainer.generate` explains them."""

    max_new_tokens: int = 64
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def check(self) -> None:
        """Raises ConfigError for a value out of range."""
        for name, holds, wanted in (
            ("max_new_tokens", self.max_new_tokens >= 1, "1 or more"),
            ("temperature", 0 <= self.temperature < float("inf"), "0 for the likeliest token, or more, such as 0.8"),
            ("top_k", self.top_k >= 0, "0 for all tokens, or more, such as 50"),
            ("top_p", 0 < self.top_p <= 1, "a share above 0 up to 1, such as 0.95"),
        ):
            if not holds:
                raise ConfigError(f"{dashed(name)} is {getattr(self, name)}: give {wanted}")


def as_sample(text: Sequence[int], seq_length: int) -> Sample:
    """Return a text as a sample of one document, padded with zeros; causal attention hides these from the text."""
    window = np.zeros(seq_length + 1, dtype=np.int64)
    window[: len(text)] = text
    return cut_sample(window, np.empty(0, dtype=np.int64))


def encode(prompt: Prompt, tokenizer: Tokenizer | None, vocab_size: int) -> list[int]:
    """Token ids of a prompt. Raises ConfigError for one that the model cannot read."""
    if isinstance(prompt, str):
        if tokenizer is None:
            raise ConfigError(
                "the prompt is a text, but this run has no tokenizer: give --tokenizer (tokenizer=), or token ids in "
                "Python"
            )
        ids = [int(token) for token in tokenizer.encode(prompt)]
    else:
        ids = [int(token) for token in prompt]
    if not ids:
        raise ConfigError("generate() got an empty prompt: give at least one token to continue")
    if not 0 <= min(ids) <= max(ids) < vocab_size:
        raise ConfigError(
            f"generate() got token ids from {min(ids)} to {max(ids)}, but --vocab-size is {vocab_size}: give ids of "
            "this model's tokenizer"
        )
    return ids


def decode(ids: Sequence[int], tokenizer: Tokenizer | None) -> str:
    """The text of token ids. Ids without a token are left out: a model may have more rows than its tokenizer tokens."""
    assert tokenizer is not None, "encode() has refused the text"
    return tokenizer.decode([token for token in ids if token < tokenizer.vocab_size])


def continuations(
    parts: ParallelModel, rows: Sequence[Sequence[int]], sampling: Sampling, ends: Collection[int]
) -> list[list[int]]:
    """The tokens that follow each of `rows`, up to and without the first token of `ends`.

    Collective, the same on all ranks. Raises ConfigError if prompt and new tokens are longer than a sample.
    """
    sampling.check()
    longest, seq_length = max(map(len, rows)), parts.config.data.seq_length
    if longest + sampling.max_new_tokens > seq_length:
        fewer = f"--max-new-tokens {seq_length - longest} or less, or " if longest < seq_length else ""
        raise ConfigError(
            f"a prompt of {longest} tokens and --max-new-tokens {sampling.max_new_tokens} are more than --seq-length "
            f"{seq_length} together: give {fewer}a shorter prompt or a longer --seq-length"
        )
    texts = [list(row) for row in rows]
    running, generator = set(range(len(rows))), torch.Generator().manual_seed(sampling.seed)
    for _ in range(sampling.max_new_tokens):
        samples = GivenSamples([as_sample(text, seq_length) for text in texts], seq_length)
        logits = _next_logits(parts, parts.feed(samples), [len(text) - 1 for text in texts])
        drawn = [_draw(of_text, sampling, generator) for of_text in logits.cpu().double()]
        for index in sorted(running):
            if drawn[index] in ends:
                running.discard(index)
            else:
                texts[index].append(drawn[index])
        if not running:
            break
    return [text[len(row) :] for text, row in zip(texts, rows, strict=True)]


def _next_logits(parts: ParallelModel, feed: Feed, places: Sequence[int]) -> Tensor:
    """The logits [texts, vocabulary] of the token that follows index `places[i]` of text i, on every rank."""
    count, seq_length = len(places), feed.dataset.seq_length
    found = torch.zeros(count, feed.vocab_size, dtype=torch.float64, device=parts.device)

    def read(head: Head, hidden: Tensor, _: Microbatch, samples: list[int]) -> None:
        wanted = torch.full((len(samples), seq_length), -1, dtype=torch.int64)
        for row, index in enumerate(samples):
            if index < count:
                wanted[row, places[index]] = index
        found.add_(head.logits_of(hidden, feed.in_shard_order(wanted), count))

    parts.at_head(feed, read)
    return parts.sum_over_ranks(found)


def _draw(logits: Tensor, sampling: Sampling, generator: torch.Generator) -> int:
    """Draw one token from logits [v]. A positive temperature takes one random draw, whatever the logits are."""
    if sampling.temperature == 0:
        return int(logits.argmax())
    order = logits.argsort(descending=True, stable=True)
    shares = (logits[order] / sampling.temperature).softmax(-1)
    before = shares.cumsum(-1) - shares
    shares[before >= sampling.top_p] = 0.0
    if sampling.top_k:
        shares[sampling.top_k :] = 0.0
    return int(order[torch.multinomial(shares, 1, generator=generator)])
