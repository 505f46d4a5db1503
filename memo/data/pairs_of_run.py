"""The data of `memo train --preference`: a corpus of pairs, or a file from which a corpus is built first."""

from pathlib import Path

from memo.config import RunConfig
from memo.config.blend import read_blend, read_eval_sets
from memo.config.derived import trains_adapters_alone
from memo.config.require import require
from memo.data.corpus_builder import Reading
from memo.data.facts import CorpusFacts
from memo.data.file_kinds import CHAT_KINDS, file_kind
from memo.data.find import check_prefix
from memo.data.pairs import build_pairs


def pairs_file(config: RunConfig) -> str | None:
    """The file in --data-path if --preference is given, else None. Raises ConfigError if it cannot become a corpus."""
    words, kind = config.data.data_path or (), config.training.preference
    if kind is None or len(words) != 1 or not Path(words[0]).is_file() or file_kind(Path(words[0])) not in CHAT_KINDS:
        return None
    save, tokenizer = config.checkpoint.save, _tokenizer_of(config)
    require(
        save is not None and tokenizer is not None,
        f"--data-path {words[0]} is a file of preferences, of which a corpus is made, but "
        f"{'--save' if save is None else '--model'} is not given: give --save OUT and --model DIR (or --tokenizer), or "
        "make it with `memo data pairs` and name that",
    )
    return words[0]


def check_learned(config: RunConfig, has_pairs: bool, source: str) -> None:
    """Raises ConfigError unless the data are pairs exactly if --preference is given. `source` names the data."""
    preference = config.training.preference
    require(
        has_pairs or preference is None,
        f"--preference {preference} learns from pairs of answers, but {source} holds none: `memo data pairs "
        "pairs.jsonl data/pairs --tokenizer MODEL` makes a corpus of them, for --data-path data/pairs",
    )
    require(
        preference is not None or not has_pairs,
        f"{source} holds pairs of a chosen and a rejected answer, which are no texts to imitate: give --preference dpo",
    )


def check_corpora_learned(config: RunConfig) -> None:
    """Call `check_learned` for the corpora of --data-path, which must exist."""
    for prefix in config.data.prefixes:
        check_learned(config, _holds_pairs(prefix), f"--data-path {prefix}")


def evaluates_pairs(config: RunConfig) -> bool:
    """Whether a corpus of --eval-data-path, or else of --data-path, holds pairs. Raises ConfigError if this model gives
    them no loss, and DataError for a missing corpus."""
    flag = "--data-path" if config.data.eval_data_path is None else "--eval-data-path"
    corpora = config.data.eval_data_path or config.data.data_path
    sets = {} if corpora is None else read_eval_sets(corpora)
    prefixes = [prefix for words in sets.values() for prefix in read_blend(flag, words).prefixes]
    for prefix in prefixes:
        check_prefix(flag, prefix, config.checkpoint.pretrained_checkpoint)
    found, preference = next(filter(_holds_pairs, prefixes), None), config.training.preference
    require(
        found is None or (preference is not None and trains_adapters_alone(config.model)),
        f"{flag} {found} holds pairs of a chosen and a rejected answer, whose loss needs a reference, the model "
        f"without its adapters, but {'--preference is None' if preference is None else 'all weights were trained'}: "
        "give texts or conversations as --eval-data-path, or a run with --preference dpo and --lora-rank 16",
    )
    return found is not None


def _holds_pairs(prefix: str) -> bool:
    return Path(f"{prefix}.json").exists() and CorpusFacts.load(prefix).num_pairs is not None


def build_pairs_of_run(config: RunConfig, file: str, prefix: str) -> None:
    """Build the corpus PREFIX from `pairs_file`; raises the errors of `build_pairs`."""
    reading = Reading(progress=config.logging.progress)
    build_pairs([file], prefix, tokenizer=str(_tokenizer_of(config)), reading=reading)


def _tokenizer_of(config: RunConfig) -> str | None:
    return config.data.tokenizer or config.checkpoint.pretrained_checkpoint
