"""Reads a config.json of Hugging Face as a `ModelShape`, with one short function for each family.

A key that the file leaves out has the default of the family's configuration class in transformers.
"""

import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from memo.artifacts.fields import checked
from memo.artifacts.reading import Source, read_json_object, shown
from memo.config.model_ranges import number_of_model
from memo.errors import ConfigError
from memo.spec.shapes import ModelShape

_NUMBERS = {
    "n_layer": "num_layers",
    "num_hidden_layers": "num_layers",
    "num_layers": "num_layers",
    "hidden_size": "hidden_size",
    "n_embd": "hidden_size",
    "n_embed": "hidden_size",
    "word_embed_proj_dim": "hidden_size",
    "n_head": "num_attention_heads",
    "num_attention_heads": "num_attention_heads",
    "num_heads": "num_attention_heads",
    "num_key_value_heads": "num_query_groups",
    "head_dim": "kv_channels",
    "ffn_dim": "ffn_hidden_size",
    "intermediate_size": "ffn_hidden_size",
    "n_inner": "ffn_hidden_size",
    "vocab_size": "vocab_size",
    "max_position_embeddings": "max_position_embeddings",
    "n_positions": "max_position_embeddings",
    "layer_norm_eps": "norm_epsilon",
    "layer_norm_epsilon": "norm_epsilon",
    "norm_epsilon": "norm_epsilon",
    "rms_norm_eps": "norm_epsilon",
    "rope_theta": "rotary_base",
}
"""{key of a config.json: the field of ModelConfig whose range applies to it}. Keys that no shape needs are checked as
well, because a file with such a value is damaged or of another kind."""


class _Keys:
    """Reads one config.json and checks its numbers; every refusal names file, key, value and remedy."""

    def __init__(self, source: Source, values: Mapping[str, Any]) -> None:
        """Raises ConfigError for a number outside of the range of its key."""
        self.source = source
        self.values = dict(values)
        for name, ours in _NUMBERS.items():
            if values.get(name) is not None:
                self.values[name] = checked(number_of_model(ours), values[name], name, source)

    def count(self, *names: str, default: int | None = None) -> int:
        """The value of the first of `names` that the file has and that is not null: a whole number above 0."""
        assert all(name in _NUMBERS for name in names), f"{names} are not checked"
        for name in names:
            if self.values.get(name) is not None:
                value: int = self.values[name]
                return value
        if default is None:
            raise self.source.refusal(f"{' or '.join(names)} is missing", "add it, a whole number above 0")
        return default

    def flag(self, name: str, default: bool) -> bool:
        value: bool | None = checked(bool | None, self.values.get(name), name, self.source)
        return default if value is None else value


def _share(keys: _Keys, whole: int, parts: int) -> int:
    """The size of one head where the file does not state it."""
    if whole % parts:
        raise keys.source.refusal(
            f"the hidden size {whole} does not divide into {parts} heads",
            "mend the one that is wrong, or state head_dim",
        )
    return whole // parts


_Sizes = tuple[int, int, int]
"""Layers, hidden size, attention heads."""


def _sizes(keys: _Keys) -> _Sizes:
    """The sizes under the keys that most families use."""
    return keys.count("num_hidden_layers"), keys.count("hidden_size"), keys.count("num_attention_heads")


def _gpt2_sizes(keys: _Keys) -> _Sizes:
    return keys.count("n_layer"), keys.count("n_embd"), keys.count("n_head")


def _shape(keys: _Keys, sizes: _Sizes, tied: bool, **fields: Any) -> ModelShape:
    """A shape from the keys that every family has and from `fields`.

    Unless `fields` say otherwise, there are as many key/value heads as heads, and heads divide the hidden size.
    """
    layers, hidden, heads = sizes
    given: dict[str, Any] = {
        "name": "",
        "layers": layers,
        "hidden": hidden,
        "heads": heads,
        "kv_heads": heads,
        "vocab": keys.count("vocab_size"),
        "tied": keys.flag("tie_word_embeddings", tied),
        **fields,
    }
    given["head_dim"] = given.get("head_dim") or _share(keys, hidden, heads)
    return ModelShape(**given)


def _llama_like(keys: _Keys, tied: bool = False, **fields: Any) -> ModelShape:
    """RMSNorm, gated MLP, RoPE and grouped key/value heads; `fields` or the file set biases and tied embeddings."""
    sizes = _sizes(keys)
    given: dict[str, Any] = {
        "kv_heads": keys.count("num_key_value_heads", default=sizes[2]),
        "head_dim": keys.count("head_dim", default=0),
        "ffn": keys.count("intermediate_size"),
        "gated": True,
        "norm_vectors": 1,
        "qkv_bias": False,
        "projection_bias": False,
        "mlp_bias": False,
        "rotary": True,
    }
    return _shape(keys, sizes, tied, **{**given, **fields})


def _llama(keys: _Keys) -> ModelShape:
    bias = keys.flag("attention_bias", False)
    mlp_bias = keys.flag("mlp_bias", False)
    # A gated MLP has two biases of f and one of h, which is what fc1_size and layer_replicated count.
    return _llama_like(keys, qkv_bias=bias, projection_bias=bias, mlp_bias=mlp_bias)


def _qwen3(keys: _Keys) -> ModelShape:
    bias = keys.flag("attention_bias", False)
    head_dim = keys.count("head_dim", default=128)
    return _llama_like(keys, qk_norm=True, qkv_bias=bias, projection_bias=bias, head_dim=head_dim)


def _mistral(keys: _Keys) -> ModelShape:
    return _llama_like(keys, kv_heads=keys.count("num_key_value_heads", default=8))


