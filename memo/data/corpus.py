"""Opens a corpus as the kind of dataset that its facts name, or several corpora as a blend; identifies datasets, and
counts their epochs."""

import math
import os
from collections.abc import Sequence
from pathlib import Path

from memo.artifacts.checksum import checksum_of
from memo.config import RunConfig
from memo.config.blend import read_blend
from memo.config.data import DataConfig
from memo.config.derived import global_batch_size
from memo.config.identity import Fact
from memo.config.split import WHOLE, Part, read_split
from memo.data.blended import BlendedDataset, Corpus
from memo.data.facts import TOKENIZER_SUFFIX, CorpusFacts, mask_prefix
from memo.data.indexed import IndexedDataset
from memo.data.packed_answers import PackedConversations, PreferencePairs
from memo.data.packing import PackedDataset
from memo.data.sample import SampleDataset
from memo.errors import ConfigError, DataError


def open_corpora(
    flag: str, words: Sequence[str], data: DataConfig, seed: int, part: Part = WHOLE
) -> Corpus | BlendedDataset:
    """Open `part` of the corpora that the words after `flag` name (`memo.config.blend`).

    Raises the errors of `read_blend` and `open_corpus`.
    """
    blend = read_blend(flag, words)
    corpora = [open_corpus(prefix, data, seed, part) for prefix in blend.prefixes]
    if len(corpora) == 1:
        return corpora[0]
    for prefix, corpus in zip(blend.prefixes, corpora, strict=True):
        if isinstance(corpus, PreferencePairs):
            raise ConfigError(
                f"{flag} {' '.join(words)} names {len(corpora)} corpora, but {prefix} holds pairs of preferences, "
                "which are not blended: build one corpus of all pairs, with `memo data pairs`"
            )
    return BlendedDataset(corpora, blend.prefixes, blend.weights)


def training_part(data: DataConfig) -> Part:
    return WHOLE if data.split is None else read_split(data.split).train


def open_corpus(prefix: str | os.PathLike[str], data: DataConfig, seed: int, part: Part = WHOLE) -> Corpus:
    """Open a corpus as samples of `data.seq_length` tokens: of conversations if `memo data chat` wrote the corpus, of
    preference pairs if `memo data pairs` wrote it, else of texts.

    Raises ConfigError if the corpus is too short, and DataError if its files do not belong together.
    """
    name = os.fspath(prefix)
    facts = CorpusFacts.load(name) if Path(f"{name}.json").exists() else None
    mask = mask_prefix(name)
    if facts is None and Path(f"{mask}.idx").exists():
        raise DataError(
            f"{mask}.idx says which tokens of {name} are answers, but {name}.json, which goes with it, is missing; "
            "restore it, build the corpus again, or remove the mask to train on all tokens"
        )
    indexed = IndexedDataset(name, part)
    if facts is None or facts.num_answer_tokens is None:
        return PackedDataset(indexed, data.seq_length, seed, packing=data.packing)
    if facts.num_pairs is not None and part != WHOLE:
        raise ConfigError(
            f"--split {data.split} conflicts with {name}, which holds pairs of preferences: hold some out with the "
            "--eval-fraction of `memo data pairs`, and name them with --eval-data-path"
        )
    return (PackedConversations if facts.num_pairs is None else PreferencePairs)(
        indexed,
        IndexedDataset(mask, part),
        data.seq_length,
        seed,
        fill=facts.eod,
        packing=data.packing,
        long_conversations=data.long_conversations,
    )


def data_identity(data: DataConfig, dataset: SampleDataset) -> dict[str, Fact]:
    """{flag: fact} that a checkpoint records about its data: their content and how samples are cut, not their place.

    All names are in memo.config.identity.DATA_FACTS. A user's dataset may have a method
    `identity() -> dict[str, Fact]`; without it, only its length is known.
    """
    found: dict[str, Fact] = {"seq_length": dataset.seq_length}
    describe = getattr(dataset, "identity", None)
    if describe is not None:
        found |= describe()
    tokenizers = (Path(f"{prefix}{TOKENIZER_SUFFIX}") for prefix in data.prefixes)
    tokenizer = next(filter(Path.is_file, tokenizers), None)  # all corpora of a blend have the same tokenizer
    if tokenizer is not None:
        found["tokenizer"] = checksum_of(tokenizer.read_bytes())
    return found


def with_epochs(config: RunConfig, world_size: int, dataset: SampleDataset | None = None) -> RunConfig:
    """Return `config` with train_iters instead of num_epochs, rounded up to a whole step; unchanged without num_epochs.

    `dataset` is read instead of --data-path, if given. Raises ConfigError for one without samples_per_epoch, and the
    errors of `open_corpora`.
    """
    epochs, data = config.training.num_epochs, config.data
    if epochs is None:
        return config
    if dataset is None:
        words, part = data.data_path or (), training_part(data)
        dataset = open_corpora("--data-path", words, data, config.training.seed, part)
    samples = getattr(dataset, "samples_per_epoch", None)
    if samples is None:
        raise ConfigError(
            f"--num-epochs {epochs:g} needs the number of samples, but the given dataset has no samples_per_epoch: add "
            "it, or give --train-iters"
        )
    steps = math.ceil(epochs * samples / global_batch_size(config, world_size))
    return config.override({"train_iters": steps, "num_epochs": None})
