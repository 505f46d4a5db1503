"""Texts in the fields of the model that are lists, of layers, matrices or numbers: their words and their rules."""

import math
import re

from memo.artifacts.fields import Rule

SLIDING, FULL, LINEAR = "sliding", "full", "linear"
"""Words of layer_types: layers with the sliding window, layers with full attention, and gated delta nets."""

_LIST = re.compile(r"\[\s*([01](?:\s*,\s*[01])*)\s*\](?:\s*\*\s*([1-9]\d{0,5}))?")

LORA_TARGETS: dict[str, tuple[str, ...]] = {
    "q_proj": ("attention.q", "attention.gate"),
    "k_proj": ("attention.k",),
    "v_proj": ("attention.v",),
    "q_a_proj": ("attention.q_down",),
    "q_b_proj": ("attention.q_up",),
    "kv_a_proj_with_mqa": ("attention.kv_down",),
    "kv_b_proj": ("attention.kv_up",),
    "o_proj": ("attention.projection",),
    "gate_proj": ("mlp.gate",),
    "up_proj": ("mlp.up", "mlp.fc1"),
    "down_proj": ("mlp.fc2",),
}
"""Names in lora_target_modules, which are those of most models of Hugging Face -> the tensors of memo that they
mean."""


def _has_known_layers(words: str) -> bool:
    return not words or set(words.split(",")) <= {SLIDING, FULL, LINEAR}


def _names_targets(words: str) -> bool:
    return words == "all-linear" or all(word.strip() in LORA_TARGETS for word in words.split(","))


def _is_sum_of_lists(text: str) -> bool:
    return not text or all(_LIST.fullmatch(term.strip()) for term in text.split("+"))


def _are_factors(text: str) -> bool:
    try:
        return not text or all(0 < number < math.inf for number in numbers_of(text))
    except ValueError:
        return False


def numbers_of(text: str) -> list[float]:
    """The numbers of a text with commas between them. Raises ValueError."""
    return [float(number) for number in text.split(",")]


def marked(lists: str) -> tuple[bool, ...]:
    """Whether each number of a sum of lists, whose form has been checked before, is 1; empty for an empty text."""
    terms = [_LIST.fullmatch(term.strip()) for term in lists.split("+")]
    numbers = [number for term in terms if term for number in term[1].split(",") * int(term[2] or 1)]
    return tuple(number.strip() == "1" for number in numbers)


LAYER_TYPES = Rule(
    f"of {SLIDING}, {FULL} and {LINEAR} with commas between, such as {SLIDING},{FULL}", _has_known_layers
)
LAYER_FREQ = Rule("that is a sum of lists of 0 and 1, such as [0]*1+[1]*3", _is_sum_of_lists)
FACTORS = Rule("of numbers above 0 with commas between, such as 1,1.12,1.25", _are_factors)
TARGETS = Rule(f"that is all-linear, or some of {', '.join(LORA_TARGETS)} with commas between", _names_targets)
