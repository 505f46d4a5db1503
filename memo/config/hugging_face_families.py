"""The families of models of Hugging Face: the one table of what the keys of a config.json mean.

A family with an architecture is trained, imported and exported, unless a file asks for mathematics that memo does not
do; the others can be counted and planned for.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from memo.config import hugging_face_tensors as tensors
from memo.config.hugging_face_family import ALL_BIASES, NO_BIASES, Biases, ConfigKeys, Family
from memo.config.model import ModelConfig

_SIZES = {
    "num_layers": "num_hidden_layers",
    "hidden_size": "hidden_size",
    "num_attention_heads": "num_attention_heads",
    "ffn_hidden_size": "intermediate_size",
    "vocab_size": "vocab_size",
    "max_position_embeddings": "max_position_embeddings",
}
_ROPE_NAMES = {
    **_SIZES,
    "num_query_groups": "num_key_value_heads",
    "kv_channels": "head_dim",
    "init_method_std": "initializer_range",
    "rotary_base": "rope_theta",
}
_LLAMA_NAMES = {**_ROPE_NAMES, "norm_epsilon": "rms_norm_eps"}
_EXPERTS = {"num_experts": "num_experts", "moe_router_topk": "num_experts_per_tok"}
_LOCAL_EXPERTS = {**_EXPERTS, "num_experts": "num_local_experts"}
_OWN_WIDTH = {"ffn_hidden_size": "moe_intermediate_size"}
_DELTA_NETS = ("linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim")

# What classes take for keys that a file leaves out; where they differ, a family says so itself. None: what ModelConfig
# takes.
_DEFAULTS = {
    "num_key_value_heads": None,
    "head_dim": None,
    "n_inner": None,
    "max_position_embeddings": None,
    "n_positions": 1024,
    "rms_norm_eps": 1e-6,
    "layer_norm_eps": 1e-5,
    "layer_norm_epsilon": 1e-5,
    "norm_epsilon": 1e-5,
    "rope_theta": 10000.0,
    "initializer_range": 0.02,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "activation_function": "gelu_new",
    "use_bias": True,
    "enable_bias": True,
    "multi_query": True,
    "do_layer_norm_before": True,
    "layer_norm_elementwise_affine": True,
}
_TIED = {**_DEFAULTS, "tie_word_embeddings": True}
_RMS = {"normalization": "RMSNorm"}


def _opt(keys: ConfigKeys, model: ModelConfig) -> Mapping[str, Any]:
    """Embeddings narrower than the hidden size are projected before and after the layers."""
    has_width = keys.get("word_embed_proj_dim") is not None
    width = keys.number("hidden_size", "word_embed_proj_dim") if has_width else model.hidden_size
    return {
        "norm_vectors": 2 if keys.switch("layer_norm_elementwise_affine") else 0,
        "embedding_width": width,
        "final_norm": keys.switch("do_layer_norm_before") and not keys.switch("_remove_final_layer_norm"),
        "extra": 0 if width == model.hidden_size else width * model.hidden_size,  # the projection after the layers
    }


_LLAMA = Family(
    architecture="LlamaForCausalLM",
    names=_LLAMA_NAMES,
    defaults=_DEFAULTS,
    biases=Biases("attention_bias", "attention_bias", "mlp_bias"),
    tensors=tensors.LLAMA,
)
_GPT2 = Family(
    names={
        "num_layers": "n_layer",
        "hidden_size": "n_embd",
        "num_attention_heads": "n_head",
        "ffn_hidden_size": "n_inner",
        "vocab_size": "vocab_size",
        "max_position_embeddings": "n_positions",
        "init_method_std": "initializer_range",
        "norm_epsilon": "layer_norm_epsilon",
    },
    aliases={
        "n_layer": "num_hidden_layers",
        "n_embd": "hidden_size",
        "n_head": "num_attention_heads",
        "n_positions": "max_position_embeddings",
    },
    defaults=_TIED,
    fixed={"position_embedding_type": "learned_absolute"},
    gated=False,
    biases=ALL_BIASES,
)
_MISTRAL = replace(
    _LLAMA,
    architecture="MistralForCausalLM",
    defaults={**_DEFAULTS, "num_key_value_heads": 8},
    biases=NO_BIASES,
    window="sliding_window",
    default_window=4096,
)
_QWEN3 = replace(
    _LLAMA,
    architecture="Qwen3ForCausalLM",
    defaults={**_DEFAULTS, "head_dim": 128},
    fixed={**_RMS, "qk_layernorm": True},
    biases=Biases("attention_bias", "attention_bias", False),
    only={"attention_bias": (False,)},
    window="use_sliding_window",
    layer_types=True,
)
_QWEN35 = replace(
    _LLAMA,
    architecture="Qwen3_5ForCausalLM",
    names={**_LLAMA_NAMES, "rotary_percent": "partial_rotary_factor", **{name: name for name in _DELTA_NETS}},
    defaults={
        **_DEFAULTS,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "partial_rotary_factor": 0.25,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_key_head_dim": 128,
    },
    biases=NO_BIASES,
    fixed={**_RMS, "qk_layernorm": True, "apply_layernorm_1p": True, "attention_output_gate": True},
    only={"attention_bias": (False,), "linear_conv_kernel_dim": (4,)},
    layer_types=True,
    layer_pattern="full_attention_interval",
    default_layer_types=(*["linear_attention"] * 3, "full_attention"),
    tensors=tensors.QWEN35,
)
_QWEN35_MOE = replace(
    _QWEN35,
    architecture="Qwen3_5MoeForCausalLM",
    names={
        **_QWEN35.names,
        **_OWN_WIDTH,
        **_EXPERTS,
        "moe_shared_expert_intermediate_size": "shared_expert_intermediate_size",
    },
    aliases={"num_experts": "num_local_experts"},
    defaults={**_QWEN35.defaults, "num_key_value_heads": 2, "num_experts_per_tok": 8},
    fixed={**_QWEN35.fixed, "moe_shared_expert_gate": True},
)
FAMILIES: dict[str, Family] = {
    "llama": _LLAMA,
    "mistral": _MISTRAL,
    "ministral": replace(_MISTRAL, architecture="MinistralForCausalLM", layer_types=True),
    "qwen2": replace(
        _LLAMA,
        architecture="Qwen2ForCausalLM",
        biases=Biases(True, False, False),
        window="use_sliding_window",
        layer_types=True,
    ),
    "qwen3": _QWEN3,
    "qwen3_moe": replace(
        _QWEN3,
        architecture="Qwen3MoeForCausalLM",
        names={**_LLAMA_NAMES, **_OWN_WIDTH, **_EXPERTS},
        aliases={"num_experts": "num_local_experts"},
        defaults={**_DEFAULTS, "num_experts_per_tok": 8},
        renormalises="norm_topk_prob",
        only={
            "attention_bias": (False,),
            "use_sliding_window": (False,),
            "decoder_sparse_step": (1,),
            "mlp_only_layers": ([], None),
        },
        window="",
        layer_types=False,
        tensors=tensors.QWEN3_MOE,
    ),
    "qwen3_5_text": _QWEN35,
    "qwen3_5_moe_text": _QWEN35_MOE,
    "qwen3_next": replace(
        _QWEN35_MOE,
        architecture="Qwen3NextForCausalLM",
        defaults={**_QWEN35_MOE.defaults, "num_experts_per_tok": 10},
        renormalises="norm_topk_prob",
        only={**_QWEN35.only, "decoder_sparse_step": (1,), "mlp_only_layers": ([], None)},
        tensors=tensors.QWEN3_NEXT,
    ),
    "gpt_oss": replace(
        _LLAMA,
        architecture="GptOssForCausalLM",
        names={**_LLAMA_NAMES, **_LOCAL_EXPERTS},
        aliases={"num_local_experts": "num_experts"},
        defaults={
            **_DEFAULTS,
            "head_dim": 64,
            "num_key_value_heads": 8,
            "num_local_experts": 128,
            "num_experts_per_tok": 4,
            "rms_norm_eps": 1e-5,
            "rope_theta": 150000.0,
        },
        biases=ALL_BIASES,
        fixed={**_RMS, "attention_sinks": True},
        own_activation="swiglu_clamped",
        only={"attention_bias": (True,), "swiglu_alpha": (1.702,), "swiglu_limit": (7.0,)},
        window="sliding_window",
        default_window=128,
        layer_types=True,
        default_layer_types=("sliding_attention", "full_attention"),
        packed=True,
        tensors=tensors.GPT_OSS,
    ),
    "glm4_moe": replace(
        _LLAMA,
        architecture="Glm4MoeForCausalLM",
        names={
            **_LLAMA_NAMES,
            "rotary_percent": "partial_rotary_factor",
            "moe_ffn_hidden_size": "moe_intermediate_size",
            **_EXPERTS,
            "num_experts": "n_routed_experts",
            "moe_router_num_groups": "n_group",
            "moe_router_group_topk": "topk_group",
            "moe_router_topk_scaling_factor": "routed_scaling_factor",
        },
        aliases={"n_routed_experts": "num_local_experts"},
        defaults={
            **_DEFAULTS,
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-5,
            "partial_rotary_factor": 0.5,
            "moe_intermediate_size": 1408,
            "n_routed_experts": 128,
            "num_experts_per_tok": 8,
            "n_group": 1,
            "topk_group": 1,
            "routed_scaling_factor": 1.0,
            "first_k_dense_replace": 1,
            "n_shared_experts": 1,
            "norm_topk_prob": True,
        },
        biases=Biases("attention_bias", False, False),
        fixed={**_RMS, "moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True},
        qk_norm_switch="use_qk_norm",
        renormalises="norm_topk_prob",
        dense_first="first_k_dense_replace",
        shared_experts="n_shared_experts",
        layers_beyond="num_nextn_predict_layers",
        tensors=tensors.GLM4_MOE,
    ),
    "mixtral": replace(
        _MISTRAL,
        architecture="MixtralForCausalLM",
        names={**_LLAMA_NAMES, **_LOCAL_EXPERTS},
        aliases={"num_local_experts": "num_experts"},
        defaults={
            **_DEFAULTS,
            "num_key_value_heads": 8,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1e6,
        },
        default_window=None,
        tensors=tensors.MIXTRAL,
    ),
    "gemma3_text": replace(
        _LLAMA,
        architecture="Gemma3ForCausalLM",
        names={**_LLAMA_NAMES, "query_pre_attn_scalar": "query_pre_attn_scalar"},
        defaults={
            **_TIED,
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
        fixed={
            **_RMS,
            "qk_layernorm": True,
            "norm_placement": "around",
            "apply_layernorm_1p": True,
            "scale_embeddings": True,
        },
        activation="hidden_activation",
        only={
            "attention_bias": (False,),
            "attn_logit_softcapping": (None,),
            "final_logit_softcapping": (None,),
            "use_bidirectional_attention": (False, None),
        },
        window="sliding_window",
        default_window=4096,
        layer_types=True,
        default_layer_types=(*["sliding_attention"] * 5, "full_attention"),
        layer_pattern="sliding_window_pattern",
        sliding_base="rope_local_base_freq",
        tensors=tensors.GEMMA3,
    ),
    "olmo3": replace(
        _LLAMA,
        architecture="Olmo3ForCausalLM",
        defaults={**_DEFAULTS, "rms_norm_eps": 1e-5, "rope_theta": 500000.0},
        biases=NO_BIASES,
        fixed={**_RMS, "qk_layernorm": True, "qk_layernorm_across_heads": True, "norm_placement": "after"},
        only={"attention_bias": (False,)},
        window="sliding_window",
        default_window=4096,
        layer_types=True,
        default_layer_types=(*["sliding_attention"] * 3, "full_attention"),
        sliding_base="rope_theta",
        tensors=tensors.OLMO3,
    ),
    "gpt2": replace(
        _GPT2,
        architecture="GPT2LMHeadModel",
        tensors=tensors.GPT2,
        activation="activation_function",
        only={
            "scale_attn_weights": (True,),
            "scale_attn_by_inverse_layer_idx": (False,),
            "add_cross_attention": (False,),
        },
    ),
    # The one trained family with LayerNorm and rotary positions: the paper's GPTs are written as it.
    "starcoder2": Family(
        architecture="Starcoder2ForCausalLM",
        names={**_ROPE_NAMES, "norm_epsilon": "norm_epsilon"},
        defaults={**_TIED, "num_key_value_heads": 2, "initializer_range": 0.018042, "hidden_act": "gelu_pytorch_tanh"},
        fixed={},
        gated=False,
        biases=Biases("use_bias", "use_bias", "use_bias"),
        tensors=tensors.STARCODER2,
        window="sliding_window",
    ),
    # Those below are counted and planned for alone.
    "phi3": Family(names=_LLAMA_NAMES, defaults={**_DEFAULTS, "rms_norm_eps": 1e-5}),
    "gemma": Family(names=_LLAMA_NAMES, defaults={**_TIED, "head_dim": 256}),
    # Scores of attention and logits are capped.
    "gemma2": Family(
        names=_LLAMA_NAMES, defaults={**_TIED, "head_dim": 256}, fixed={**_RMS, "norm_placement": "around"}
    ),
    "gpt_bigcode": replace(_GPT2, one_kv_head="multi_query"),
    "opt": replace(
        _GPT2,
        names={**_SIZES, "ffn_hidden_size": "ffn_dim"},
        defaults={**_TIED, "max_position_embeddings": 2048},
        biases=Biases("enable_bias", "enable_bias", "enable_bias"),
        spare_positions=2,
        beyond=_opt,
    ),
    "gpt_neox": replace(
        _GPT2,
        names={**_SIZES, "norm_epsilon": "layer_norm_eps"},
        defaults={**_DEFAULTS, "attention_bias": True},
        fixed={},
        biases=Biases("attention_bias", "attention_bias", True),
    ),
    # Attention scores have a slope (ALiBi), so there are neither rotations nor a table of positions.
    "bloom": replace(
        _GPT2,
        names={
            "num_layers": "n_layer",
            "hidden_size": "hidden_size",
            "num_attention_heads": "n_head",
            "vocab_size": "vocab_size",
            "norm_epsilon": "layer_norm_epsilon",
        },
        aliases={"n_layer": "num_hidden_layers", "hidden_size": "n_embed", "n_head": "num_attention_heads"},
        beyond=lambda keys, model: {"embedding_norm": True},
    ),
    # Attention and MLP have the same normed input; the head has a bias.
    "codegen": replace(
        _GPT2,
        defaults={**_DEFAULTS, "n_positions": 2048},
        fixed={},
        biases=Biases(False, False, True),
        beyond=lambda keys, model: {"norms": ("attention_norm",), "head_bias": True},
    ),
    "gpt_neo": replace(
        _GPT2,
        names={
            **_SIZES,
            "num_layers": "num_layers",
            "num_attention_heads": "num_heads",
            "norm_epsilon": "layer_norm_epsilon",
        },
        defaults={**_TIED, "intermediate_size": None, "max_position_embeddings": 2048},
        biases=Biases(False, True, True),
    ),
    "biogpt": replace(
        _GPT2,
        names={**_SIZES, "norm_epsilon": "layer_norm_eps"},
        defaults={**_TIED, "max_position_embeddings": 1024, "layer_norm_eps": 1e-12},
        spare_positions=2,
    ),
}
"""By model_type, in the order in which messages list them and an export tries them."""
TRAINED = {name: family for name, family in FAMILIES.items() if family.architecture}
