"""Reads a config.json of Hugging Face, by the table in memo/config/hugging_face_families.py.

    model_of        of models that memo trains: a ModelConfig, or a refusal of mathematics that memo does not do
    counted_model   of models that memo counts and plans for: the nearest ModelConfig, and what it does not say

A family's modelling code reads a known set of keys. Keys that say what memo computes are translated. Keys that would
change the mathematics must have the value with which memo computes. All other keys (dropout, caches, token ids) change
no logit.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import cycle, islice
from pathlib import Path
from typing import Any

from memo.artifacts.fields import Count, checked
from memo.artifacts.model_directory import model_file
from memo.artifacts.reading import Source, read_json_object, shown
from memo.config.hugging_face_families import FAMILIES, TRAINED
from memo.config.hugging_face_family import MLP_TYPES, Biases, ConfigKeys, Family, as_field, mlp_types, period_of
from memo.config.hugging_face_gemma import of_gemma_4, with_heads_of_full_layers
from memo.config.hugging_face_rope import read_rope, without_rope
from memo.config.hugging_face_wrappers import WRAPPERS, in_wrapper, is_wrapper, text_of
from memo.config.layer_words import FULL, LINEAR, SLIDING
from memo.config.model import ModelConfig
from memo.errors import ConfigError

CONFIG_FILE = "config.json"
SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
"""Names the files of the weights where there are several."""
_ONLY: dict[str, tuple[Any, ...]] = {
    "is_encoder_decoder": (False,),
    "is_causal": (True,),
    "per_layer_config": (None, {}),
    "partial_rotary_factor": (1.0, None),
}
"""As `Family.only`, for every family."""
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
"""Keys by which files of several families say that they are mixtures of experts."""


@dataclass(frozen=True)
class HuggingFaceModel:
    """A config.json, and the model that it describes.

    Attributes:
        model: the shape in memo's words.
        model_type: a key of TRAINED.
        content: the keys of the model of text.
        wrapper: the whole file, where the model of text lies in a larger model that sees images.
    """

    model: ModelConfig
    model_type: str
    content: dict[str, Any]
    wrapper: dict[str, Any] | None = None

    @property
    def file(self) -> dict[str, Any]:
        """The content of the config.json."""
        return self.content if self.wrapper is None else in_wrapper(self.content, self.wrapper)


def read_config(directory: str | Path) -> HuggingFaceModel:
    """The model of DIR/config.json.

    Raises ConfigError, naming the field, for a file that is missing or no JSON, an unknown architecture, and
    a field that asks for mathematics that memo does not do; CheckpointError for a link that leaves DIR.
    """
    path = Path(directory) / CONFIG_FILE
    if model_file(directory, CONFIG_FILE) is None and (other := other_format(directory)):
        raise ConfigError(f"{directory}: {other}")
    remedy = f"{download_hint(directory)}, or give a directory with {CONFIG_FILE}"
    content = read_json_object(path, Source(str(path), ConfigError, remedy))
    text, wrapper = dict(text_of(content)), content if is_wrapper(content) else None
    return HuggingFaceModel(model_of(content, str(path)), text["model_type"], text, wrapper)


def has_weights(directory: str | Path) -> bool:
    """Whether DIR has the file of its weights, or the index of several files, which may be missing.

    Raises CheckpointError for a link that leaves DIR.
    """
    return any(model_file(directory, name) is not None for name in (SINGLE_FILE, INDEX_FILE))


def download_hint(directory: str | Path, name: str = "ORG/NAME") -> str:
    """The command that fetches a model's files."""
    return f"download it with `hf download {name} --local-dir {directory}`"


def other_format(path: str | Path) -> str:
    """A message that says what a file, or a directory without a whole model, is instead, and what works; empty if
    unknown."""
    path = Path(path)
    if (path / "adapter_config.json").exists():
        return (
            "that is an adapter of PEFT, without the weights of its model: give that model, and --lora-checkpoint "
            f"{path} to train the adapter, or merge the two in Python, "
            f"AutoPeftModelForCausalLM.from_pretrained({str(path)!r}).merge_and_unload()"
            ".save_pretrained('MERGED'), and give MERGED"
        )
    if path.suffix == ".gguf" or (path.is_dir() and any(path.glob("*.gguf"))):
        return (
            "that is a model in GGUF, which llama.cpp runs, and memo reads *.safetensors with their config.json: give "
            "the model that it was made from, which `hf download ORG/NAME --local-dir DIR` fetches"
        )
    return ""


