"""From text to an indexed corpus: `memo data build` and `memo data demo`."""

import os
import sysconfig
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from memo.data.corpus_writer import CorpusWriter, check_share
from memo.data.encode import Encoder
from memo.data.facts import CorpusFacts
from memo.data.file_kinds import list_files, walk
from memo.data.indexed import smallest_dtype
from memo.data.left_out import LeftOut
from memo.data.progress import progress
from memo.data.records import RecordPiece, read_pieces
from memo.data.tokenizer import ByteTokenizer, Tokenizer, load_tokenizer, train_bpe
from memo.data.workers import encode_all
from memo.errors import ConfigError

TRAIN_BPE = "bpe"
"""The tokenizer argument that asks for a new tokenizer, trained on the corpus itself."""
_WORKERS_FROM_BYTES = 16 << 20
"""Starting processes takes about as long as tokenizing so much."""
_INSTALLED_PACKAGES = frozenset({"site-packages", "dist-packages"})


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
    sources = (path for path in walk(folder) if path.suffix == ".py")
    return [path for path in sources if _INSTALLED_PACKAGES.isdisjoint(path.relative_to(folder).parts)]


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
    prefix, total_bytes = Path(out_prefix), found.num_bytes
    check_share(prefix, split_eval)

    def read() -> Iterator[RecordPiece]:
        return read_pieces(found.files, json_key, left_out.refuse)

    texts = (text for piece in read() for text in piece.texts(json_key, left_out.refuse))
    chosen = _choose_tokenizer(tokenizer, vocab_size, texts)
    left_out.begin()  # what the tokenizer was trained on is read again
    encoder = Encoder(chosen, json_key, smallest_dtype(chosen.vocab_size), left_out.skip)
    end = np.array([chosen.eod] if append_eod else [], dtype=encoder.dtype)
    with ExitStack() as stack:
        corpus = CorpusWriter(stack, prefix, split_eval, chosen)
        reach = stack.enter_context(progress("tokenizing", total_bytes, reading.progress))
        start_s, num_text_bytes = time.perf_counter(), 0
        for encoded in encode_all(read(), encoder, reading.num_workers(chosen, total_bytes)):
            num_text_bytes += encoded.num_text_bytes
            for message in encoded.refused:
                left_out.count(message)
            for ids in np.split(encoded.ids, np.cumsum(encoded.lengths)[:-1]) if len(encoded.lengths) else ():
                corpus.add(np.concatenate((ids, end)) if ids.size else ids)
            reach(encoded.done_bytes)
        facts, elapsed_s = corpus.complete(), time.perf_counter() - start_s
        lines = tuple(left_out.lines())
        return BuildSummary(prefix, *facts, corpus.num_empty_documents, num_text_bytes, elapsed_s, lines)


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
