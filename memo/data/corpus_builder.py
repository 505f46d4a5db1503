"""From text to an indexed corpus: `memo data build` and `memo data demo`, and what all builds have in common."""

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
from memo.data.progress import progress
from memo.data.records import read_pieces, text_of
from memo.data.tokenizer import ByteTokenizer, Tokenizer, load_tokenizer, train_bpe
from memo.errors import ConfigError, DataError
from memo.standard_streams import visible

TRAIN_BPE = "bpe"
"""The tokenizer argument that asks for a new tokenizer, trained on the corpus itself."""
_WORKERS_FROM_BYTES = 16 << 20
"""Starting processes takes about as long as tokenizing so much."""
_MOST_TOLD = 5
"""Records that cannot be read, and files that are left out, of which a build tells."""


@dataclass(frozen=True)
class Reading:
    """How inputs are read, which changes nothing of the corpus but what is left out."""

    workers: int = 1
    """Processes that tokenize, where there is enough to read; 0: one a core. One: the tokenizer's own threads."""
    skip_unreadable: bool = False
    """Leave out records and files that cannot be read, count them and tell the first; else the first is an error."""
    progress: bool = False
    """Show a bar where standard error is a terminal."""


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
    num_bytes: int = 0
    """Of all files that were read."""
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

    The result is the same for every build by one Python installation; another installation has other sources. Those
    that are not in UTF-8, of which the library keeps a few to test Python itself, are left out without a word.
    Arguments and errors as in `build_corpus`.
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
    """Folder of this Python's own sources."""
    return Path(sysconfig.get_path("stdlib"))


def python_sources(folder: Path) -> list[Path]:
    """Every .py file below `folder` outside of installed packages, sorted by relative path."""
    installed = {"site-packages", "dist-packages"}
    return [p for p in walk(folder) if p.suffix == ".py" and installed.isdisjoint(p.relative_to(folder).parts)]


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
    found, prefix = list_files(inputs), Path(out_prefix)
    check_share(prefix, split_eval)

    def texts() -> Iterator[str]:
        errors = _Errors(reading)
        for piece in read_pieces(found.files, json_key):
            read, unread = piece.each(lambda record, where: text_of(record, where, json_key))
            errors.add(unread)
            yield from read

    chosen = _choose_tokenizer(tokenizer, vocab_size, texts())
    encoder = TextEncoder(chosen, json_key, (chosen.eod,) if append_eod else ())
    return write_corpus(found, prefix, encoder, split_eval, reading)


def write_corpus(
    found: Inputs, prefix: Path, encoder: TextEncoder | AnswerEncoder, split_eval: float, reading: Reading
) -> BuildSummary:
    """Write what `encoder` makes of all files; arguments and errors as of `build_corpus`."""
    errors, tokenizer, has_texts = _Errors(reading), encoder.tokenizer, encoder.sides is None
    # The byte tokenizer is faster than sending texts to another process, a chat template has a process of its own, and
    # small inputs are done sooner than other processes have started.
    is_alone = isinstance(tokenizer, ByteTokenizer) or not has_texts or found.num_bytes < _WORKERS_FROM_BYTES
    num_workers = 1 if is_alone else reading.workers or len(os.sched_getaffinity(0))
    with ExitStack() as stack:
        corpus = CorpusWriter(stack, prefix, split_eval, tokenizer, encoder.template, encoder.sides)
        what = "tokenizing" if has_texts else "rendering"
        reach = stack.enter_context(progress(what, found.num_bytes, reading.progress))
        start_s = time.perf_counter()
        pieces = read_pieces(found.files, encoder.key, lines_of_text=not has_texts)
        encoded = stack.enter_context(closing(encode_all(pieces, encoder, num_workers)))
        for piece, (groups, unread) in encoded:
            errors.add(unread)
            for group in groups:
                corpus.add(*group)
            reach(piece.done_bytes)
        facts, elapsed_s = corpus.complete(), time.perf_counter() - start_s
    lines = tuple(visible(line) for line in (*_ignored(found.ignored), *errors.lines()))
    return BuildSummary(prefix, *facts, corpus.num_empty_documents, found.num_bytes, elapsed_s, lines)


class _Errors:
    """Records and files that cannot be read: the first one ends a build, or they are left out, counted and told."""

    def __init__(self, reading: Reading) -> None:
        self._skips, self._count, self._told = reading.skip_unreadable, 0, list[str]()

    def add(self, errors: Iterable[DataError]) -> None:
        """Raises the first, unless they are left out."""
        for error in errors:
            if not self._skips:
                raise DataError(f"{error} (--skip-unreadable leaves out what cannot be read)") from None
            self._count += 1
            if self._count <= _MOST_TOLD:
                self._told.append(f"  {error}")

    def lines(self) -> list[str]:
        """For people to read; empty where nothing was left out."""
        more = [f"  and {self._count - _MOST_TOLD:,} more"] if self._count > _MOST_TOLD else []
        return [f"left out {self._count:,} that could not be read:", *self._told, *more] if self._count else []


def _ignored(files: Sequence[Path]) -> list[str]:
    """A line about the files of folders that are of no kind that is taken."""
    more = ", ..." if len(files) > _MOST_TOLD else ""
    names = ", ".join(map(str, files[:_MOST_TOLD]))
    return [f"left out {len(files):,} files of other kinds: {names}{more}"] if files else []


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
