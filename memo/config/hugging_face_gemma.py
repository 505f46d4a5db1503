"""Gemma 2, 3 and 4 (the models of text): norms around each block, scaled embeddings, windows, and caps of scores and
logits. Up to Gemma 3 norms multiply by 1 + weight. In Gemma 4 layers without a window have heads of their own."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from memo.artifacts.reading import Source, shown
from memo.config import hugging_face_tensors as tensors
from memo.config.hugging_face_family import NO_BIASES, SOFTCAPS, ConfigKeys, Family
from memo.config.hugging_face_shared import LLAMA, LLAMA_NAMES, RMS, TIED

_ALIKE = {**RMS, "norm_placement": "around", "apply_layernorm_1p": True, "scale_embeddings": True}
_NAMES = {**LLAMA_NAMES, **{name: name for name in ("query_pre_attn_scalar", *SOFTCAPS)}}

GEMMA3 = replace(
    LLAMA,
    architecture="Gemma3ForCausalLM",
    names=_NAMES,
    defaults={
        **TIED,
        "vocab_size": 262208,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 131072,
        "query_pre_attn_scalar": 256,
        "rope_theta": 1e6,
        "rope_local_base_freq": 10000.0,
        "hidden_activation": "gelu_pytorch_tanh",
    },
    biases=NO_BIASES,
    fixed={**_ALIKE, "qk_layernorm": True},
    activation="hidden_activation",
    only={"attention_bias": (False,), "use_bidirectional_attention": (False, None)},
    window="sliding_window",
    default_window=4096,
    layer_types=True,
    default_layer_types=(*["sliding_attention"] * 5, "full_attention"),
    layer_pattern="sliding_window_pattern",
    sliding_base="rope_local_base_freq",
    tensors=tensors.GEMMA3,
)
GEMMA2 = replace(
    GEMMA3,
    architecture="Gemma2ForCausalLM",
    defaults={
        **GEMMA3.defaults,
        "vocab_size": 256000,
        "max_position_embeddings": 8192,
        "rope_theta": 10000.0,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
    },
    fixed=_ALIKE,
    default_layer_types=("sliding_attention", "full_attention"),
    layer_pattern="",
    sliding_base="",
)
GEMMA4 = replace(
    GEMMA3,
    architecture="Gemma4ForCausalLM",
    names={
        **LLAMA_NAMES,
        "final_logit_softcapping": "final_logit_softcapping",
        "full_num_query_groups": "num_global_key_value_heads",
        "full_kv_channels": "global_head_dim",
    },
    defaults={
        **GEMMA3.defaults,
        "vocab_size": 262144,
        "num_global_key_value_heads": None,
        "global_head_dim": 512,
        "final_logit_softcapping": None,
        "hidden_size_per_layer_input": 256,
    },
    fixed={
        **RMS,
        "norm_placement": "around",
        "scale_embeddings": True,
        "qk_layernorm": True,
        "v_layernorm": True,
        "layer_scalar": True,
        "query_pre_attn_scalar": 1,
    },
    keys_as_values="attention_k_eq_v",
    only={
        "attention_bias": (False,),
        "use_bidirectional_attention": (None, "vision"),
        "hidden_size_per_layer_input": (0, None),
        "num_kv_shared_layers": (0, None),
    },
    experts_switch="enable_moe_block",
    names_of_experts={
        "num_experts": "num_experts",
        "moe_router_topk": "top_k_experts",
        "moe_ffn_hidden_size": "moe_intermediate_size",
    },
    default_window=512,
    layer_pattern="",
    rotations=("default", "proportional"),
    default_rope={"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
    tensors=tensors.GEMMA4,
)
GEMMA4_UNIFIED = replace(
    GEMMA4,
    architecture="Gemma4UnifiedForCausalLM",
    experts_switch="",
    defaults={**GEMMA4.defaults, "max_position_embeddings": 262144},
    only={key: GEMMA4.only[key] for key in ("attention_bias", "num_kv_shared_layers")}
    | {"use_bidirectional_attention": ("vision", None)},
    default_window=1024,
)


def of_gemma_4(keys: ConfigKeys, numbers: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of ModelConfig for the heads of layers without a window, and for experts beside the MLP; none for other
    families."""
    family, found = keys.family, dict[str, Any]()
    if family.keys_as_values:
        found["full_keys_as_values"] = keys.switch(family.keys_as_values)
        found["full_num_query_groups"] = numbers["full_num_query_groups"] * found["full_keys_as_values"]
    if family.experts_switch and keys.switch(family.experts_switch):
        found |= {ours: keys.number(ours, key) for ours, key in family.names_of_experts.items()}
        found |= {"moe_shared_expert_intermediate_size": numbers["ffn_hidden_size"], "moe_separate_norms": True}
    return found


def with_heads_of_full_layers(content: Mapping[str, Any], family: Family, source: Source) -> Mapping[str, Any]:
    """The file with the keys for the heads of layers without a window, which transformers writes, from 5.23 on, layer
    by layer."""
    by_layer = content.get("per_layer_config")
    if not (family.keys_as_values and by_layer):
        return content
    full = {str(layer) for layer, name in enumerate(content.get("layer_types") or ()) if name == "full_attention"}
    heads = list(by_layer.values()) if isinstance(by_layer, dict) else []
    names = {"head_dim": "global_head_dim", "num_key_value_heads": "num_global_key_value_heads"}
    if not heads or {*by_layer} != full or any(each != heads[0] for each in heads) or not {*heads[0]} <= {*names}:
        raise source.refusal(
            f"per_layer_config is {shown(str(by_layer))}",
            f"memo computes {family.architecture} with equal heads in all layers that are full_attention, and equal "
            "heads in the others; use another model",
        )
    own = {theirs: heads[0].get(name, content.get(name)) for name, theirs in names.items()}
    return {**{key: value for key, value in content.items() if key != "per_layer_config"}, **own}
