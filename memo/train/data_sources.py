"""The data of a run: the corpora that flags name, the user's own objects, or mock data."""

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from memo.checkpoint.hugging_face.load import pretrained_directory
from memo.config import RunConfig
from memo.config.blend import read_blend, read_eval_sets
from memo.config.data import DataConfig
from memo.config.split import WHOLE, Part, read_split
from memo.data import (
    CorpusFacts,
    MockDataset,
    SampleDataset,
    Tokenizer,
    TokenStream,
    load_corpus_tokenizer,
    load_tokenizer,
    open_corpora,
    training_part,
)
from memo.data.token_stream import is_stream
from memo.errors import ConfigError

Word = str | os.PathLike[str] | float
DataSource = Word | Sequence[Word] | SampleDataset | Iterable[Any]
"""The prefix of a corpus, the words of a blend (0.7, "data/a", 0.3, "data/b"), samples, or documents."""

EvalSource = DataSource | Mapping[str, DataSource]
"""A data source for evaluation, or several by name."""
TEST = "test"
"""The name of the evaluation set that --split reserves for the end of the run."""
_LOOKED_AT = 100
"""How many items of a list are examined to tell texts from prefixes."""
_LONGEST_NAME = 255
"""The most characters that the name of a file can have."""
_NO_DATA = "evaluate() needs evaluation data: give --eval-data-path or eval_data="
_FLAGS = ("--data-path", "--eval-data-path")
"""The flags of the two streams of data: training and evaluation."""


def corpus_words(source: object) -> tuple[str, ...] | None:
    """The words after --data-path that mean the same as a source that names corpora; None for any other source."""
    if isinstance(source, str | os.PathLike):
        return (os.fspath(source),)
    if isinstance(source, list | tuple) and any(isinstance(word, str | os.PathLike) for word in source):
        if are_texts(source):
            return None
        return tuple(repr(word) if type(word) in (int, float) else os.fspath(word) for word in source)
    return None


def are_texts(source: object) -> bool:
    """Whether `source` is a list of documents rather than a list of prefixes of corpora, with or without weights."""
    if not isinstance(source, list | tuple) or not all(isinstance(each, str) for each in source):
        return False
    first = source[:_LOOKED_AT]
    is_long = any(len(each.split()) > 1 or len(each) > _LONGEST_NAME for each in first)
    return is_long and not any(os.path.exists(f"{each}.idx") for each in first)


def own_dataset(
    config: RunConfig, source: object, name: str, tokenizer: Tokenizer | None = None
) -> SampleDataset | None:
    """Return the samples of a user's object, which was given as argument `name`; None for None. Texts need a tokenizer.

    Raises ConfigError for an object that yields neither samples nor documents, and the errors of TokenStream.
    """
    if source is None or isinstance(source, SampleDataset):
        return source
    if is_stream(source):
        data = config.data
        return TokenStream(source, data.seq_length, config.training.seed, data.packing, name, tokenizer)
    raise ConfigError(
        f"{name} is a {type(source).__name__}: give the prefix of a corpus, a list of weights and prefixes, an "
        "object with seq_length and sample(index), or a Dataset or iterable of texts or token ids"
    )


def open_dataset(
    config: RunConfig,
    source: DataSource | None,
    stream: int,
    part: Part | None = None,
    tokenizer: Tokenizer | None = None,
) -> SampleDataset:
    """Return the dataset of a source: the user's object, `part` of the corpora that words name, or mock data for None.

    `stream` is 0 for training and 1 for evaluation; mock data differ between streams. The default `part` is the part
    that --split gives to training, and the whole of evaluation corpora. Raises ConfigError if data and model do not
    fit each other.
    """
    data, vocab_size = config.data, config.model.vocabulary
    if source is None:
        return MockDataset(vocab_size, data.seq_length, config.training.seed + stream)
    words, flag = corpus_words(source), _FLAGS[stream]
    if words is None:
        given = own_dataset(config, source, ("train_data", "eval_data")[stream], tokenizer)
        assert given is not None
        if given.seq_length != data.seq_length:
            raise ConfigError(
                f"--seq-length is {data.seq_length}, but the samples of the given data have "
                f"{given.seq_length} tokens: make them equal"
            )
        return given
    part = part or (training_part(data) if flag == _FLAGS[0] else WHOLE)
    dataset = open_corpora(flag, words, data, config.training.seed, part)
    for prefix in read_blend(flag, words).prefixes:
        facts = f"{prefix}.json"
        used = CorpusFacts.load(prefix).vocab_size if os.path.exists(facts) else 0
        if used > vocab_size:
            raise ConfigError(
                f"--vocab-size is {vocab_size}, but {facts} says that the corpus uses {used} tokens: leave "
                "--vocab-size out, or build the corpus with the model's own tokenizer"
            )
    return dataset


