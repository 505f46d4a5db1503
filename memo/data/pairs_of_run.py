"""A file of preferences as --data-path of `memo train --preference`, of which a corpus is made first."""

from pathlib import Path

from memo.config import RunConfig
from memo.config.require import require
from memo.data.corpus_builder import Reading
from memo.data.file_kinds import CHAT_KINDS, file_kind
from memo.data.pairs import build_pairs


def pairs_file(config: RunConfig) -> str | None:
    """The file, if --preference is given and --data-path names one. Raises ConfigError where no corpus can be made."""
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


def corpus_of_pairs(config: RunConfig) -> str:
    """The prefix of the corpus that `build_pairs_of_run` makes."""
    return f"{config.checkpoint.save}/data/pairs"


def build_pairs_of_run(config: RunConfig, file: str) -> None:
    """Make SAVE/data/pairs of `pairs_file`; raises as `build_pairs`."""
    build_pairs(
        [file],
        corpus_of_pairs(config),
        tokenizer=str(_tokenizer_of(config)),
        reading=Reading(progress=config.logging.progress),
    )


def _tokenizer_of(config: RunConfig) -> str | None:
    return config.data.tokenizer or config.checkpoint.pretrained_checkpoint
