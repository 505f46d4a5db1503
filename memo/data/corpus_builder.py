"""From text to an indexed corpus: `memo data build` and `memo data demo`."""

import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from memo.data.encode import Encoder
from memo.data.facts import TOKENIZER_SUFFIX, CorpusFacts
from memo.data.file_kinds import list_files
from memo.data.hashing import uniform
from memo.data.indexed import IndexedDatasetWriter, smallest_dtype
from memo.data.left_out import LeftOut
from memo.data.progress import Progress
from memo.data.python_sources import python_sources, read_python_sources, standard_library
from memo.data.records import RecordPiece, read_pieces
from memo.data.tokenizer import BPETokenizer, ByteTokenizer, Tokenizer, load_tokenizer, train_bpe
from memo.data.workers import encode_all
from memo.errors import ConfigError, DataError

TRAIN_BPE = "bpe"
"""The tokenizer argument that asks for a new tokenizer, trained on the corpus itself."""
EVAL_SUFFIX = "-eval"
_SPLIT_KEY = 0x5EED
_SHARE = "--eval-fraction (split_eval in Python)"
_BATCH_CHARACTERS = 1 << 22
"""Characters of conversations that are tokenized together: enough to keep all cores busy, little enough to stream."""
_WORKERS_FROM_BYTES = 16 << 20
"""Starting processes takes about as long as tokenizing so much."""

Item = TypeVar("Item")


@dataclass(frozen=True)
class Reading:
    """How inputs are read, which changes nothing of the corpus but what is left out."""

    workers: int = 1
    """Processes that tokenize, where there is enough to read; 0: one a core. One: the tokenizer's own threads."""
    skip_unreadable: bool = False
    """Leave out records and files that cannot be read, count them and tell the first; else the first is an error."""
    progress: bool = False
    """Show a bar where standard error is a terminal."""

    def num_workers(self, tokenizer: Tokenizer, total_bytes: int) -> int:
        """Processes that are worth starting.

        The byte tokenizer is faster than sending texts to another process, and small inputs are done sooner than
        other processes have started.
        """
        if isinstance(tokenizer, ByteTokenizer) or total_bytes < _WORKERS_FROM_BYTES:
            return 1
        return self.workers or len(os.sched_getaffinity(0))


READING = Reading()


@dataclass(frozen=True)
class BuildSummary:
    """What a build wrote."""

    prefix: Path
    train: CorpusFacts
    evaluation: CorpusFacts | None
    """Of the held-out corpus, PREFIX-eval; None when nothing was held out."""
    num_empty_documents: int
    """Documents without text, which are left out."""
    num_text_bytes: int = 0
    """In UTF-8, of the documents."""
    seconds: float = 0.0
    """That reading, tokenizing and writing took."""
    left_out: tuple[str, ...] = ()
    """Lines for people about what was not taken: files of other kinds, and what could not be read."""


def build_demo(
    out_prefix: str | Path,
    *,
    tokenizer: str = "byte",
    vocab_size: int | None = None,
    split_eval: float = 0.0,
    reading: Reading = READING,
) -> BuildSummary:
    """Build a corpus that every machine has: the sources of Python's standard library, one document a file.

    The result is the same for every build by one Python installation; another installation has other sources.
    Arguments and errors as in `build_corpus`.
    """
    folder, left_out = standard_library(), LeftOut()
    return _build(
        lambda: read_python_sources(folder),
        sum(path.stat().st_size for path in python_sources(folder)),
        Path(out_prefix),
        left_out,
        reading,
        tokenizer=tokenizer,
        vocab_size=vocab_size,
        split_eval=split_eval,
    )


def build_corpus(
    inputs: Sequence[str | Path],
    out_prefix: str | Path,
    *,
    tokenizer: str = "byte",
    vocab_size: int | None = None,
    json_key: str = "text",
    append_eod: bool = True,
    split_eval: float = 0.0,
    reading: Reading = READING,
) -> BuildSummary:
    """Build OUT.bin, .idx and .json (for BPE also OUT-tokenizer.json) of files and directories.

    inputs: lines, lists and tables of documents, texts, and directories of them (docs/data.md lists the kinds).
    tokenizer: `byte`, a tokenizer.json or its directory, or `bpe` to train one of `vocab_size` on the inputs.
    json_key: the key of a record, or the column of a table, that holds the text.
    append_eod: end each document with the tokenizer's end-of-document token.
    split_eval: share of the documents, in [0, 1), that goes to OUT-eval instead. The choice depends on
        nothing but a document's place in the inputs, so a second build holds out the same ones.

    The corpus is the same whatever `reading` says of workers. Raises ConfigError for arguments that do not fit
    together and for a package that is missing, DataError for inputs that cannot be read; an older corpus of the same
    name then stays as it was.
    """
    found = list_files(inputs)
    left_out = LeftOut(reading.skip_unreadable, found.ignored)
    return _build(
        lambda: read_pieces(found.files, json_key, left_out.refuse),
        found.num_bytes,
        Path(out_prefix),
        left_out,
        reading,
        tokenizer=tokenizer,
        vocab_size=vocab_size,
        json_key=json_key,
        append_eod=append_eod,
        split_eval=split_eval,
    )


