"""A ModelConfig as a config.json that AutoModelForCausalLM loads.

A family can express a model if its file, read again by memo.config.hugging_face, gives the same function. So reading
and writing share one table of what a family can say.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from memo.config.hugging_face import CONFIG_FILE, HuggingFaceModel, model_of
from memo.config.hugging_face_families import TRAINED
from memo.config.hugging_face_family import MLP_TYPES, SOFTCAPS, Family, mlp_types
from memo.config.hugging_face_rope import write_rope
from memo.config.identity import Fact, model_facts
from memo.config.layer_words import FULL, LINEAR, SLIDING
from memo.config.model import CHOICES_OF_TRAINED, ModelConfig
from memo.errors import ConfigError

_TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
_OF_FULL_LAYERS = ("full_num_query_groups", "full_kv_channels", "full_keys_as_values")
_OF_TRAINING = (*CHOICES_OF_TRAINED, "lora_alpha", "lora_use_rslora")


def write_config(
    model: ModelConfig, num_positions: int, dtype: str | None, like: HuggingFaceModel | None = None
) -> HuggingFaceModel:
    """The content of a config.json.

    Args:
        model: with a known vocabulary.
        num_positions: the longest sequence the model is meant for; rows of a learned table.
        dtype: torch's name of the weights' dtype; None leaves it to `like`.
        like: the model from which this one was made. Its file is kept as it is where it still says the same; else
            its family and its ids of special tokens are kept.

    Raises ConfigError that names the fields when no family has this model.
    """
    if model.custom_layer:
        raise ConfigError(
            f"--custom-layer {model.custom_layer} is no architecture of Hugging Face, so this model cannot be "
            "exported: read its checkpoint with --load, or write a model class for transformers"
        )
    model = replace(model, max_position_embeddings=num_positions)
    model_type = _family(model, like)
    content = {**_content(model, model_type), **dict.fromkeys(_TOKEN_IDS)}
    if like is not None:
        content |= {key: like.content[key] for key in _TOKEN_IDS if key in like.content}
        if like.model_type == model_type and _facts(like.model) == _facts(model):
            kept = {key: value for key, value in like.content.items() if key not in ("dtype", "quantization_config")}
            content = {**kept, "architectures": kept.get("architectures") or content["architectures"]}
        dtype = dtype or like.content.get("dtype", like.content.get("torch_dtype"))
    if dtype is not None:
        content["torch_dtype"] = dtype
    if TRAINED[model_type].layers_beyond:
        content[TRAINED[model_type].layers_beyond] = 0
    wrapper = like.wrapper if like is not None and like.model_type == model_type else None
    return HuggingFaceModel(model_of(content, CONFIG_FILE), model_type, content, wrapper)


def _family(model: ModelConfig, like: HuggingFaceModel | None) -> str:
    """The family of `like` if it can express this model, else the first that can."""
    others = {name: _differences(model, name) for name in TRAINED}
    first = [like.model_type] if like is not None else []
    for name in (*first, *others):
        if not others[name]:
            return name
    nearest = min(others, key=lambda name: len(others[name]))
    raise ConfigError(
        f"no architecture of Hugging Face that memo writes has this model: {TRAINED[nearest].architecture} is the "
        f"nearest, but {'; '.join(filter(None, others[nearest]))}: keep this model in memo's own checkpoints"
    )


def _differences(model: ModelConfig, model_type: str) -> list[str]:
    """Fields in which a file of this family would differ from the model, as clauses of a message; empty texts for
    fields that the family's model does not read."""
    ours = _facts(model)
    try:
        read = model_of(_content(model, model_type), CONFIG_FILE)
    except ConfigError as error:
        return [str(error), *[""] * len(ours)]
    theirs = _facts(read)

    def told(of: ModelConfig, facts: Mapping[str, Fact], name: str) -> object:
        return getattr(of, name) or facts[name] or ("empty" if facts[name] == "" else facts[name])

    needs_experts = not model.num_experts and "num_experts" in TRAINED[model_type].names
    return ["num_experts must be above 0, not 0"] * needs_experts + [
        f"{name} must be {told(read, theirs, name)}, not {told(model, ours, name)}" if name in theirs else ""
        for name in ours
        if name not in theirs or ours[name] != theirs[name]
    ]


