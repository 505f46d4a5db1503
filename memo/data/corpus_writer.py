"""Writes a corpus and its held-out part: tokens, facts, tokenizer, and the mask of learned tokens if there is one.

All files of both parts are on disk before the first is renamed to its final name; the training corpus is renamed last.
"""

from contextlib import ExitStack
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from memo.data.chat_templates import TEMPLATE_SUFFIX
from memo.data.completions import Document
from memo.data.encode import AnswerEncoder, TextEncoder
from memo.data.facts import TOKENIZER_SUFFIX, CorpusFacts, mask_prefix
from memo.data.hashing import uniform
from memo.data.indexed import IndexedDatasetWriter, smallest_dtype
from memo.data.tokenizer import BPETokenizer
from memo.errors import ConfigError, DataError

EVAL_SUFFIX = "-eval"
_SPLIT_KEY = 0x5EED
_SHARE = "--eval-fraction (split_eval in Python)"


def check_share(prefix: Path, split_eval: float) -> None:
    """Raises ConfigError for a share outside [0, 1), or if 0 would leave an older held-out corpus in place."""
    if not 0.0 <= split_eval < 1.0:
        raise ConfigError(f"{_SHARE} is {split_eval}; it must be at least 0 and below 1")
    eval_prefix = Path(f"{prefix}{EVAL_SUFFIX}")
    if split_eval == 0.0 and Path(f"{eval_prefix}.idx").exists():
        raise ConfigError(
            f"{_SHARE} is 0, but {eval_prefix}.idx exists: an earlier build held it out, this one would "
            "train on it; delete it, hold out a share again or choose another prefix"
        )


class CorpusWriter:
    """Writes the corpus PREFIX of the documents of `encoder`, and a share `split_eval` of them to PREFIX-eval. The end
    of `stack` moves the files into place, or removes them."""

    def __init__(self, stack: ExitStack, prefix: Path, split_eval: float, encoder: TextEncoder | AnswerEncoder) -> None:
        # Writers close in reverse order: the training corpus is moved into place last.
        names = [prefix] if split_eval == 0.0 else [prefix, Path(f"{prefix}{EVAL_SUFFIX}")]
        self._parts = [_Part(stack, name, encoder) for name in names]
        self._split_eval = split_eval
        self.num_groups = self.num_empty_documents = 0

    def add(self, *group: Document) -> None:
        """Write documents that belong together to one part; an empty document is counted and left out."""
        number, self.num_groups = self.num_groups, self.num_groups + 1
        is_held_out = len(self._parts) > 1 and uniform((_SPLIT_KEY,), np.array([number]))[0] < self._split_eval
        for ids, mask in group:
            if len(ids):
                self._parts[int(is_held_out)].add(ids, mask)
            else:
                self.num_empty_documents += 1

    def complete(self) -> tuple[CorpusFacts, CorpusFacts | None]:
        """Bring all parts onto disk; returns their facts. Raises DataError if the split leaves a part empty."""
        counts = [part.tokens.num_documents for part in self._parts]
        if len(counts) > 1 and not all(counts):
            raise DataError(
                f"{_SHARE} is {self._split_eval}, which leaves {counts[0]} documents to train on and {counts[1]} "
                f"to evaluate on; give a {'smaller' if counts[1] else 'larger'} share, or more documents"
            )
        train, *evaluation = [part.complete() for part in self._parts]
        return train, next(iter(evaluation), None)


class _Part:
    """The writers of the tokens and of the mask of one corpus."""

    def __init__(self, stack: ExitStack, prefix: Path, encoder: TextEncoder | AnswerEncoder) -> None:
        self._encoder, self._num_answer_tokens, self._mask = encoder, 0, None
        self.tokens = stack.enter_context(IndexedDatasetWriter(prefix, smallest_dtype(encoder.tokenizer.vocab_size)))
        if encoder.sides is not None:
            self._mask = stack.enter_context(IndexedDatasetWriter(mask_prefix(prefix), np.uint8))

    def add(self, ids: NDArray[np.integer], mask: NDArray[np.integer]) -> None:
        self.tokens.add_document(ids)
        if self._mask is not None:
            self._mask.add_document(mask)
            self._num_answer_tokens += int(mask.sum())

    def complete(self) -> CorpusFacts:
        """Add facts, tokenizer and template. All files are then on disk, under temporary names."""
        tokens, tokenizer, template = self.tokens, self._encoder.tokenizer, self._encoder.template
        is_file = isinstance(tokenizer, BPETokenizer)
        facts = CorpusFacts(
            tokenizer=f"{tokens.prefix.name}{TOKENIZER_SUFFIX}" if is_file else tokenizer.name,
            vocab_size=tokenizer.vocab_size,
            eod=tokenizer.eod,
            num_documents=tokens.num_documents,
            num_tokens=tokens.num_tokens,
            num_answer_tokens=None if self._mask is None else self._num_answer_tokens,
            num_pairs=tokens.num_documents // 2 if self._encoder.sides == 2 else None,
        )
        tokens.add_side_file(".json", facts.to_json().encode())
        if isinstance(tokenizer, BPETokenizer):
            tokens.add_side_file(TOKENIZER_SUFFIX, tokenizer.definition)
        if template is not None:
            tokens.add_side_file(TEMPLATE_SUFFIX, template.encode())
        for writer in filter(None, (tokens, self._mask)):
            writer.complete()
        return facts
