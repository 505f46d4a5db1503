"""Rotary positions in a config.json: rope_theta and rope_scaling, or rope_parameters, which joins them."""

import math
from collections.abc import Mapping
from typing import Any

from memo.config.model import ModelConfig
from memo.config.values import checked_value
from memo.errors import ConfigError

# Of each rope_type: their key -> our field.
_FACTOR = {"factor": "rope_scaling_factor"}
_LENGTH = {"original_max_position_embeddings": "rope_original_max_position_embeddings"}
_KEYS: dict[str, dict[str, str]] = {
    "default": {},
    "linear": _FACTOR,
    "llama3": {
        **_FACTOR,
        **_LENGTH,
        "low_freq_factor": "rope_low_freq_factor",
        "high_freq_factor": "rope_high_freq_factor",
    },
    "yarn": {**_FACTOR, **_LENGTH, "beta_fast": "rope_beta_fast", "beta_slow": "rope_beta_slow"},
}
# Keys that ask for nothing: names, and what rope_theta's own reader takes.
_OTHER_KEYS = ("rope_type", "type", "rope_theta", "attention_factor", "finetuned", "max_position_embeddings")


def read_rope(content: Mapping[str, Any], source: str) -> dict[str, Any]:
    """Fields of ModelConfig; raises ConfigError for a rotation that memo does not compute."""
    name = "rope_parameters" if content.get("rope_parameters") else "rope_scaling"
    given, where = content.get(name) or {}, f"{source}: {name}"
    if not isinstance(given, dict) or any(isinstance(value, dict) for value in given.values()):
        raise ConfigError(f"{where} is {given!r}: memo has one rotation for all layers; use another model")
    kind = given.get("rope_type", given.get("type", "default"))
    if kind not in _KEYS:
        raise ConfigError(f"{where}.rope_type is {kind!r}: memo stretches RoPE by linear, llama3 or yarn")
    _check_keys(given, kind, where)
    theta = given.get("rope_theta", content.get("rope_theta", 10000.0))
    found = {
        "rotary_base": number("rotary_base", theta, f"{source}: rope_theta"),
        "rope_scaling_type": "none" if kind == "default" else kind,
    }
    for key, ours in _KEYS[kind].items():
        if given.get(key) is not None:
            found[ours] = number(ours, given[key], f"{where}.{key}")
    if kind != "default" and "rope_scaling_factor" not in found:
        raise ConfigError(f"{where}.factor is missing: complete the file, as rope_type {kind} needs it")
    for key, ours in _LENGTH.items():
        if key in _KEYS[kind] and ours not in found:
            longest = content.get("max_position_embeddings")
            found[ours] = number(ours, longest, f"{source}: max_position_embeddings")
    return found


def write_rope(model: ModelConfig) -> dict[str, Any]:
    """The older pair of fields, which every version of transformers reads."""
    kind = "default" if model.rope_scaling_type == "none" else model.rope_scaling_type
    scaling = {"rope_type": kind, **{key: getattr(model, ours) for key, ours in _KEYS[kind].items()}}
    return {"rope_theta": model.rotary_base, "rope_scaling": None if kind == "default" else scaling}


def number(field_name: str, value: object, where: str) -> object:
    """`value` for a field of ModelConfig; raises ConfigError that begins with `where`."""
    try:
        return checked_value(ModelConfig, field_name, value, where)
    except ConfigError:
        raise ConfigError(f"{where} is {value!r}, which is no number for it: correct the file") from None


def _check_keys(given: Mapping[str, Any], kind: str, where: str) -> None:
    """Refuse what would change an angle or its factor."""
    neutral = {"partial_rotary_factor": 1.0, "truncate": True}
    for key, value in given.items():
        is_read = key in _KEYS[kind] or key in _OTHER_KEYS or value is None
        # Without stretching nothing else is read, except which part of a head is rotated.
        is_read = is_read or (kind == "default" and key not in neutral)
        if not is_read and neutral.get(key) != value:
            raise ConfigError(f"{where}.{key} is {value!r}, which memo does not compute: use a model without it")
    stated, factor = given.get("attention_factor"), given.get("factor")
    if kind == "yarn" and stated is not None and isinstance(factor, int | float):
        usual = 0.1 * math.log(factor) + 1.0 if factor > 1 else 1.0
        if not isinstance(stated, int | float) or not math.isclose(stated, usual, rel_tol=1e-6):
            raise ConfigError(
                f"{where}.attention_factor is {stated}, but memo computes with {usual}, as YaRN's paper does: "
                "use a model without it"
            )
