"""From text to an indexed corpus: `memo data build` and `memo data demo`."""

import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from memo.data.documents import list_files, read_documents, read_python_sources, standard_library
from memo.data.facts import TOKENIZER_SUFFIX, CorpusFacts, tokenizer_spec
from memo.data.hashing import uniform
from memo.data.indexed import IndexedDatasetWriter, smallest_dtype
from memo.data.tokenizer import BPETokenizer, Tokenizer, load_tokenizer, train_bpe
from memo.errors import ConfigError, DataError

TRAIN_BPE = "bpe"
"""The tokenizer argument that asks for a new tokenizer, trained on the corpus itself."""
EVAL_SUFFIX = "-eval"
_SPLIT_KEY = 0x5EED
_BATCH_CHARACTERS = 1 << 22
"""Text that is tokenized at a time: enough to keep all cores busy, little enough to stream."""

Item = TypeVar("Item")


@dataclass(frozen=True)
class BuildSummary:
    """What a build wrote."""

    prefix: Path
    train: CorpusFacts
    evaluation: CorpusFacts | None
    """Of the held-out corpus, PREFIX-eval; None when nothing was held out."""
    num_empty_documents: int
    """Documents without text, which are left out."""


def build_demo(
    out_prefix: str | Path,
    *,
    tokenizer: str = "byte",
    vocab_size: int | None = None,
    split_eval: float = 0.0,
) -> BuildSummary:
    """Build a corpus that every machine has: the sources of Python's standard library, one document a file.

    The result is the same for every build by one Python installation; another installation has other sources.
    Arguments and errors as in `build_corpus`.
    """
    return _build(
        lambda: read_python_sources(standard_library()),
        Path(out_prefix),
        tokenizer=tokenizer,
        vocab_size=vocab_size,
        append_eod=True,
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
) -> BuildSummary:
    """Build OUT.bin, .idx and .json (for BPE also OUT-tokenizer.json) of .jsonl files, texts and directories.

    tokenizer: `byte`, a tokenizer.json or its directory, or `bpe` to train one of `vocab_size` on the inputs.
    json_key: the key of a .jsonl record that holds the text.
    append_eod: end each document with the tokenizer's end-of-document token.
    split_eval: share of the documents, in [0, 1), that goes to OUT-eval instead. The choice depends on
        nothing but a document's place in the inputs, so a second build holds out the same ones.

    Raises ConfigError for arguments that do not fit together and DataError for inputs that cannot be read;
    an older corpus of the same name then stays as it was.
    """
    files = list_files(inputs)
    return _build(
        lambda: read_documents(files, json_key),
        Path(out_prefix),
        tokenizer=tokenizer,
        vocab_size=vocab_size,
        append_eod=append_eod,
        split_eval=split_eval,
    )


def _build(
    read: Callable[[], Iterable[str]],
    prefix: Path,
    *,
    tokenizer: str,
    vocab_size: int | None,
    append_eod: bool,
    split_eval: float,
) -> BuildSummary:
    eval_prefix = evaluation_prefix(prefix, split_eval)
    chosen = _choose_tokenizer(tokenizer, vocab_size, read)
    with ExitStack() as stack:
        # Writers close in reverse order: the training corpus is moved into place last.
        train = stack.enter_context(IndexedDatasetWriter(prefix, smallest_dtype(chosen.vocab_size)))
        evaluation = None
        if split_eval > 0.0:
            evaluation = stack.enter_context(IndexedDatasetWriter(eval_prefix, train.dtype))
        num_documents = num_empty_documents = 0
        for ids in _encode(read(), chosen):
            held_out = is_held_out(num_documents, split_eval)
            num_documents += 1
            if not ids.size:
                num_empty_documents += 1
                continue
            writer = evaluation if evaluation is not None and held_out else train
            writer.add_document(np.append(ids, np.int32(chosen.eod)) if append_eod else ids)
        if evaluation is not None:
            check_split(split_eval, num_documents, train.num_documents, evaluation.num_documents)
        return BuildSummary(
            prefix=prefix,
            train=add_facts(train, chosen),
            evaluation=None if evaluation is None else add_facts(evaluation, chosen),
            num_empty_documents=num_empty_documents,
        )


def _choose_tokenizer(spec: str, vocab_size: int | None, read: Callable[[], Iterable[str]]) -> Tokenizer:
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
        return train_bpe(read(), vocab_size, Path(folder) / "tokenizer.json")


def add_facts(writer: IndexedDatasetWriter, tokenizer: Tokenizer, num_answer_tokens: int | None = None) -> CorpusFacts:
    """Facts and tokenizer of a finished corpus, to appear beside it; all of it is on disk then, not yet in place."""
    facts = CorpusFacts(
        tokenizer=tokenizer_spec(writer.prefix, tokenizer),
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


def _encode(documents: Iterable[str], tokenizer: Tokenizer) -> Iterator[NDArray[np.int32]]:
    """Ids of each document in turn, tokenized in batches."""
    for batch in in_batches(documents, len):
        yield from tokenizer.encode_batch(batch)


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
        raise ConfigError(f"split-eval = {split_eval}; it must be at least 0 and below 1")
    eval_prefix = Path(f"{prefix}{EVAL_SUFFIX}")
    if split_eval == 0.0 and Path(f"{eval_prefix}.idx").exists():
        raise ConfigError(
            f"split-eval = 0, but {eval_prefix}.idx exists: an earlier build held it out, this one would "
            "train on it; delete it, set split-eval or choose another prefix"
        )
    return eval_prefix


def check_split(split_eval: float, num_documents: int, num_train: int, num_evaluation: int) -> None:
    """Raises DataError when a split leaves one side without documents."""
    if not (num_train and num_evaluation):
        raise DataError(
            f"split-eval = {split_eval} of {num_documents} documents leaves {num_train} to "
            f"train on and {num_evaluation} to evaluate on; change it or use more documents"
        )


def is_held_out(index: int, share: float) -> bool:
    """Whether document `index` of the inputs goes to the evaluation corpus."""
    return bool(uniform((_SPLIT_KEY,), np.array([index]))[0] < share)