_SUFFIX = "_attention"
_FULL, _SLIDING, _LINEAR = FULL + _SUFFIX, SLIDING + _SUFFIX, LINEAR + _SUFFIX
_FULL_LAYERS_OF_QWEN = 28
"""max_window_layers of a file that states none (Qwen2Config and Qwen3Config of transformers)."""
_SHORT = (
    "; if you train on sequences no longer than the window, where both are the same, set sliding_window to null in the "
    "file and leave out layer_types"
)
"""A remedy where layers with the window have nothing else of their own."""


def hub_name(text: str) -> bool:
    """Whether `text` looks like ORG/NAME, as models are called on the hub."""
    return re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", text) is not None


def _is_read(quantised: object, model_type: str) -> bool:
    """Whether memo can dequantise the weights: gpt-oss's MXFP4, NF4 of bitsandbytes, and FP8 with scales of blocks."""
    if not isinstance(quantised, dict):
        return False
    method = quantised.get("quant_method")
    if method == "bitsandbytes":
        return quantised.get("load_in_4bit") is True and quantised.get("bnb_4bit_quant_type") == "nf4"
    return method == "fp8" or (TRAINED[model_type].packed and method == "mxfp4")


def model_of(content: Mapping[str, Any], where: str) -> ModelConfig:
    """ModelConfig of the fields of a config.json; `where` begins the messages. Raises ConfigError."""
    source, content = Source(where, ConfigError, "correct the file"), text_of(content)
    model_type = content.get("model_type")
    if not isinstance(model_type, str) or model_type not in TRAINED:
        alone = "; `memo plan` and `memo estimate` alone know this one" if model_type in tuple(FAMILIES) else ""
        raise source.refusal(
            f"model_type is {shown(model_type)}{_kind(content)}",
            f"memo knows {', '.join(TRAINED)}, and the text of {', '.join(WRAPPERS)}{alone}: give a model of one of "
            "these, or train new weights with a layer of your own, --custom-layer (docs/custom_model.md)",
        )
    quantised = content.get("quantization_config")
    if quantised is not None and not _is_read(quantised, model_type):
        raise source.refusal(
            "quantization_config is set, but memo trains weights that are not quantised, or read from NF4 of "
            "bitsandbytes or from FP8 with a scale for each block",
            "download the model that it was made from, whose name mostly lacks GPTQ, AWQ, 4bit and the like, or ends "
            "with BF16",
        )
    family = TRAINED[model_type]
    keys = ConfigKeys(with_heads_of_full_layers(content, family, source), family, source)
    _check_only(keys.content, family, source)
    model, biases = _read(keys)
    model = replace(model, **_layers(keys, model.num_layers))
    length = family.names["max_position_embeddings"]
    if keys.get(length) is None and not {length, family.aliases.get(length)} & set(content):  # null: no length
        raise keys.missing("max_position_embeddings", length)
    _check_biases(keys, biases, family)
    activation = keys.get(family.activation)
    if not isinstance(activation, str) or activation not in family.activations:
        raise source.refusal(
            f"{family.activation} is {shown(activation)}",
            f"memo computes {model_type} with {' or '.join(family.activations)}",
        )
    rope = {**read_rope(keys, model), **without_rope(keys, model)} if family.has_rope else {}
    return replace(model, activation=family.activations[activation], **rope)


def counted_model(content: Mapping[str, Any], where: str) -> tuple[ModelConfig, dict[str, Any]]:
    """The ModelConfig nearest to the fields of a config.json, and the facts that it cannot express, as fields of
    `memo.spec.shapes.ModelShape`; `where` begins the messages.

    Raises ConfigError for an unknown model_type, a missing key, a value of the wrong type and a number out of range.
    """
    source, content = Source(where, ConfigError, "correct the file"), text_of(content)
    family = content.get("model_type")
    if not isinstance(family, str) or family not in FAMILIES:
        raise source.refusal(
            f"model_type is {shown(family)}{_kind(content)}, which has no rules here",
            f"use {', '.join(FAMILIES)}, or plan for a preset of about its size",
        )
    keys = ConfigKeys(content, FAMILIES[family], source)
    model, biases = _read(keys)
    if keys.family.has_delta_nets or keys.family.keys_as_values:
        model = replace(model, **_layers(keys, model.num_layers))
    own = {"qkv_bias": biases.qkv, "projection_bias": biases.projection, "mlp_bias": biases.mlp}
    return model, {**own, **keys.family.beyond(keys, model)}


