"""Rotary positions in a config.json: rope_theta and rope_scaling, or rope_parameters, which joins them."""

import math
from collections.abc import Mapping
from typing import Any

from memo.artifacts.fields import checked
from memo.artifacts.reading import Source, shown
from memo.config.model import ModelConfig
from memo.config.model_ranges import number_of_model

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


def read_rope(content: Mapping[str, Any], source: Source) -> dict[str, Any]:
    """Fields of ModelConfig; raises source.error for a rotation that memo does not compute."""
    name = "rope_parameters" if content.get("rope_parameters") else "rope_scaling"
    given = content.get(name) or {}
    if not isinstance(given, dict) or any(isinstance(value, dict | list) for value in given.values()):
        raise source.refusal(f"{name} is {shown(given)}", "memo has one rotation for all layers; use another model")
    kind = given.get("rope_type", given.get("type", "default"))
    if kind not in _KEYS:
        raise source.refusal(f"{name}.rope_type is {shown(kind)}", "memo stretches RoPE by linear, llama3 or yarn")
    _check_keys(given, kind, name, source)
    theta = given.get("rope_theta", content.get("rope_theta", 10000.0))
    found = {
        "rotary_base": checked(number_of_model("rotary_base"), theta, "rope_theta", source),
        "rope_scaling_type": "none" if kind == "default" else kind,
    }
    for key, ours in _KEYS[kind].items():
        if given.get(key) is not None:
            found[ours] = checked(number_of_model(ours), given[key], f"{name}.{key}", source)
    if kind != "default" and "rope_scaling_factor" not in found:
        raise source.refusal(f"{name}.factor is missing", f"complete the file, as rope_type {kind} needs it")
    for key, ours in _LENGTH.items():
        if key in _KEYS[kind] and ours not in found:
            longest = content.get("max_position_embeddings")
            found[ours] = checked(number_of_model(ours), longest, "max_position_embeddings", source)
    return found


def write_rope(model: ModelConfig) -> dict[str, Any]:
    """The older pair of fields, which every version of transformers reads."""
    kind = "default" if model.rope_scaling_type == "none" else model.rope_scaling_type
    scaling = {"rope_type": kind, **{key: getattr(model, ours) for key, ours in _KEYS[kind].items()}}
    return {"rope_theta": model.rotary_base, "rope_scaling": None if kind == "default" else scaling}


def _check_keys(given: Mapping[str, Any], kind: str, name: str, source: Source) -> None:
    """Refuse what would change an angle or its factor."""
    neutral = {"partial_rotary_factor": 1.0, "truncate": True}
    for key, value in given.items():
        is_read = key in _KEYS[kind] or key in _OTHER_KEYS or value is None
        # Without stretching nothing else is read, except which part of a head is rotated.
        is_read = is_read or (kind == "default" and key not in neutral)
        if not is_read and neutral.get(key) != value:
            raise source.refusal(
                f"{name}.{shown(key)[1:-1]} is {shown(value)}, which memo does not compute", "use a model without it"
            )
    if kind != "yarn" or given.get("attention_factor") is None or given.get("factor") is None:
        return
    stated = checked(float, given["attention_factor"], f"{name}.attention_factor", source)
    factor = checked(number_of_model("rope_scaling_factor"), given["factor"], f"{name}.factor", source)
    usual = 0.1 * math.log(factor) + 1.0 if factor > 1 else 1.0
    if not math.isclose(stated, usual, rel_tol=1e-6):
        raise source.refusal(
            f"{name}.attention_factor is {stated}, but memo computes with {usual}, as YaRN's paper does",
            "use a model without it",
        )