def _gemma(keys: _Keys) -> ModelShape:
    return _llama_like(keys, tied=True, head_dim=keys.count("head_dim", default=256))


def _gemma2(keys: _Keys) -> ModelShape:
    return _llama_like(keys, tied=True, head_dim=keys.count("head_dim", default=256), norms_per_layer=4)


def _gpt2(keys: _Keys, kv_heads: int = 0) -> ModelShape:
    sizes = _gpt2_sizes(keys)
    return _shape(
        keys,
        sizes,
        tied=True,
        kv_heads=kv_heads or sizes[2],
        ffn=keys.count("n_inner", default=4 * sizes[1]),
        positions=keys.count("n_positions", default=1024),
    )


def _gpt_bigcode(keys: _Keys) -> ModelShape:
    """Multi-query attention has a single key/value head."""
    return _gpt2(keys, kv_heads=1 if keys.flag("multi_query", True) else 0)


def _opt(keys: _Keys) -> ModelShape:
    """Position ids start at 2, so the table has two more rows; embeddings narrower than the hidden size are projected
    before and after the layers."""
    sizes = _sizes(keys)
    width = keys.count("word_embed_proj_dim", default=sizes[1])
    bias = keys.flag("enable_bias", True)
    norms_first = keys.flag("do_layer_norm_before", True)
    return _shape(
        keys,
        sizes,
        tied=True,
        ffn=keys.count("ffn_dim"),
        qkv_bias=bias,
        projection_bias=bias,
        mlp_bias=bias,
        norm_vectors=2 if keys.flag("layer_norm_elementwise_affine", True) else 0,
        positions=keys.count("max_position_embeddings", default=2048) + 2,
        embedding_width=width,
        final_norm=norms_first and not keys.flag("_remove_final_layer_norm", False),
        extra=0 if width == sizes[1] else width * sizes[1],  # the projection after the layers
    )


def _gpt_neox(keys: _Keys) -> ModelShape:
    sizes = _sizes(keys)
    bias = keys.flag("attention_bias", True)
    return _shape(
        keys,
        sizes,
        tied=False,
        ffn=keys.count("intermediate_size"),
        qkv_bias=bias,
        projection_bias=bias,
        rotary=True,
    )


def _bloom(keys: _Keys) -> ModelShape:
    sizes = (
        keys.count("n_layer", "num_hidden_layers"),
        keys.count("hidden_size", "n_embed"),
        keys.count("n_head", "num_attention_heads"),
    )
    return _shape(
        keys,
        sizes,
        tied=True,
        ffn=4 * sizes[1],
        embedding_norm=True,
    )


def _codegen(keys: _Keys) -> ModelShape:
    """Attention and MLP have the same normed input; the head has a bias."""
    sizes = _gpt2_sizes(keys)
    return _shape(
        keys,
        sizes,
        tied=False,
        ffn=keys.count("n_inner", default=4 * sizes[1]),
        norms_per_layer=1,
        qkv_bias=False,
        projection_bias=False,
        head_bias=True,
        rotary=True,
    )


def _gpt_neo(keys: _Keys) -> ModelShape:
    sizes = keys.count("num_layers"), keys.count("hidden_size"), keys.count("num_heads")
    return _shape(
        keys,
        sizes,
        tied=True,
        ffn=keys.count("intermediate_size", default=4 * sizes[1]),
        qkv_bias=False,
        positions=keys.count("max_position_embeddings", default=2048),
    )


def _biogpt(keys: _Keys) -> ModelShape:
    sizes = _sizes(keys)
    return _shape(
        keys,
        sizes,
        tied=True,
        ffn=keys.count("intermediate_size"),
        positions=keys.count("max_position_embeddings", default=1024) + 2,
    )


FAMILIES: dict[str, Callable[[_Keys], ModelShape]] = {
    "llama": _llama,
    "mistral": _mistral,
    "qwen2": lambda keys: _llama_like(keys, qkv_bias=True),
    "qwen3": _qwen3,
    "phi3": _llama_like,
    "gemma": _gemma,
    "gemma2": _gemma2,
    "gpt2": _gpt2,
    "gpt_bigcode": _gpt_bigcode,
    "opt": _opt,
    "gpt_neox": _gpt_neox,
    "bloom": _bloom,
    "codegen": _codegen,
    "gpt_neo": _gpt_neo,
    "biogpt": _biogpt,
}
"""By `model_type` of the file."""


def shape_from_hf(values: Mapping[str, Any], name: str) -> ModelShape:
    """The shape that the keys of a config.json describe; `name` is the name of the shape, and of the file in messages.

    Raises ConfigError for an unknown model_type, a missing key, a value of the wrong type and a number out of range.
    """
    source = Source(name, ConfigError, "correct the file")
    family = values.get("model_type")
    if not isinstance(family, str) or family not in FAMILIES:
        raise source.refusal(f"model_type is {shown(family)}, which has no rules here", f"use {', '.join(FAMILIES)}")
    shape = FAMILIES[family](_Keys(source, values))
    if shape.heads % shape.kv_heads:
        raise source.refusal(
            f"{shape.heads} attention heads do not divide into {shape.kv_heads} key/value heads",
            "mend num_key_value_heads",
        )
    return replace(shape, name=name)


def read_hf_config(path: str | Path) -> ModelShape:
    """Read a config.json, or the one in a directory. Raises the ConfigErrors of `shape_from_hf`, and one for a file
    that cannot be read."""
    file = Path(path)
    if os.path.isdir(file):
        file = file / "config.json"
    source = Source(str(file), ConfigError, "give the path of a config.json of Hugging Face")
    return shape_from_hf(read_json_object(file, source), str(file))
