"""Encodes pieces of files to documents of tokens, in this process or in several processes in parallel.

A tokenizer's own threads do not speed up the Python code between its calls: parsing JSON and making lists of tokens.
Processes do all of the work for their pieces. They are forked, as in Megatron-LM's and Hugging Face's tools, so that a
user's script does not run again in them.
"""

import ctypes
import os
import signal
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from memo.data.chat_template import Rendered
from memo.data.completions import Document
from memo.data.records import RecordPiece, text_of, utf8
from memo.data.tokenizer import Located, Tokenizer
from memo.errors import DataError

_PR_SET_PDEATHSIG = 1
_AHEAD = 3
"""Pieces that are read ahead for each process, so that no process waits while results are written."""


Encoded = tuple[list[tuple[Document, ...]], list[DataError]]
"""The result for one piece: groups of documents (one document, or the two answers of a pair), and the errors of
unreadable records in order. A document without text is empty."""
Encoder = Callable[[RecordPiece], Encoded]


@dataclass(frozen=True)
class TextEncoder:
    """Encodes the text under `key` of each record and appends the tokens `end`. All tokens are learned."""

    tokenizer: Tokenizer
    key: str
    end: tuple[int, ...]
    sides: ClassVar[None] = None
    template: ClassVar[None] = None

    def __call__(self, piece: RecordPiece) -> Encoded:
        texts, errors = piece.each(partial(text_of, key=self.key))
        end, all_learned = np.array(self.end, dtype=np.int32), np.empty(0, dtype=np.uint8)
        ids = (np.concatenate((each, end)) if len(each) else each for each in self.tokenizer.encode_batch(texts))
        return [((each, all_learned),) for each in ids], errors


@dataclass(frozen=True)
class AnswerEncoder:
    """Encodes the texts that `render(record, where)` makes of each record, with the Jinja template `template` if there
    is one: one text of a conversation, or the two `sides` of a pair. Parts of each text are learned."""

    tokenizer: Tokenizer
    render: Callable[[Any, str], tuple[Rendered, ...]]
    sides: int
    template: str | None
    key: ClassVar[None] = None

    def __call__(self, piece: RecordPiece) -> Encoded:
        rendered, errors = piece.each(self._rendered)
        # All texts in one call, to keep all cores busy.
        located = iter(self.tokenizer.encode_located([each.text for group in rendered for each in group]))
        groups = []
        for group in rendered:
            documents = tuple(self._document(each, next(located)) for each in group)
            unlearned = [each for each, (_, mask) in zip(group, documents, strict=True) if not mask[1:].any()]
            if not unlearned:  # the first token is no label
                groups.append(documents)
                continue
            errors.append(
                DataError(
                    f"{unlearned[0].where} has no token of an answer that counts; see what the chat template writes, "
                    "or remove the record"
                )
            )
        return groups, errors

    def _rendered(self, record: Any, where: str) -> tuple[Rendered, ...]:
        group = self.render(record, where)
        for each in group:
            utf8(each.text, each.where)
        return group

    def _document(self, rendered: Rendered, located: Located) -> Document:
        ids, mask, eod = located.ids, answer_mask(located, rendered.spans), self.tokenizer.eod
        if rendered.ends and (not len(ids) or ids[-1] != eod):
            return np.append(ids, np.int32(eod)), np.append(mask, np.uint8(1))
        return ids, mask


def answer_mask(located: Located, spans: Sequence[tuple[int, int]]) -> NDArray[np.uint8]:
    """[n]: 1 for each token that has a character in one of `spans`.

    Characters between two tokens, which are blanks, belong to the later token.
    """
    ends = np.maximum.accumulate(located.offsets[:, 1])
    begins = np.minimum(located.offsets[:, 0], np.concatenate(([0], ends[:-1])))
    mask = np.zeros(len(ends), dtype=np.uint8)
    for begin, end in spans:
        mask |= (begins < end) & (ends > begin)
    return mask


def encode_all(
    pieces: Iterable[RecordPiece], encoder: Encoder, num_workers: int
) -> Generator[tuple[RecordPiece, Encoded], None, None]:
    """Yield each piece with its result of `encoder`. Two or more `num_workers` are processes, which end with the
    generator.

    Raises DataError if a process ends early.
    """
    if num_workers < 2:
        yield from ((piece, encoder(piece)) for piece in pieces)
        return
    waiting: deque[tuple[RecordPiece, Future[Encoded]]] = deque()
    try:
        with _single_threads(), ProcessPoolExecutor(num_workers, get_context("fork"), _begin, (encoder,)) as pool:
            for piece in pieces:
                waiting.append((piece, pool.submit(_encode, piece)))
                if len(waiting) >= _AHEAD * num_workers:
                    first, found = waiting.popleft()
                    yield first, found.result()
            for first, found in waiting:
                yield first, found.result()
    except BrokenProcessPool:
        raise DataError(
            "a process that tokenizes has ended, perhaps for want of memory: give fewer --workers"
        ) from None


_encoders: list[Encoder] = []
"""In a process of `encode_all`: the one encoder that its parent passed on."""


def _begin(encoder: Encoder) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # else it would wait for ever for a killed parent
    _encoders.append(encoder)


def _encode(piece: RecordPiece) -> Encoded:
    return _encoders[0](piece)


@contextmanager
def _single_threads() -> Iterator[None]:
    """A context in which tokenizers of new processes start no threads, because every core has a process."""
    name = "TOKENIZERS_PARALLELISM"
    before = os.environ.get(name)
    os.environ[name] = "false"
    try:
        yield
    finally:
        del os.environ[name]
        if before is not None:
            os.environ[name] = before
