"""Rotary positions in a config.json: rope_scaling, or rope_parameters, which joins it and rope_theta."""

import json
import math
from collections.abc import Mapping
from typing import Any, get_args

from memo.artifacts.fields import PositiveFloat, PositiveInt, checked
from memo.artifacts.reading import Source, shown
from memo.config.flag import reading_marks
from memo.config.hugging_face_family import ConfigKeys, Family, as_field, period_of
from memo.config.layer_words import FULL, numbers_of
from memo.config.model import ModelConfig, RopeScaling
from memo.config.require import either
from memo.config.rope_factors import attention_factor_of, longrope_attention_factor_of

# {rope_type: {key in the file, which is our name without its first words: our field}}.
_KEYS = {
    "default" if kind == "none" else kind: {
        ours.removeprefix("rope_").removeprefix("scaling_"): ours
        for ours, marks in reading_marks(ModelConfig).items()
        if any(mark.field == "rope_scaling_type" and kind in mark.values for mark in marks)
    }
    for kind in get_args(RopeScaling)
}
_LENGTH, _FACTOR = "rope_original_max_position_embeddings", "rope_attention_factor"
_BETA, _OF_SCORES = "rope_llama_4_scaling_beta", "mscale_all_dim"
_FACTORS = ("short_factor", "long_factor")
_SCALES = ("mscale", _OF_SCORES)
_FULL, _SLIDING = "full_attention", "sliding_attention"
_SHARE, _INTERVAL = "partial_rotary_factor", "no_rope_layer_interval"
_OF_IMAGES = ("mrope_section", "mrope_interleaved")
"""Keys that assign channels to the positions of an image; for text all these positions are the same."""
# Keys that need no translation: names, and values that are read apart.
_OTHER_KEYS = ("rope_type", "type", "rope_theta", "attention_factor", *_SCALES, "finetuned", "max_position_embeddings")


def read_rope(keys: ConfigKeys, model: ModelConfig) -> dict[str, Any]:
    """Fields of ModelConfig; rotary_base is among them only where the file holds it beside the scaling. Raises
    source.error for a rotation that memo does not compute. `model` says which layers have a window."""
    content, family, source = keys.content, keys.family, keys.source
    if not family.sliding_base:
        name = _name_of_rope(content, source)
        given = content.get(name) or family.default_rope
        if isinstance(given, dict):
            given = {key: value for key, value in given.items() if key not in _OF_IMAGES}
            if "multi_latent_attention" in family.fixed:
                given.pop(_SHARE, None)  # qk_rope_head_dim says which channels are rotated
        if _SHARE not in family.names.values() or not isinstance(given, dict) or given.get(_SHARE) is None:
            return _read_rotation(keys, name, given)
        share = as_field("rotary_percent", given[_SHARE], f"{name}.{_SHARE}", source)
        rest = {key: value for key, value in given.items() if key != _SHARE}
        return {**_read_rotation(keys, name, rest), "rotary_percent": share}
    newer, older = content.get("rope_parameters") or {}, content.get("rope_scaling") or {}
    is_joined = isinstance(newer, dict) and newer.keys() <= {_FULL, _SLIDING}
    if not is_joined or (newer and older and not _repeats(newer.get(_FULL), older)):
        raise source.refusal(
            f"rope_parameters is {shown(json.dumps(newer))} and rope_scaling {shown(json.dumps(older))}",
            f"keep rope_scaling, which is of layers without a window, beside rope_theta and {family.sliding_base}; or "
            f"rope_parameters with {_FULL} and {_SLIDING}",
        )
    name = f"rope_parameters.{_FULL}" if newer else "rope_scaling"
    found = _read_rotation(keys, name, newer.get(_FULL) or older or family.default_rope)
    own = _read_rotation(keys, f"rope_parameters.{_SLIDING}", newer.get(_SLIDING) or {})
    if own["rope_scaling_type"] != "none":
        raise source.refusal(
            f"rope_parameters.{_SLIDING}.rope_type is {own['rope_scaling_type']}",
            "memo stretches RoPE in layers without a window alone: use default",
        )
    base = own.get("rotary_base", keys.number("sliding_rotary_base", family.sliding_base))
    if model.layer_types:
        return {**found, "sliding_rotary_base": base}
    return {**own, "rotary_base": base} if model.window_size else found


