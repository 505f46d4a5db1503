"""Pieces of files to documents of tokens: what a build does to each piece, in this process or side by side in others.

A tokenizer's own threads share what Python does between its calls: parsing JSON, and making lists of tokens. Processes
do all of it for their pieces. They are forked, as those of Megatron-LM's and Hugging Face's tools are, so that a
user's script is not run again in them.
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
"""Pieces that are read ahead for each process, so that none waits while the result of another one is written."""


Encoded = tuple[list[tuple[Document, ...]], list[DataError]]
"""Of one piece: groups of documents that belong together, one or the two answers of a pair; and the errors about
records that cannot be read, in order. A document without text is empty."""
Encoder = Callable[[RecordPiece], Encoded]


@dataclass(frozen=True)
class TextEncoder:
    """Texts under `key` of each record, each with the tokens `end` behind it. All of it is learned."""

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
    """What `render` makes of each record and its place: `sides` texts, of each of which a part is learned.

    Attributes:
        template: Jinja, which rendered them, if one did.
    """

    tokenizer: Tokenizer
    render: Callable[[Any, str], tuple[Rendered, ...]]
    sides: int
    template: str | None
    key: ClassVar[None] = None

    def __call__(self, piece: RecordPiece) -> Encoded:
        rendered, errors = piece.each(self._rendered)
        # Together, to keep all cores busy.
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
    """1 for each token, [n], that has a character of one of `spans`.

    Characters between two tokens, which are blanks, belong to the later one.
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
    """Each piece with what `encoder` makes of it; several `num_workers` are processes, which end with the generator.

    Raises DataError for a process that ends.
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
"""Of a process of `encode_all`: its only one, which it has from its parent."""


def _begin(encoder: Encoder) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides what Ctrl-C means
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # it would wait for ever for a parent that was killed
    _encoders.append(encoder)


def _encode(piece: RecordPiece) -> Encoded:
    return _encoders[0](piece)


@contextmanager
def _single_threads() -> Iterator[None]:
    """A context in which tokenizers of new processes start no threads, as all cores have a process."""
    name = "TOKENIZERS_PARALLELISM"
    before = os.environ.get(name)
    os.environ[name] = "false"
    try:
        yield
    finally:
        del os.environ[name]
        if before is not None:
            os.environ[name] = before
