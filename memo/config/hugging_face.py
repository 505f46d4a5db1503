"""config.json of Hugging Face as a ModelConfig.

A family's modelling code reads a known set of fields. Those that say what memo computes are translated, those
that would change the mathematics must have the value that memo computes with, and the rest (dropout, caches,
token ids) changes no logit.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from memo.artifacts.fields import checked
from memo.artifacts.model_directory import model_file
from memo.artifacts.reading import Source, read_json_object, shown
from memo.config.hugging_face_rope import read_rope
from memo.config.model import ModelConfig
from memo.config.model_ranges import number_of_model
from memo.errors import ConfigError

CONFIG_FILE = "config.json"


@dataclass(frozen=True)
class Family:
    """One model_type.

    Attributes:
        architecture: the class that AutoModelForCausalLM picks.
        fixed: fields of ModelConfig that all its models share.
        names: our field -> theirs; the sizes among them must be in the file.
        defaults: their fields that a file may leave out -> what their class then takes.
        only: their fields -> the values that memo computes with.
    """

    architecture: str
    fixed: Mapping[str, Any]
    names: Mapping[str, str]
    defaults: Mapping[str, Any]
    only: Mapping[str, tuple[Any, ...]]
    biases: tuple[str, ...] = ()
    """Their switches that together are add_bias_linear."""
    activations: Mapping[str, str] = field(default_factory=lambda: {"silu": "swiglu", "swish": "swiglu"})
    activation_name: str = "hidden_act"
    window: Literal["", "sliding_window", "use_sliding_window"] = ""
    """The field that turns a sliding window on; empty: the family has none."""
    default_window: int | None = None


_NAMES = {
    "num_layers": "num_hidden_layers",
    "hidden_size": "hidden_size",
    "num_attention_heads": "num_attention_heads",
    "num_query_groups": "num_key_value_heads",
    "kv_channels": "head_dim",
    "ffn_hidden_size": "intermediate_size",
    "vocab_size": "vocab_size",
    "max_position_embeddings": "max_position_embeddings",
    "init_method_std": "initializer_range",
}
_RMS_NAMES = {**_NAMES, "norm_epsilon": "rms_norm_eps"}
_GPT2_NAMES = {
    "num_layers": "n_layer",
    "hidden_size": "n_embd",
    "num_attention_heads": "n_head",
    "ffn_hidden_size": "n_inner",
    "vocab_size": "vocab_size",
    "max_position_embeddings": "n_positions",
    "init_method_std": "initializer_range",
    "norm_epsilon": "layer_norm_epsilon",
}
_LLAMA = {
    "normalization": "RMSNorm",
    "activation": "swiglu",
    "position_embedding_type": "rope",
    "add_bias_linear": False,
    "add_qkv_bias": False,
    "qk_layernorm": False,
}
_DEFAULTS = {
    "num_key_value_heads": None,
    "head_dim": None,
    "rms_norm_eps": 1e-6,
    "initializer_range": 0.02,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
}
_ONLY: dict[str, tuple[Any, ...]] = {
    "quantization_config": (None,),
    "is_encoder_decoder": (False,),
    "partial_rotary_factor": (1.0, None),
}
_GELU = {"gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh"}
_HAS_BIAS_SWITCHES = {name: value for name, value in _LLAMA.items() if name != "add_bias_linear"}
_HAS_ACTIVATIONS = {name: value for name, value in _HAS_BIAS_SWITCHES.items() if name != "activation"}

FAMILIES = {
    "llama": Family(
        "LlamaForCausalLM", _HAS_BIAS_SWITCHES, _RMS_NAMES, _DEFAULTS, _ONLY, biases=("attention_bias", "mlp_bias")
    ),
    "mistral": Family(
        "MistralForCausalLM",
        _LLAMA,
        _RMS_NAMES,
        {**_DEFAULTS, "num_key_value_heads": 8},
        _ONLY,
        window="sliding_window",
        default_window=4096,
    ),
    "qwen2": Family(
        "Qwen2ForCausalLM",
        {**_LLAMA, "add_qkv_bias": True},
        _RMS_NAMES,
        _DEFAULTS,
        _ONLY,
        window="use_sliding_window",
    ),
    "qwen3": Family(
        "Qwen3ForCausalLM",
        {**_LLAMA, "qk_layernorm": True},
        _RMS_NAMES,
        {**_DEFAULTS, "head_dim": 128},
        {**_ONLY, "attention_bias": (False,)},
        window="use_sliding_window",
    ),
    "gpt2": Family(
        "GPT2LMHeadModel",
        {
            **_HAS_ACTIVATIONS,
            "normalization": "LayerNorm",
            "position_embedding_type": "learned_absolute",
            "add_bias_linear": True,
        },
        _GPT2_NAMES,
        {
            "n_inner": None,
            "layer_norm_epsilon": 1e-5,
            "initializer_range": 0.02,
            "tie_word_embeddings": True,
            "activation_function": "gelu_new",
        },
        {
            **_ONLY,
            "scale_attn_weights": (True,),
            "scale_attn_by_inverse_layer_idx": (False,),
            "add_cross_attention": (False,),
        },
        activations=_GELU,
        activation_name="activation_function",
    ),
    # The one family with LayerNorm and rotary positions: the paper's GPTs are written as it.
    "starcoder2": Family(
        "Starcoder2ForCausalLM",
        {**_HAS_ACTIVATIONS, "normalization": "LayerNorm"},
        {**_NAMES, "norm_epsilon": "norm_epsilon"},
        {
            "num_key_value_heads": 2,
            "head_dim": None,
            "norm_epsilon": 1e-5,
            "initializer_range": 0.018042,
            "tie_word_embeddings": True,
            "use_bias": True,
            "hidden_act": "gelu_pytorch_tanh",
        },
        _ONLY,
        biases=("use_bias",),
        activations=_GELU,
        window="sliding_window",
    ),
}


@dataclass(frozen=True)
class HuggingFaceModel:
    """What a config.json says.

    Attributes:
        model: the shape in memo's words.
        model_type: a key of FAMILIES.
        content: the file as it is.
    """

    model: ModelConfig
    model_type: str
    content: dict[str, Any]


def read_config(directory: str | Path) -> HuggingFaceModel:
    """The model of DIR/config.json.

    Raises ConfigError, naming the field, for a file that is missing or no JSON, an unknown architecture, and
    a field that asks for mathematics that memo does not do; CheckpointError for a link that leaves DIR.
    """
    path = Path(directory) / CONFIG_FILE
    model_file(directory, CONFIG_FILE)
    remedy = f"{download_hint(directory)}, or give a directory with {CONFIG_FILE}"
    content = read_json_object(path, Source(str(path), ConfigError, remedy))
    return HuggingFaceModel(model_of(content, str(path)), content["model_type"], content)


def download_hint(directory: str | Path, name: str = "ORG/NAME") -> str:
    """The command that fetches a model's files."""
    return f"download it with `hf download {name} --local-dir {directory}`"


