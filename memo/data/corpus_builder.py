"""Builds an indexed corpus of texts (`memo data build`, `memo data demo`), with the code that all builds share."""

import os
import sysconfig
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from pathlib import Path

from memo.data.corpus_writer import CorpusWriter, check_share
from memo.data.encode import AnswerEncoder, TextEncoder, encode_all
from memo.data.facts import CorpusFacts
from memo.data.file_kinds import Inputs, list_files, walk
from memo.data.records import read_pieces, text_of
from memo.data.tokenizer import ByteTokenizer, Tokenizer, load_tokenizer, train_bpe
from memo.errors import ConfigError, DataError
from memo.progress import waiting
from memo.standard_streams import visible

TRAIN_BPE = "bpe"
"""The tokenizer argument that asks for a new tokenizer, trained on the corpus itself."""
_WORKERS_FROM_BYTES = 16 << 20
"""Starting processes takes about as long as tokenizing this many bytes."""
_MOST_TOLD = 5
"""The most unreadable records, and the most ignored files, that a build names."""


@dataclass(frozen=True)
class Reading:
    """Options of `memo data build` for reading inputs (memo.cli.data). They do not change the corpus, except for
    unreadable records. With one worker the tokenizer has its own threads."""

    workers: int = 1
    skip_unreadable: bool = False
    progress: bool = False


READING = Reading()


@dataclass(frozen=True)
class BuildSummary:
    prefix: Path
    train: CorpusFacts
    evaluation: CorpusFacts | None
    """Facts of the held-out corpus PREFIX-eval; None if nothing was held out."""
    num_empty_documents: int
    """Documents without text, which are left out."""
    num_bytes: int = 0
    """Bytes of all files that were read."""
    seconds: float = 0.0
    """Time of reading, tokenizing and writing."""
    left_out: tuple[str, ...] = ()
    """Lines for people about ignored files of other kinds, and about unreadable records and files."""


def build_demo(
    out_prefix: str | Path,
    *,
    tokenizer: str = "byte",
    vocab_size: int | None = None,
    split_eval: float = 0.0,
    reading: Reading = READING,
) -> BuildSummary:
    """Build a corpus of texts that every machine has: the sources of Python's standard library, one document a file.

    All builds with one Python installation give the same corpus; other installations have other sources. The few
    sources that are not in UTF-8 (tests of Python itself) are left out silently. Arguments and errors: see
    `build_corpus`.
    """
    summary = build_corpus(
        python_sources(standard_library()),
        out_prefix,
        tokenizer=tokenizer,
        vocab_size=vocab_size,
        split_eval=split_eval,
        reading=replace(reading, skip_unreadable=True),
    )
    return replace(summary, left_out=())


def standard_library() -> Path:
    """The folder of this Python's standard library."""
    return Path(sysconfig.get_path("stdlib"))


def python_sources(folder: Path) -> list[Path]:
    """Every .py file below `folder` outside installed packages, sorted by relative path."""
    return [path for path in walk(folder, ("site-packages", "dist-packages")) if path.suffix == ".py"]


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
    """Build OUT.bin, .idx and .json (for BPE also OUT-tokenizer.json) from files and directories. The arguments are the
    options of `memo data build` (memo.cli.data); `split_eval` is its --eval-fraction.

    Which documents are held out depends only on their position in the inputs, so a second build holds out the same. The
    corpus does not depend on the number of workers. Raises ConfigError for arguments that do not fit together and
    for a missing package, DataError for inputs that cannot be read; an older corpus of the same name then stays
    unchanged.
    """
    prefix = Path(out_prefix)
    check_share(prefix, split_eval)
    given = _given_tokenizer(tokenizer, vocab_size)
    found = list_files(inputs)

    def texts() -> Iterator[str]:
        errors = _Errors(reading)
        for piece in read_pieces(found.files, json_key):
            read, unread = piece.each(lambda record, where: text_of(record, where, json_key))
            errors.add(unread)
            yield from read

    if given is None:
        assert vocab_size is not None
        # In a temporary folder: a build that fails must not leave an older corpus with a new tokenizer.
        with tempfile.TemporaryDirectory() as folder:
            given = train_bpe(texts(), vocab_size, Path(folder) / "tokenizer.json")
    encoder = TextEncoder(given, json_key, (given.eod,) if append_eod else ())
    return write_corpus(found, prefix, encoder, split_eval, reading)


