"""A ModelConfig as a config.json that AutoModelForCausalLM loads."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from memo.config.hugging_face import HuggingFaceModel, model_of
from memo.config.hugging_face_families import TRAINED
from memo.config.hugging_face_family import TrainedFamily
from memo.config.hugging_face_rope import write_rope
from memo.config.model import FULL, LINEAR, SLIDING, ModelConfig
from memo.errors import ConfigError

_TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


def write_config(
    model: ModelConfig, num_positions: int, dtype: str | None, like: HuggingFaceModel | None = None
) -> HuggingFaceModel:
    """The content of a config.json.

    Args:
        model: with a known vocabulary.
        num_positions: the longest sequence the model is meant for; rows of a learned table.
        dtype: torch's name of the weights' dtype; None leaves it to `like`.
        like: the model this one was made from: kept as it is where it still says the same; else its family
            and its ids of special tokens are taken over.

    Raises ConfigError that names the fields when no family has this model.
    """
    if model.custom_layer:
        raise ConfigError(
            f"--custom-layer {model.custom_layer} is no architecture of Hugging Face, so this model cannot be "
            "exported: read its checkpoint with --load, or write a model class for transformers"
        )
    model_type = _family(model, like)
    family = TRAINED[model_type]
    content: dict[str, Any] = {
        "architectures": [family.architecture],
        "model_type": model_type,
        **_sizes(model, family, num_positions),
        **_switches(model, family),
        **dict.fromkeys(_TOKEN_IDS),
    }
    if like is not None:
        content |= {key: like.content[key] for key in _TOKEN_IDS if key in like.content}
        if like.model_type == model_type and _resolved(like.model) == _resolved(model_of(content, "config.json")):
            content = {key: value for key, value in like.content.items() if key not in ("dtype", "quantization_config")}
        dtype = dtype or like.content.get("dtype", like.content.get("torch_dtype"))
    if dtype is not None:
        content["torch_dtype"] = dtype
    if family.layers_beyond:
        content[family.layers_beyond] = 0
    wrapper = like.wrapper if like is not None and like.model_type == model_type else None
    return HuggingFaceModel(model_of(content, "config.json"), model_type, content, wrapper)


def _resolved(model: ModelConfig) -> ModelConfig:
    """With every size stated, so that equal models are equal."""
    return replace(model, num_query_groups=model.kv_heads, kv_channels=model.head_dim, ffn_hidden_size=model.ffn_size)


def _family(model: ModelConfig, like: HuggingFaceModel | None) -> str:
    """The family of `like` if it has this model, else the first one."""
    others = {name: _differences(model, family) for name, family in TRAINED.items()}
    first = [like.model_type] if like is not None else []
    for name in (*first, *others):
        if not others[name]:
            return name
    nearest = min(others, key=lambda name: len(others[name]))
    raise ConfigError(
        f"no architecture of Hugging Face that memo writes has this model: {TRAINED[nearest].architecture} is the "
        f"nearest, but {'; '.join(others[nearest])}: keep this model in memo's own checkpoints"
    )


def _differences(model: ModelConfig, family: TrainedFamily) -> list[str]:
    qkv, _, mlp = family.biases
    fixed = family.fixed
    if isinstance(mlp, bool):
        fixed["add_bias_linear"] = mlp
    if not model.add_bias_linear and not family.qkv_bias_switch:  # which include them
        fixed["add_qkv_bias"] = qkv is True and mlp is not True
    found = [
        f"{name} must be {value}, not {getattr(model, name)}"
        for name, value in fixed.items()
        if getattr(model, name) != value
    ]
    activations = dict.fromkeys(family.activations.values())
    if model.activation not in activations:
        found.append(f"activation must be {' or '.join(activations)}, not {model.activation}")
    if "num_query_groups" not in family.names and model.kv_heads != model.num_attention_heads:
        found.append(f"num_query_groups must be {model.num_attention_heads}, not {model.kv_heads}")
    has_experts = "num_experts" in family.names
    if bool(model.num_experts) != has_experts:
        found.append(f"num_experts must be {'above 0' if has_experts else '0'}, not {model.num_experts}")
    experts = model.layers_with_experts
    if list(experts) != sorted(experts) or (len(set(experts)) > 1 and not family.dense_first):
        layers = "zeros before ones" if family.dense_first else "empty"
        found.append(f"moe_layer_freq must be {layers}, not {model.moe_layer_freq}")
    if model.rotary_percent != 1 and "rotary_percent" not in family.names:
        found.append(f"rotary_percent must be 1, not {model.rotary_percent}")
    is_free = "moe_shared_expert_intermediate_size" in family.names
    if not is_free and model.shared_ffn_size and (not family.shared_experts or model.shared_ffn_size % model.mlp_size):
        sizes = f"a multiple of {model.mlp_size}" if family.shared_experts else "0"
        found.append(f"moe_shared_expert_intermediate_size must be {sizes}, not {model.shared_ffn_size}")
    if model.moe_router_pre_softmax and not family.renormalises:
        found.append("moe_router_pre_softmax must be off")
    if model.window_size and not family.window:
        found.append(f"window_size must be 0, not {model.window_size}")
    if (LINEAR in model.types_of_layers) != family.has_delta_nets:
        found.append(f"layer_types must {'' if family.has_delta_nets else 'not '}name {LINEAR}")
    if model.layer_types and not family.layer_types:
        found.append(f"layer_types must be empty, not {model.layer_types}")
    if "query_pre_attn_scalar" not in family.names and model.query_pre_attn_scalar not in (0, model.head_dim):
        found.append(f"query_pre_attn_scalar must be {model.head_dim}, not {model.query_pre_attn_scalar}")
    if model.sliding_rotary_base and not family.sliding_base:
        found.append(f"sliding_rotary_base must be 0, not {model.sliding_rotary_base}")
    is_stretched = model.window_size > 0 and not model.sliding_rotary_base and model.rope_scaling_type != "none"
    if family.sliding_base and is_stretched:
        found.append(f"rope_scaling_type must be none in layers with a window, not {model.rope_scaling_type}")
    usual = model.hidden_size // model.num_attention_heads
    if "kv_channels" not in family.names and model.head_dim != usual:
        found.append(f"kv_channels must be {usual}, not {model.head_dim}")
    return found


def _sizes(model: ModelConfig, family: TrainedFamily, num_positions: int) -> dict[str, Any]:
    resolved: Mapping[str, Any] = {
        "num_query_groups": model.kv_heads,
        "kv_channels": model.head_dim,
        "query_pre_attn_scalar": model.query_pre_attn_scalar or model.head_dim,
        "ffn_hidden_size": model.ffn_size if family.dense_first else model.mlp_size,
        "moe_ffn_hidden_size": model.mlp_size,
        "vocab_size": model.vocabulary,
        "max_position_embeddings": num_positions,
    }
    return {theirs: resolved.get(ours, getattr(model, ours)) for ours, theirs in family.names.items()}


def _switches(model: ModelConfig, family: TrainedFamily) -> dict[str, Any]:
    names = {ours: theirs for theirs, ours in reversed(list(family.activations.items()))}
    return {
        family.activation: names[model.activation],
        "tie_word_embeddings": not model.untie_embeddings_and_output_weights,
        **dict.fromkeys(family.bias_switches, model.add_bias_linear),
        **({family.renormalises: not model.moe_router_pre_softmax} if family.renormalises else {}),
        **({family.qk_norm_switch: model.qk_layernorm} if family.qk_norm_switch else {}),
        **({family.qkv_bias_switch: model.qkv_bias} if family.qkv_bias_switch else {}),
        **({family.dense_first: model.layers_with_experts.count(False)} if family.dense_first else {}),
        **({family.shared_experts: model.shared_ffn_size // model.mlp_size} if family.shared_experts else {}),
        **(write_rope(model, family) if model.position_embedding_type == "rope" else {}),
        **_window(model, family),
    }


def _window(model: ModelConfig, family: TrainedFamily) -> dict[str, Any]:
    # transformers makes the mask of a window for each such family, also where all layers are full.
    unused = family.default_window if family.default_layer_types else None
    found: dict[str, Any] = {"sliding_window": model.window_size or unused} if family.window else {}
    if family.window == "use_sliding_window" and model.window_size:
        found |= {"use_sliding_window": True, "max_window_layers": 0}
    if family.has_delta_nets:
        found |= {"linear_value_head_dim": model.linear_key_head_dim, "linear_conv_kernel_dim": 4}
    if model.layer_types or family.default_layer_types:  # which a file without them has
        alike = SLIDING if model.window_size else FULL
        types = model.types_of_layers if model.layer_types else (alike,) * model.num_layers
        found["layer_types"] = [f"{name}_attention" for name in types]
    return found