def without_rope(keys: ConfigKeys, model: ModelConfig) -> dict[str, Any]:
    """no_rope_freq of ModelConfig if layers have no RoPE; `model` says which layers have a window. Raises the source's
    error for a list with fewer numbers than layers."""
    family, layers = keys.family, model.num_layers
    if not family.rope_layers:
        return {}
    if family.rope_layers == _SLIDING:
        marks = ["1" if word == FULL else "0" for word in model.types_of_layers]
    else:
        rotated = keys.optional(list[int], family.rope_layers)
        if rotated is None:
            interval = checked(PositiveInt, keys.get(_INTERVAL), _INTERVAL, keys.source)
            rotated = [(layer + 1) % interval for layer in range(layers)]
        if len(rotated) < layers:
            raise keys.source.refusal(
                f"{family.rope_layers} has {len(rotated)} numbers for {layers} layers",
                "complete the list with 1 for layers with RoPE and 0 for layers without",
            )
        marks = ["0" if rotates else "1" for rotates in rotated[:layers]]
    if "0" not in marks:
        raise keys.source.refusal(f"{family.rope_layers} leaves no layer with RoPE", "use a model with RoPE in some")
    if "1" not in marks:
        return {}
    period = period_of(marks)
    times, rest = divmod(layers, len(period))
    lists = [f"[{','.join(period)}]*{times}", *([f"[{','.join(period[:rest])}]"] if rest else [])]
    return {"no_rope_freq": "+".join(lists)}


def _repeats(newer: Any, older: Any) -> bool:
    """Whether the older keys say nothing that the newer keys do not say."""
    return isinstance(newer, dict) and isinstance(older, dict) and older.items() <= newer.items()


def _read_rotation(keys: ConfigKeys, name: str, given: Any) -> dict[str, Any]:
    """Fields of ModelConfig for layers that rotate as `given`, the value of `name` in the file."""
    family, source = keys.family, keys.source
    kind: Any = given.get("rope_type", given.get("type", "default")) if isinstance(given, dict) else "default"
    if not isinstance(kind, dict | list) and kind not in family.rotations:
        raise source.refusal(
            f"{name}.rope_type is {shown(kind)}",
            f"memo computes {family.architecture} with {either(family.rotations)}: give the model that this one was "
            "made from, which is for shorter sequences and which memo extend stretches, or another one",
        )
    lists = _FACTORS if kind == "longrope" else ()
    if not isinstance(given, dict) or any(
        isinstance(value, dict | list) for key, value in given.items() if key not in lists
    ):
        raise source.refusal(f"{name} is {shown(given)}", "memo has one rotation for all layers; use another model")
    keys_of = _keys_of(kind, family)
    _check_keys(given, kind, keys_of, name, source)
    found: dict[str, Any] = {"rope_scaling_type": "none" if kind == "default" else kind}
    if "rope_theta" in given:
        found["rotary_base"] = as_field("rotary_base", given["rope_theta"], "rope_theta", source)
    for key, ours in keys_of.items():
        if key in lists:
            found[ours] = ",".join(map(repr, checked(list[PositiveFloat], given.get(key), f"{name}.{key}", source)))
        elif given.get(key) is not None:
            found[ours] = as_field(ours, given[key], f"{name}.{key}", source)
    if family.scales_queries and _BETA not in found:
        raise source.refusal(f"{name}.llama_4_scaling_beta is missing", "complete the file with it, beside yarn's keys")
    if kind == "proportional":
        found["rotary_percent"] = as_field("rotary_percent", given.get(_SHARE, 1.0), f"{name}.{_SHARE}", source)
    elif kind not in ("default", "longrope") and "rope_scaling_factor" not in found:
        raise source.refusal(f"{name}.factor is missing", f"complete the file, as rope_type {kind} needs it")
    if _LENGTH in _KEYS[kind].values():
        # transformers prefers a length beside the rotation's keys to the one among them.
        stated = keys.get("original_max_position_embeddings") is not None
        beside = "original_max_position_embeddings" if stated else "max_position_embeddings"
        if stated or _LENGTH not in found:
            found[_LENGTH] = as_field(_LENGTH, keys.get(beside), beside, source)
    if kind == "longrope":
        longest = keys.number("max_position_embeddings", "max_position_embeddings")
        found.setdefault("rope_scaling_factor", max(1.0, (longest or 0) / found[_LENGTH]))
    if kind in ("yarn", "longrope"):
        found[_FACTOR] = _attention_factor(found, given, name, source)
    return found


def _keys_of(kind: str, family: Family) -> dict[str, str]:
    unknown = {_BETA: not family.scales_queries, _OF_SCORES: not family.scales_scores}
    return {key: ours for key, ours in _KEYS[kind].items() if not unknown.get(ours)}


