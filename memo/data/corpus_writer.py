"""A corpus as it is written: tokens, facts, tokenizer, of conversations what is learned; and the part that is held out.

All files of both parts are on the disk before the first has its name, and the training corpus gets its own last.
"""

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from memo.data.chat_template import TEMPLATE_SUFFIX
from memo.data.completions import Document
from memo.data.facts import TOKENIZER_SUFFIX, CorpusFacts, mask_prefix
from memo.data.hashing import uniform
from memo.data.indexed import IndexedDatasetWriter, smallest_dtype
from memo.data.tokenizer import BPETokenizer, Tokenizer
from memo.errors import ConfigError, DataError

EVAL_SUFFIX = "-eval"
_SPLIT_KEY = 0x5EED
_SHARE = "--eval-fraction (split_eval in Python)"


def check_share(prefix: Path, split_eval: float) -> None:
    """Raises ConfigError for a share outside [0, 1), or for the files that 0 would leave stale."""
    if not 0.0 <= split_eval < 1.0:
        raise ConfigError(f"{_SHARE} is {split_eval}; it must be at least 0 and below 1")
    eval_prefix = Path(f"{prefix}{EVAL_SUFFIX}")
    if split_eval == 0.0 and Path(f"{eval_prefix}.idx").exists():
        raise ConfigError(
            f"{_SHARE} is 0, but {eval_prefix}.idx exists: an earlier build held it out, this one would "
            "train on it; delete it, hold out a share again or choose another prefix"
        )


class CorpusWriter:
    """The files of PREFIX, and of the share `split_eval` of the documents those of PREFIX-eval.

    Args:
        stack: whose end moves the files in place, or removes them.
        template: Jinja, of conversations, each of which is added with the mask of its answers; None: of texts.
        pairs: documents are added in pairs of preferences, each with a mask.
    """

    def __init__(
        self,
        stack: ExitStack,
        prefix: Path,
        split_eval: float,
        tokenizer: Tokenizer,
        template: str | None = None,
        *,
        pairs: bool = False,
    ) -> None:
        # Writers close in reverse order: the training corpus is moved into place last.
        self._train = _Part(stack, prefix, tokenizer, template, pairs)
        self._evaluation = None
        if split_eval > 0.0:
            self._evaluation = _Part(stack, Path(f"{prefix}{EVAL_SUFFIX}"), tokenizer, template, pairs)
        self._split_eval = split_eval
        self.num_documents = self.num_empty_documents = 0
        """Of pairs, how many pairs."""

    def add(self, ids: NDArray[Any], mask: NDArray[np.uint8] | None = None) -> None:
        """Write one document, shape [n] each; an empty one is counted and left out."""
        part = self._next_part()
        if len(ids):
            part.add(ids, mask)
        else:
            self.num_empty_documents += 1

    def add_pair(self, *pair: Document) -> None:
        """Write two documents, neither of them empty, to the same part."""
        part = self._next_part()
        for ids, mask in pair:
            part.add(ids, mask)

    def _next_part(self) -> "_Part":
        number, self.num_documents = self.num_documents, self.num_documents + 1
        if self._evaluation is not None and _places(np.array([number]))[0] < self._split_eval:
            return self._evaluation
        return self._train

    def complete(self) -> tuple[CorpusFacts, CorpusFacts | None]:
        """The facts of both parts, now on the disk. Raises DataError where a split leaves one without documents."""
        if self._evaluation is None:
            return self._train.complete(), None
        num_train, num_evaluation = self._train.tokens.num_documents, self._evaluation.tokens.num_documents
        if not (num_train and num_evaluation):
            share = _share_that_works(self.num_documents, self.num_empty_documents)
            raise DataError(
                f"{_SHARE} is {self._split_eval}, which of {self.num_documents} documents leaves {num_train} to train "
                f"on and {num_evaluation} to evaluate on; {'' if share is None else f'give {share}, or '}use more "
                "documents"
            )
        return self._train.complete(), self._evaluation.complete()


class _Part:
    """Tokens and mask of one corpus, moved in place together, the tokens last."""

    def __init__(self, stack: ExitStack, prefix: Path, tokenizer: Tokenizer, template: str | None, pairs: bool) -> None:
        self._tokenizer, self._template, self._pairs, self._num_answer_tokens = tokenizer, template, pairs, 0
        self.tokens = stack.enter_context(IndexedDatasetWriter(prefix, smallest_dtype(tokenizer.vocab_size)))
        self._mask = None
        if template is not None or pairs:
            self._mask = stack.enter_context(IndexedDatasetWriter(mask_prefix(prefix), np.uint8))

    def add(self, ids: NDArray[Any], mask: NDArray[Any] | None) -> None:
        self.tokens.add_document(ids)
        if self._mask is not None and mask is not None:
            self._mask.add_document(mask)
            self._num_answer_tokens += int(mask.sum())

    def complete(self) -> CorpusFacts:
        """Add facts, tokenizer and template. All of it is then on disk, under temporary names."""
        tokens, tokenizer, template = self.tokens, self._tokenizer, self._template
        is_file = isinstance(tokenizer, BPETokenizer)
        facts = CorpusFacts(
            tokenizer=f"{tokens.prefix.name}{TOKENIZER_SUFFIX}" if is_file else tokenizer.name,
            vocab_size=tokenizer.vocab_size,
            eod=tokenizer.eod,
            num_documents=tokens.num_documents,
            num_tokens=tokens.num_tokens,
            num_answer_tokens=None if self._mask is None else self._num_answer_tokens,
            num_pairs=tokens.num_documents // 2 if self._pairs else None,
        )
        tokens.add_side_file(".json", facts.to_json().encode())
        if isinstance(tokenizer, BPETokenizer):
            tokens.add_side_file(TOKENIZER_SUFFIX, tokenizer.definition)
        if template is not None:
            tokens.add_side_file(TEMPLATE_SUFFIX, template.encode())
        if self._mask is not None:
            self._mask.complete()
        tokens.complete()
        return facts


def _places(indices: NDArray[np.integer]) -> NDArray[np.float64]:
    """Shares above which documents of the inputs go to the evaluation corpus."""
    return uniform((_SPLIT_KEY,), indices)


def _share_that_works(num_documents: int, num_empty: int) -> str | None:
    """A share of few digits that holds few documents out, but leaves some on both sides whichever are empty; None where
    no share is sure to."""
    if num_documents < 2 + 2 * num_empty:
        return None
    places = np.sort(_places(np.arange(num_documents)))
    above, up_to = places[num_empty], places[num_documents - num_empty - 1]
    shares = (f"{above + 10**-digits:.{digits}f}" for digits in range(2, 18))
    return next(share for share in shares if float(share) <= up_to)
