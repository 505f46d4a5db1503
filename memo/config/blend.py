"""What --data-path names: one corpus, or several and how often each is read.

    --data-path data/a                      one corpus
    --data-path 0.7 data/a 0.3 data/b       a blend: seven samples of ten are of the first, Megatron-LM's form
    --data-path data/a data/b               a blend by size: each corpus as often as it has samples

As in Megatron-LM a weight is a word that is a number. A corpus that is called by a number is written ./0.7.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite

from memo.config.require import require
from memo.errors import ConfigError

_NAMED = re.compile(r"([A-Za-z][\w.-]*)=(.+)")
_NUMBER = re.compile(r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?|[-+]?(?:inf|infinity|nan)", re.IGNORECASE)
_MOST_CHARACTERS = 80


@dataclass(frozen=True)
class Blend:
    """Corpora that are read together.

    Attributes:
        prefixes: of their .bin and .idx files.
        weights: one of each, from 0 on and as given, of any sum above 0; None: each has as much as it has samples.
    """

    prefixes: tuple[str, ...]
    weights: tuple[float, ...] | None = None


def is_weight(word: str) -> bool:
    """Whether a word of --data-path is a number, and so the weight of the corpus after it."""
    return _NUMBER.fullmatch(word) is not None


def read_blend(flag: str, words: Sequence[str]) -> Blend:
    """What the words after `flag` name. Raises ConfigError for words that are no blend."""
    require(words, f"{flag} is given without a corpus: give PREFIX, or WEIGHT PREFIX WEIGHT PREFIX ...")
    if not any(map(is_weight, words)):
        prefixes, weights = tuple(words), None
    else:
        _check_pairs(flag, words)
        prefixes, weights = tuple(words[1::2]), tuple(float(word) for word in words[::2])
        _check_weights(flag, words[::2], prefixes)
    for place, prefix in enumerate(prefixes):
        require(
            prefix not in prefixes[:place],
            f"{flag} names {prefix} twice, whose samples would come in the same order both times: name it once, with "
            "the sum of the weights",
        )
    return Blend(prefixes, weights)


def read_eval_sets(words: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """{name: words of `read_blend`} of --eval-data-path: one set without a name, or one corpus for each NAME=PREFIX.

    Raises ConfigError for words that are neither, and for a name that is given twice.
    """
    flag = "--eval-data-path"
    named = [_NAMED.fullmatch(word) for word in words]
    if not any(named):
        read_blend(flag, words)
        return {"": tuple(words)}
    sets: dict[str, tuple[str, ...]] = {}
    for word, found in zip(words, named, strict=True):
        if found is None:
            first = next(filter(None, named))[0]
            raise ConfigError(f"{flag} gives {word} no name, but there is {first}: write NAME={word}, or no names")
        name, prefix = found.groups()
        require(name not in sets, f"{flag} has two sets called {name}: give each a name of its own")
        sets[name] = read_blend(flag, (prefix,)).prefixes
    return sets


def _short(word: str) -> str:
    return word if len(word) <= _MOST_CHARACTERS else f"{word[:_MOST_CHARACTERS]}..."


def _check_pairs(flag: str, words: Sequence[str]) -> None:
    """Weights and prefixes must alternate, from a weight on."""
    for place, word in enumerate(words):
        if place % 2 == 0 and not is_weight(word):
            weight = next(filter(is_weight, words))
            require(
                False,
                f"{flag} gives {word} no weight, but there is a weight {weight}: give each corpus a weight before its "
                "prefix, or none of them",
            )
        following = words[place + 1] if place + 1 < len(words) else None
        if place % 2 == 0 and (following is None or is_weight(following)):
            found = "ends after it" if following is None else f"goes on with {following}"
            require(
                False,
                f"{flag} has the weight {_short(word)}, but {found}: give the prefix of a corpus after each weight "
                f"(one that is called {_short(word)} is written ./{_short(word)})",
            )


def _check_weights(flag: str, words: Sequence[str], prefixes: Sequence[str]) -> None:
    for word, prefix in zip(words, prefixes, strict=True):
        require(
            isfinite(float(word)) and float(word) >= 0,
            f"{flag} gives {prefix} the weight {_short(word)}: give a number from 0 on; only how weights compare "
            "counts",
        )
    require(
        any(float(word) > 0 for word in words),
        f"{flag} gives all of {', '.join(prefixes)} the weight 0, so there is nothing to read: raise one",
    )