def _attention_factor(found: Mapping[str, Any], given: Mapping[str, Any], name: str, source: Source) -> float:
    """rope_attention_factor of a file's factor, or of YaRN's mscale and mscale_all_dim; 0 where it is that of the
    paper."""
    stretched, stated = found["rope_scaling_factor"], found.get(_FACTOR)
    is_yarn = found["rope_scaling_type"] == "yarn"
    own = attention_factor_of(stretched) if is_yarn else longrope_attention_factor_of(stretched, found[_LENGTH])
    above, below = (checked(float | None, given.get(key), f"{name}.{key}", source) for key in _SCALES)
    if is_yarn and stated is None and above and below:
        stated = attention_factor_of(stretched, above) / attention_factor_of(stretched, below)
    if not stated or math.isclose(stated, own, rel_tol=1e-6):
        return 0.0
    return float(stated)


def _name_of_rope(content: Mapping[str, Any], source: Source) -> str:
    """The key that states the rotation: rope_parameters or rope_scaling.

    Two that differ are refused: transformers takes rope_scaling then and forgets all of rope_parameters, its base too.
    Nobody who adds one of the keys to a file with the other means that.
    """
    newer, older = content.get("rope_parameters"), content.get("rope_scaling")
    if newer and older and newer != older:
        first, second = (shown(json.dumps(each)) for each in (newer, older))
        raise source.refusal(
            f"rope_parameters is {first}, but rope_scaling is {second}, and transformers reads the latter alone",
            "move what rope_scaling says into rope_parameters, beside its rope_theta, and remove rope_scaling",
        )
    return "rope_parameters" if newer else "rope_scaling"


def write_rope(model: ModelConfig, family: Family) -> dict[str, Any]:
    """rope_scaling, beside rope_theta; every version of transformers reads both. Where layers with a window rotate by
    rope_theta too, rope_parameters is written as well, as transformers from 5.0 on reads rope_theta for the other
    layers alone."""
    kind = "default" if model.rope_scaling_type == "none" else model.rope_scaling_type
    scaling = {"rope_type": kind, **{key: getattr(model, ours) for key, ours in _keys_of(kind, family).items()}}
    if kind == "yarn":
        scaling["attention_factor"] = model.rope_attention_factor or None
    if "multi_latent_attention" in family.fixed and family.scales_queries:
        # Mistral 4 adds the share of rotated channels to these keys alone.
        return {"rope_parameters": {**scaling, "rope_theta": model.rotary_base}}
    unsaid = kind == "default" and not family.default_rope
    found: dict[str, Any] = {"rope_scaling": None if unsaid else scaling}
    if kind == "longrope":
        found = _write_longrope(model)
    if family.rope_layers not in ("", _SLIDING):
        found[family.rope_layers] = [int(not without) for without in model.layers_without_rope]
    own = model.sliding_rotary_base or model.rotary_base
    if "proportional" in family.rotations:
        share = {_SHARE: model.rotary_percent} if kind == "proportional" else {}
        found = {"rope_parameters": {_FULL: {**scaling, **share, "rope_theta": model.rotary_base}}}
        found["rope_parameters"][_SLIDING] = {"rope_type": "default", "rope_theta": own}
    elif family.sliding_base == "rope_theta":
        parts = {_FULL: {**scaling, "rope_theta": model.rotary_base}}
        found["rope_parameters"] = {**parts, _SLIDING: {"rope_type": "default", "rope_theta": own}}
    elif family.sliding_base:
        found[family.sliding_base] = own
    return found


def _write_longrope(model: ModelConfig) -> dict[str, Any]:
    """As Phi's models are published; before 5.0 transformers refuses a rope_scaling with other keys than three."""
    factors = {key: numbers_of(getattr(model, f"rope_{key}")) for key in _FACTORS}
    scaling: dict[str, Any] = {**factors, "type": "longrope"}
    factor, length = model.rope_scaling_factor, model.rope_original_max_position_embeddings
    if factor * length != model.max_position_embeddings:
        scaling["factor"] = factor
    if model.rope_attention_factor:
        scaling["attention_factor"] = model.rope_attention_factor
    return {"rope_scaling": scaling, "original_max_position_embeddings": length}


def _check_keys(given: Mapping[str, Any], kind: str, keys_of: Mapping[str, str], name: str, source: Source) -> None:
    """Refuse keys that would change an angle or its factor."""
    neutral = {_SHARE: given.get(_SHARE) if kind == "proportional" else 1.0, "truncate": True}
    for key, value in given.items():
        is_read = key in keys_of or key in _OTHER_KEYS or value is None
        # Without stretching nothing else is read, except which part of a head is rotated.
        is_read = is_read or (kind == "default" and key not in neutral)
        if not is_read and neutral.get(key) != value:
            raise source.refusal(
                f"{name}.{shown(key)[1:-1]} is {shown(value)}, which memo does not compute", "use a model without it"
            )