def _kind(content: Mapping[str, Any]) -> str:
    """A clause about a model of a family that memo does not know: text with images, or a mixture of experts."""
    if "text_config" in content:
        return ", a model of text with something else, such as images"
    key = next((key for key in _EXPERTS if content.get(key)), None)
    return "" if key is None else f", a mixture of experts ({key} {shown(content[key])})"


def _read(keys: ConfigKeys) -> tuple[ModelConfig, Biases]:
    """The nearest ModelConfig, and which biases the model has. Raises ConfigError for a value that no model has."""
    family = keys.family
    numbers = {ours: keys.number(ours, key) for ours, key in family.names.items()}
    if family.one_kv_head and keys.switch(family.one_kv_head):
        numbers["num_query_groups"] = 1
    if family.spare_positions:
        numbers["max_position_embeddings"] += family.spare_positions
    channels = keys.optional(int, family.rotary_channels) if family.rotary_channels else None
    if channels is not None and keys.content.get(family.names["rotary_percent"]) is None:
        share = channels / numbers["kv_channels"]
        numbers["rotary_percent"] = as_field("rotary_percent", share, family.rotary_channels, keys.source)
    biases = Biases(*(keys.switch(each) if isinstance(each, str) else each for each in family.biases))
    on_all = bool(biases.projection and biases.mlp)
    model = ModelConfig(
        **{**numbers, **_layers_and_shared(keys, numbers)},
        **family.fixed,
        activation="swiglu" if family.gated else "gelu",
        untie_embeddings_and_output_weights=not keys.switch("tie_word_embeddings"),
        add_bias_linear=on_all,
        add_qkv_bias=bool(biases.qkv) and not on_all,
        moe_router_pre_softmax=bool(family.renormalises) and not keys.switch(family.renormalises),
    )
    heads, hidden = model.num_attention_heads, model.hidden_size
    if model.num_experts and model.moe_router_topk > model.num_experts:
        raise keys.source.refusal(
            f"each token runs through {model.moe_router_topk} of {model.num_experts} experts",
            "mend num_experts_per_tok",
        )
    if model.kv_channels is None and hidden % heads and not model.multi_latent_attention:
        raise keys.source.refusal(
            f"the hidden size {hidden} does not divide into {heads} heads",
            "mend the one that is wrong, or state head_dim",
        )
    if heads % model.kv_heads:
        raise keys.source.refusal(
            f"{heads} attention heads do not divide into {model.kv_heads} key/value heads", "mend num_key_value_heads"
        )
    return model, biases


def _layers_and_shared(keys: ConfigKeys, numbers: Mapping[str, Any]) -> dict[str, Any]:
    """Fields that each family states in its own way: layers with experts, shared experts, norms and kinds of heads."""
    family, found = keys.family, of_gemma_4(keys, numbers)
    if family.qk_norm_switch:
        found["qk_layernorm"] = keys.switch(family.qk_norm_switch)
    if family.dense_first:
        layers = numbers["num_layers"]
        if dense := _dense_layers(keys, layers):  # else --num-layers alone makes a smaller model
            parts = ((0, dense), (1, layers - dense))
            found["moe_layer_freq"] = "+".join(f"[{n}]*{count}" for n, count in parts if count)
    if family.shared_experts:
        count = checked(Count, keys.get(family.shared_experts), family.shared_experts, keys.source)
        what, width = f"{family.shared_experts} x moe_intermediate_size", count * numbers["moe_ffn_hidden_size"]
        ours = "moe_shared_expert_intermediate_size"
        found[ours] = as_field(ours, width, what, keys.source)
    return found