def write_corpus(
    found: Inputs, prefix: Path, encoder: TextEncoder | AnswerEncoder, split_eval: float, reading: Reading
) -> BuildSummary:
    """Write the documents that `encoder` makes of all files; arguments and errors: see `build_corpus`."""
    errors, tokenizer, has_texts = _Errors(reading), encoder.tokenizer, encoder.sides is None
    # The byte tokenizer is faster than sending texts to a process, and small inputs take less time than the start of
    # processes.
    is_alone = (has_texts and isinstance(tokenizer, ByteTokenizer)) or found.num_bytes < _WORKERS_FROM_BYTES
    num_workers = 1 if is_alone else reading.workers or len(os.sched_getaffinity(0))
    with ExitStack() as stack:
        corpus = CorpusWriter(stack, prefix, split_eval, encoder)
        what = "tokenizing" if has_texts else "rendering"
        reach = stack.enter_context(waiting(what, found.num_bytes, reading.progress))
        start_s = time.perf_counter()
        pieces = read_pieces(found.files, encoder.key, lines_of_text=not has_texts)
        encoded = stack.enter_context(closing(encode_all(pieces, encoder, num_workers)))
        for piece, (groups, unread) in encoded:
            errors.add(unread)
            for group in groups:
                corpus.add(*group)
            reach(completed=piece.done_bytes)
        if not corpus.num_groups and (told := errors.lines()):
            raise DataError(f"no documents for {prefix}: {' '.join(told)}")
        facts, elapsed_s = corpus.complete(), time.perf_counter() - start_s
    lines = tuple(visible(line) for line in (*_ignored(found.ignored), *errors.lines()))
    return BuildSummary(prefix, *facts, corpus.num_empty_documents, found.num_bytes, elapsed_s, lines)


class _Errors:
    """Handles unreadable records and files: the first one ends the build, or all are left out and counted."""

    def __init__(self, reading: Reading) -> None:
        self._skips, self._count, self._told = reading.skip_unreadable, 0, list[str]()

    def add(self, errors: Iterable[DataError]) -> None:
        """Count errors; raises the first unless unreadable records are left out."""
        for error in errors:
            if not self._skips:
                raise DataError(f"{error} (--skip-unreadable of `memo data` leaves out what cannot be read)") from None
            self._count += 1
            if self._count <= _MOST_TOLD:
                self._told.append(f"  {error}")

    def lines(self) -> list[str]:
        """Lines for people; empty if nothing was left out."""
        more = [f"  and {self._count - _MOST_TOLD:,} more"] if self._count > _MOST_TOLD else []
        return [f"left out {self._count:,} that could not be read:", *self._told, *more] if self._count else []


def _ignored(files: Sequence[Path]) -> list[str]:
    """A line about the ignored files of folders, whose kind is not read; empty if there are none."""
    more = ", ..." if len(files) > _MOST_TOLD else ""
    names = ", ".join(map(str, files[:_MOST_TOLD]))
    return [f"left out {len(files):,} files of other kinds: {names}{more}"] if files else []


def _given_tokenizer(spec: str, vocab_size: int | None) -> Tokenizer | None:
    """None: one of `vocab_size` is to be trained on the inputs."""
    if spec != TRAIN_BPE:
        if vocab_size is not None:
            raise ConfigError(
                f"vocab-size = {vocab_size}, but tokenizer = {spec} has its own; "
                "drop vocab-size, or set tokenizer = bpe to train one"
            )
        return load_tokenizer(spec)
    if vocab_size is None:
        raise ConfigError("tokenizer = bpe trains a new tokenizer; set vocab-size (8192, say)")
    return None
