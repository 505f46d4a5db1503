"""Corpora of pairs of token ids, for training on preferences."""

from pathlib import Path
from typing import Any

import numpy as np
from documents import write_corpus
from numpy.typing import NDArray

from memo.data import PreferencePairs
from memo.data.facts import CorpusFacts, mask_prefix
from memo.data.indexed import IndexedDataset

Answer = tuple[NDArray[np.int64], int]
"""Token ids of prompt and answer, and the number of tokens of the prompt."""


def some_pairs(count: int, vocab_size: int, longest: int = 14) -> list[tuple[Answer, Answer]]:
    """Return random pairs: a chosen and a rejected answer with a common prompt."""
    random, pairs = np.random.default_rng(8), []
    for _ in range(count):
        prompt, *lengths = random.integers(1, longest, 3)
        shared = random.integers(0, vocab_size, prompt)
        first, second = (np.concatenate((shared, random.integers(0, vocab_size, n))) for n in lengths)
        pairs.append(((first, int(prompt)), (second, int(prompt))))
    return pairs


def write_pairs(prefix: Path, pairs: list[tuple[Answer, Answer]], vocab_size: int) -> str:
    """Write the files of `memo data pairs`; return their prefix."""
    documents = [answer for pair in pairs for answer in pair]
    write_corpus(mask_prefix(prefix), (np.arange(len(ids)) >= prompt for ids, prompt in documents), "u1")
    facts = CorpusFacts("byte", vocab_size, 0, len(documents), 1, 1, len(pairs))
    Path(f"{prefix}.json").write_text(facts.to_json())
    return write_corpus(prefix, (ids for ids, _ in documents))


def open_pairs(prefix: str, seq_length: int, **how: Any) -> PreferencePairs:
    indexed, answers = IndexedDataset(prefix), IndexedDataset(mask_prefix(prefix))
    return PreferencePairs(indexed, answers, seq_length, seed=3, fill=0, **how)