def _dense_layers(keys: ConfigKeys, layers: int) -> int:
    """The number of first layers without experts."""
    key = keys.family.dense_first
    if key != MLP_TYPES:
        return min(layers, checked(Count, keys.get(key), key, keys.source))
    words = keys.optional(list[str], key)
    dense = 1 if words is None else [*words, "sparse"].index("sparse")
    if words is not None and words != mlp_types(dense, layers):
        raise keys.source.refusal(
            f"{key} is {shown(words)}", f"give {layers} words, 'dense' for first layers and then 'sparse'"
        )
    return dense


def _check_only(content: Mapping[str, Any], family: Family, source: Source) -> None:
    for name, accepted in {**_ONLY, **family.only}.items():
        if name in family.names.values():
            continue
        unsaid = family.defaults.get(name, accepted[0]) if name in family.only else accepted[0]
        value = content.get(name, unsaid)
        if value not in accepted:
            found = "set" if isinstance(value, dict) else shown(value)
            raise source.refusal(
                f"{name} is {found}, but memo computes {family.architecture} only with {accepted[0]!r}",
                "use a model without it",
            )


def _layers(keys: ConfigKeys, layers: int) -> dict[str, Any]:
    """window_size and layer_types of ModelConfig, as far as they are not the defaults. Keys that a file leaves out have
    the defaults of transformers."""
    family, source = keys.family, keys.source
    special = _LINEAR if family.has_delta_nets else _SLIDING
    kinds = keys.optional(list[str], "layer_types") or []
    window = (keys.optional(int, "sliding_window") if "sliding_window" in keys.content else family.default_window) or 0
    window = 0 if family.has_delta_nets else window
    if family.window == "use_sliding_window":
        is_on, first = keys.optional(bool, family.window), keys.optional(int, "max_window_layers")
        full = layers if not (is_on and window) else _FULL_LAYERS_OF_QWEN if first is None else first
        kinds = kinds or [_FULL] * min(full, layers) + [_SLIDING] * (layers - full)
    elif family.has_delta_nets or (family.window and (window or family.sliding_base)):
        pattern = None if kinds else keys.optional(int, family.layer_pattern)
        default = [*[special] * (pattern - 1), _FULL] if pattern else family.default_layer_types or [special]
        kinds = kinds or list(islice(cycle(default), layers))
    found, longest = set(kinds) or {_FULL}, keys.optional(int, "max_position_embeddings")
    types = ",".join(name.removesuffix(_SUFFIX) for name in period_of(kinds))
    if family.has_delta_nets:
        key, value = (keys.content.get(f"linear_{of}_head_dim", 128) for of in ("key", "value"))
        if key != value:
            raise source.refusal(
                f"linear_key_head_dim is {shown(key)} and linear_value_head_dim {shown(value)}",
                "memo computes gated delta nets whose heads of keys and values are of one size; use another model",
            )
        if found == {_LINEAR, _FULL} and len(kinds) == layers:
            return {"layer_types": types}
    elif family.window and found == {_SLIDING} and window > 0:
        return {"window_size": window}
    elif not (window and family.rope_layers == _SLIDING) and (
        found == {_FULL} or (family.window and longest and window >= longest and not family.sliding_base)
    ):
        return {}
    elif family.window and window > 0 and family.layer_types and found == {_FULL, _SLIDING} and len(kinds) == layers:
        return {"window_size": window, "layer_types": types}
    both = f"that are {special} or {_FULL}{', at least one of each' if family.has_delta_nets else ''}"
    raise source.refusal(
        f"layers have {' and '.join(map(shown, sorted(found)[:2]))}, with a sliding_window of {shown(window or None)}",
        f"memo computes {layers} layers of {family.architecture} {both if family.layer_types else 'that are all alike'}"
        + (", with one window" if family.window else ", without a window")
        + ("" if family.sliding_base or family.rope_layers == _SLIDING or family.has_delta_nets else _SHORT)
        + "; use another model",
    )


def _check_biases(keys: ConfigKeys, biases: Biases, family: Family) -> None:
    if biases.projection == biases.mlp:
        return
    first, second = ((name, keys.switch(name)) for name in family.bias_switches[-2:])
    raise keys.source.refusal(
        f"{first[0]} is {first[1]} and {second[0]} is {second[1]}",
        f"memo has biases on all linear layers or on none of {family.architecture}; use a model where both are "
        "the same",
    )