def _facts(model: ModelConfig) -> dict[str, Fact]:
    """{field: value} that decide the function of a model, every default resolved."""
    types, positions = set(model.types_of_layers), model.max_position_embeddings
    if len(types) > 1 and not model.sliding_rotary_base and model.window_size >= (positions or model.window_size + 1):
        model = replace(model, window_size=0, layer_types="")  # the window leaves out nothing
    plain = model.rotary_base if model.rope_scaling_type == "none" else 0.0
    resolved = {
        "ffn_hidden_size": model.mlp_size if all(model.layers_with_experts) else model.ffn_size,
        "moe_ffn_hidden_size": model.mlp_size,
        "query_pre_attn_scalar": 0 if model.query_pre_attn_scalar == model.head_dim else model.query_pre_attn_scalar,
        "sliding_rotary_base": (model.sliding_rotary_base or plain) if model.layer_types else 0.0,
        "max_position_embeddings": positions or 0,
    }
    unsaid = {*_OF_TRAINING, *(name for name in _OF_FULL_LAYERS if not getattr(model, name))}
    return {name: value for name, value in {**model_facts(model), **resolved}.items() if name not in unsaid}


def _content(model: ModelConfig, model_type: str) -> dict[str, Any]:
    """The file of a family that is nearest to the model."""
    family = TRAINED[model_type]
    has_experts = bool(family.experts_switch and model.num_experts)
    of_mlp = model.ffn_size if family.dense_first else model.mlp_size
    resolved: Mapping[str, Any] = {
        "num_query_groups": model.kv_heads,
        "kv_channels": model.head_dim,
        "full_kv_channels": model.of_full_layers.head_dim,
        "full_num_query_groups": model.full_num_query_groups or None,
        "query_pre_attn_scalar": model.query_pre_attn_scalar or model.head_dim,
        "ffn_hidden_size": model.shared_ffn_size if has_experts else of_mlp,
        "moe_ffn_hidden_size": model.mlp_size,
        "vocab_size": model.vocabulary,
        **{name: getattr(model, name) or None for name in SOFTCAPS},
    }
    activations = {ours: theirs for theirs, ours in reversed(list(family.activations.items()))}
    dense = model.layers_with_experts.count(False)
    names = {**family.names, **(family.names_of_experts if has_experts else {})}
    switches = {
        family.renormalises: not model.moe_router_pre_softmax,
        family.qk_norm_switch: model.qk_layernorm,
        family.keys_as_values: model.full_keys_as_values,
        family.experts_switch: has_experts,
        family.qkv_bias_switch: model.qkv_bias,
        family.dense_first: mlp_types(dense, model.num_layers) if family.dense_first == MLP_TYPES else dense,
        family.shared_experts: model.shared_ffn_size // model.mlp_size,
    }
    return {
        "architectures": [family.architecture],
        "model_type": model_type,
        **{theirs: resolved.get(ours, getattr(model, ours)) for ours, theirs in names.items()},
        family.activation: activations.get(model.activation, next(iter(family.activations))),
        "tie_word_embeddings": not model.untie_embeddings_and_output_weights,
        **dict.fromkeys(family.bias_switches, model.add_bias_linear),
        **{key: values[0] for key, values in family.only.items() if family.defaults.get(key, values[0]) not in values},
        **{key: value for key, value in switches.items() if key},
        **(write_rope(model, family) if family.has_rope else {}),
        **_window(model, family),
    }


def _window(model: ModelConfig, family: Family) -> dict[str, Any]:
    # In families with default_layer_types transformers makes the mask of a window also where all layers are full;
    # where RoPE depends on the window, a file without windows has null.
    unused = family.default_window if family.default_layer_types and not family.rope_layers else None
    found: dict[str, Any] = {"sliding_window": model.window_size or unused} if family.window else {}
    if family.window == "use_sliding_window" and model.window_size:
        found |= {"use_sliding_window": True, "max_window_layers": 0}
    if family.has_delta_nets:
        found |= {"linear_value_head_dim": model.linear_key_head_dim, "linear_conv_kernel_dim": 4}
    alike = SLIDING if model.window_size else FULL
    types = model.types_of_layers if model.layer_types else (alike,) * model.num_layers
    says_types = model.layer_types or family.default_layer_types  # a file without types has the default ones
    if family.layer_types and says_types and (LINEAR in types) == family.has_delta_nets:
        found["layer_types"] = [f"{name}_attention" for name in types]
    return found