def hub_name(text: str) -> bool:
    """Does it look like ORG/NAME, as models are called on the hub?"""
    return re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", text) is not None


def model_of(content: Mapping[str, Any], where: str) -> ModelConfig:
    """ModelConfig of the fields of a config.json; `where` begins the messages. Raises ConfigError."""
    source = Source(where, ConfigError, "correct the file")
    model_type = content.get("model_type")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise source.refusal(f"model_type is {shown(model_type)}", f"memo knows {', '.join(FAMILIES)}")
    family = FAMILIES[model_type]
    _check_only(content, family, source)
    _check_window(content, family, source)
    values: dict[str, Any] = dict(family.fixed)
    for ours, theirs in family.names.items():
        values[ours] = checked(number_of_model(ours), _get(content, family, theirs, source), theirs, source)
    tied = _get(content, family, "tie_word_embeddings", source)
    values["untie_embeddings_and_output_weights"] = not checked(bool | None, tied, "tie_word_embeddings", source)
    if family.biases:
        values["add_bias_linear"] = _bias(content, family, source)
    activation = _get(content, family, family.activation_name, source)
    if not isinstance(activation, str) or activation not in family.activations:
        raise source.refusal(
            f"{family.activation_name} is {shown(activation)}",
            f"memo computes {model_type} with {' or '.join(family.activations)}",
        )
    values["activation"] = family.activations[activation]
    if values["position_embedding_type"] == "rope":
        values |= read_rope(content, source)
    return ModelConfig(**values)


def _get(content: Mapping[str, Any], family: Family, name: str, source: Source) -> Any:
    if name in content:
        return content[name]
    if name in family.defaults:
        return family.defaults[name]
    raise source.refusal(f"{name} is missing", f"complete the file, as {family.architecture} needs it")


def _check_only(content: Mapping[str, Any], family: Family, source: Source) -> None:
    for name, accepted in family.only.items():
        value = content.get(name, accepted[0])
        if value not in accepted:
            found = "set" if isinstance(value, dict) else shown(value)
            raise source.refusal(
                f"{name} is {found}, but memo computes {family.architecture} only with {accepted[0]!r}",
                "use a model without it",
            )


def _check_window(content: Mapping[str, Any], family: Family, source: Source) -> None:
    """A window that no sequence outgrows changes nothing; Qwen's is a dead field unless switched on."""
    kinds = checked(list[str] | None, content.get("layer_types"), "layer_types", source) or []
    sliding = [kind for kind in kinds if kind != "full_attention"]
    if sliding:
        raise source.refusal(f"layer_types has {shown(sliding[0])}", "memo has full attention alone; use another model")
    window = content.get("sliding_window", family.default_window)
    if not family.window or window is None:
        return
    if family.window == "use_sliding_window":
        is_on = checked(bool | None, content.get(family.window), family.window, source)
        if is_on is False:
            return
    window = checked(int, window, "sliding_window", source)
    longest = checked(int | None, content.get("max_position_embeddings"), "max_position_embeddings", source)
    if window != 0 and (longest is None or window < longest):
        raise source.refusal(
            f"sliding_window is {window}, below max_position_embeddings {longest}",
            "memo has full attention alone; set sliding_window to null in the file if you train on sequences no "
            "longer than the window, where both are the same, or use a model without it",
        )


def _bias(content: Mapping[str, Any], family: Family, source: Source) -> bool:
    given = {name: content.get(name, family.defaults.get(name, False)) for name in family.biases}
    switches = {name: bool(checked(bool | None, value, name, source)) for name, value in given.items()}
    if len(set(switches.values())) > 1:
        first, second = switches.items()
        raise source.refusal(
            f"{first[0]} is {first[1]} and {second[0]} is {second[1]}",
            f"memo has biases on all linear layers or on none of {family.architecture}; use a model where both are "
            "the same",
        )
    return next(iter(switches.values()))
