"""The corpora that --data-path names: one, or several and how often each is read.

    --data-path data/a                      one corpus
    --data-path 0.7 data/a 0.3 data/b       a blend: seven samples of ten are of the first, Megatron-LM's form
    --data-path data/a data/b               a blend by size: each corpus as often as it has samples

As in Megatron-LM a weight is a word that is a number. A corpus that is called by a number is written ./0.7.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
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
        weights: one for each prefix, from 0 on and with any sum above 0; None: each corpus counts by its samples.
    """

    prefixes: tuple[str, ...]
    weights: tuple[float, ...] | None = None


def is_weight(word: str) -> bool:
    """Whether a word of --data-path is a number, and so the weight of the corpus after it."""
    return _NUMBER.fullmatch(word) is not None


def read_blend(flag: str, words: Sequence[str]) -> Blend:
    """The corpora that the words after `flag` name. Raises ConfigError for words that are no blend."""
    require(words, f"{flag} is given without a corpus: give PREFIX, or WEIGHT PREFIX WEIGHT PREFIX ...")
    given = list(filter(is_weight, words))
    blend = _weighted(flag, words, given[0]) if given else Blend(tuple(words))
    for place, prefix in enumerate(blend.prefixes):
        require(
            prefix not in blend.prefixes[:place],
            f"{flag} names {prefix} twice, whose samples would come in the same order both times: name it once, with "
            "the sum of the weights",
        )
    return blend


def _weighted(flag: str, words: Sequence[str], first: str) -> Blend:
    """The blend of words that are weights and prefixes in turn; `first` is one of the weights, for messages."""
    pairs = list(zip_longest(words[::2], words[1::2]))
    for weight, prefix in pairs:
        require(
            is_weight(weight),
            f"{flag} gives {weight} no weight, but there is a weight {first}: give each corpus a weight before its "
            "prefix, or none of them",
        )
        short = weight if len(weight) <= _MOST_CHARACTERS else f"{weight[:_MOST_CHARACTERS]}..."
        require(
            prefix is not None and not is_weight(prefix),
            f"{flag} has the weight {short}, but {'ends after it' if prefix is None else f'goes on with {prefix}'}: "
            f"give the prefix of a corpus after each weight (one that is called {short} is written ./{short})",
        )
        require(
            isfinite(float(weight)) and float(weight) >= 0,
            f"{flag} gives {prefix} the weight {short}: give a number from 0 on; only how weights compare counts",
        )
    prefixes, weights = tuple(prefix for _, prefix in pairs), tuple(float(weight) for weight, _ in pairs)
    nothing = f"{flag} gives all of {', '.join(prefixes)} the weight 0, so there is nothing to read: raise one"
    require(any(weights), nothing)
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