def evaluation_data(
    config: RunConfig, given: "EvalSource | None", tokenizer: Tokenizer | None = None
) -> dict[str, SampleDataset]:
    """The evaluation sets by name: `given`, else --split or --eval-data-path, else mock data if evaluations are due.

    A set without a name is called "". The documents that --split reserves for the end are called TEST.
    """
    data = config.data
    if isinstance(given, Mapping):
        return {str(name): open_dataset(config, source, 1, tokenizer=tokenizer) for name, source in given.items()}
    if given is not None:
        return {"": open_dataset(config, given, 1, tokenizer=tokenizer)}
    if data.split is not None and data.data_path is not None:
        split = read_split(data.split)
        parts = {"": split.valid, TEST: split.test}
        return {name: open_dataset(config, data.data_path, stream=0, part=part) for name, part in parts.items() if part}
    if data.eval_data_path is not None:
        sets = read_eval_sets(data.eval_data_path)
        return {name: open_dataset(config, words, stream=1) for name, words in sets.items()}
    if data.mock_data and config.training.eval_interval:
        return {"": open_dataset(config, None, stream=1)}
    return {}


def evaluation_set(sets: Mapping[str, SampleDataset], name: str | None) -> SampleDataset:
    """The set called `name`; None: the first set. Raises ConfigError if there is none."""
    if not sets:
        raise ConfigError(_NO_DATA)
    if name is not None and name not in sets:
        raise ConfigError(f"there is no evaluation set {name!r}: give one of {', '.join(map(repr, sets))}")
    return next(iter(sets.values())) if name is None else sets[name]


def evaluated_now(data: DataConfig, names: Iterable[str], at_end: bool) -> list[str]:
    """The names of sets that are evaluated every --eval-interval, or `at_end`: the test set of --split.

    Raises ConfigError if there is none, except `at_end`.
    """
    due = [name for name in names if (data.split is not None and name == TEST) == at_end]
    if not due and not at_end:
        raise ConfigError(_NO_DATA)
    return due


def tokenizer_of(config: RunConfig, has_texts: bool = False) -> Tokenizer | None:
    """The tokenizer of the run: --tokenizer, else the corpora's; for a list of texts, the pretrained model's. None for
    mock data and a user's token ids.

    Raises ConfigError if corpora have different tokenizers, or a tokenizer that is not the model's.
    """
    if config.data.tokenizer is not None:
        return load_tokenizer(config.data.tokenizer)
    words, pretrained = config.data.data_path, pretrained_directory(config)
    if words is None and not has_texts:
        return None
    theirs = load_tokenizer(pretrained) if pretrained and os.path.exists(f"{pretrained}/tokenizer.json") else None
    if words is None:
        return theirs
    prefixes = config.data.prefixes
    named = {prefix: load_corpus_tokenizer(prefix) for prefix in prefixes if os.path.exists(f"{prefix}.json")}
    for prefix, corpus in named.items():
        _check_alike(*next(iter(named.items())), prefix, corpus)
        if theirs is not None and theirs.vocab_size != corpus.vocab_size:  # token ids would have other meanings
            raise ConfigError(
                f"--data-path {prefix} was built with a tokenizer of {corpus.vocab_size} tokens, but "
                f"{pretrained}/tokenizer.json has {theirs.vocab_size}: build the corpus with --tokenizer {pretrained}, "
                "or name the corpus's own with --tokenizer if the model shall learn it"
            )
    if named:
        return next(iter(named.values()))
    if theirs is None and config.model.vocab_size is None:
        raise ConfigError(
            f"--data-path {prefixes[0]} has no {prefixes[0]}.json that names its "
            "tokenizer, and --vocab-size is not given: give --tokenizer or --vocab-size"
        )
    return theirs


def _check_alike(first: str, tokenizer: Tokenizer, prefix: str, other: Tokenizer) -> None:
    """Raises ConfigError if two corpora that are read together were built with different tokenizers."""
    same = (tokenizer.vocab_size, tokenizer.eod) == (other.vocab_size, other.eod)
    if not same or getattr(tokenizer, "definition", None) != getattr(other, "definition", None):
        raise ConfigError(
            f"--data-path reads {first} and {prefix} together, but they were built with different tokenizers, "
            f"{tokenizer.name} and {other.name}: build them with the same one, or name one with --tokenizer to read "
            "all by it"
        )