def _build(
    read: Callable[[], Iterator[RecordPiece]],
    total_bytes: int,
    prefix: Path,
    left_out: LeftOut,
    reading: Reading,
    *,
    tokenizer: str,
    vocab_size: int | None,
    split_eval: float,
    json_key: str = "text",
    append_eod: bool = True,
) -> BuildSummary:
    eval_prefix = evaluation_prefix(prefix, split_eval)
    texts = (text for piece in read() for text in piece.texts(json_key, left_out.refuse))
    chosen = _choose_tokenizer(tokenizer, vocab_size, texts)
    left_out.begin()  # what the tokenizer was trained on is read again
    encoder = Encoder(chosen, json_key, smallest_dtype(chosen.vocab_size), left_out.skip)
    end = np.array([chosen.eod], dtype=encoder.dtype) if append_eod else np.empty(0, dtype=encoder.dtype)
    with ExitStack() as stack:
        # Writers close in reverse order: the training corpus is moved into place last.
        train = stack.enter_context(IndexedDatasetWriter(prefix, encoder.dtype))
        evaluation = None
        if split_eval > 0.0:
            evaluation = stack.enter_context(IndexedDatasetWriter(eval_prefix, encoder.dtype))
        num_documents = num_empty_documents = num_text_bytes = 0
        bar = stack.enter_context(Progress("tokenizing", total_bytes, reading.progress))
        for encoded in encode_all(read(), encoder, reading.num_workers(chosen, total_bytes)):
            num_text_bytes += encoded.num_text_bytes
            for message in encoded.refused:
                left_out.count(message)
            for ids in np.split(encoded.ids, np.cumsum(encoded.lengths)[:-1]) if len(encoded.lengths) else ():
                held_out = is_held_out(num_documents, split_eval)
                num_documents += 1
                if not ids.size:
                    num_empty_documents += 1
                    continue
                writer = evaluation if evaluation is not None and held_out else train
                writer.add_document(np.concatenate((ids, end)))
            bar.reach(encoded.done_bytes)
        if evaluation is not None:
            check_split(split_eval, num_documents, train.num_documents, evaluation.num_documents)
        return BuildSummary(
            prefix=prefix,
            train=add_facts(train, chosen),
            evaluation=None if evaluation is None else add_facts(evaluation, chosen),
            num_empty_documents=num_empty_documents,
            num_text_bytes=num_text_bytes,
            seconds=bar.elapsed_s,
            left_out=tuple(left_out.lines()),
        )


def _choose_tokenizer(spec: str, vocab_size: int | None, texts: Iterable[str]) -> Tokenizer:
    if spec != TRAIN_BPE:
        if vocab_size is not None:
            raise ConfigError(
                f"vocab-size = {vocab_size}, but tokenizer = {spec} has its own; "
                "drop vocab-size, or set tokenizer = bpe to train one"
            )
        return load_tokenizer(spec)
    if vocab_size is None:
        raise ConfigError("tokenizer = bpe trains a new tokenizer; set vocab-size (8192, say)")
    # Not yet beside the data: a build that fails must not leave an older corpus with a new tokenizer.
    with tempfile.TemporaryDirectory() as folder:
        return train_bpe(texts, vocab_size, Path(folder) / "tokenizer.json")


def add_facts(writer: IndexedDatasetWriter, tokenizer: Tokenizer, num_answer_tokens: int | None = None) -> CorpusFacts:
    """Add facts and tokenizer to a finished corpus. All of it is then on disk, under temporary names."""
    is_file = isinstance(tokenizer, BPETokenizer)
    facts = CorpusFacts(
        tokenizer=f"{writer.prefix.name}{TOKENIZER_SUFFIX}" if is_file else tokenizer.name,
        vocab_size=tokenizer.vocab_size,
        eod=tokenizer.eod,
        num_documents=writer.num_documents,
        num_tokens=writer.num_tokens,
        num_answer_tokens=num_answer_tokens,
    )
    writer.add_side_file(".json", facts.to_json().encode())
    if isinstance(tokenizer, BPETokenizer):
        writer.add_side_file(TOKENIZER_SUFFIX, tokenizer.definition)
    writer.complete()
    return facts


def in_batches(items: Iterable[Item], num_characters: Callable[[Item], int]) -> Iterator[list[Item]]:
    """All items in turn, in lists of about as much text as is tokenized at a time."""
    batch: list[Item] = []
    total = 0
    for item in items:
        batch.append(item)
        total += num_characters(item)
        if total >= _BATCH_CHARACTERS:
            yield batch
            batch, total = [], 0
    if batch:
        yield batch


def evaluation_prefix(prefix: Path, split_eval: float) -> Path:
    """Where held-out documents go. Raises ConfigError for a share outside [0, 1), or for what 0 would leave stale."""
    if not 0.0 <= split_eval < 1.0:
        raise ConfigError(f"{_SHARE} is {split_eval}; it must be at least 0 and below 1")
    eval_prefix = Path(f"{prefix}{EVAL_SUFFIX}")
    if split_eval == 0.0 and Path(f"{eval_prefix}.idx").exists():
        raise ConfigError(
            f"{_SHARE} is 0, but {eval_prefix}.idx exists: an earlier build held it out, this one would "
            "train on it; delete it, hold out a share again or choose another prefix"
        )
    return eval_prefix


def check_split(split_eval: float, num_documents: int, num_train: int, num_evaluation: int) -> None:
    """Raises DataError when a split leaves one side without documents."""
    if num_train and num_evaluation:
        return
    share = _share_that_works(num_documents, num_documents - num_train - num_evaluation)
    raise DataError(
        f"{_SHARE} is {split_eval}, which of {num_documents} documents leaves {num_train} to train on and "
        f"{num_evaluation} to evaluate on; {'' if share is None else f'give {share}, or '}use more documents"
    )


def is_held_out(index: int, share: float) -> bool:
    """Whether document `index` of the inputs goes to the evaluation corpus."""
    return bool(_places(np.array([index]))[0] < share)


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
