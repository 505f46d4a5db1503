"""The families of models of Hugging Face: the one table of what the keys of a config.json mean.

A family with an architecture is trained, imported and exported, unless a file asks for mathematics that memo does not
do; the others can be counted and planned for (memo.config.hugging_face_counted).
"""

from dataclasses import replace

from memo.config import hugging_face_tensors as tensors
from memo.config.hugging_face_counted import COUNTED
from memo.config.hugging_face_deepseek import DEEPSEEK2, DEEPSEEK3, GLM4_MOE, GLM4_MOE_LITE, MISTRAL4
from memo.config.hugging_face_family import ALL_BIASES, NO_BIASES, Biases, Family
from memo.config.hugging_face_gemma import GEMMA2, GEMMA3, GEMMA4, GEMMA4_UNIFIED
from memo.config.hugging_face_shared import GPT2, LLAMA, LLAMA_NAMES, RMS, ROPE_NAMES, TIED

_EXPERTS = {"num_experts": "num_experts", "moe_router_topk": "num_experts_per_tok"}
_LOCAL_EXPERTS = {**_EXPERTS, "num_experts": "num_local_experts"}
_OWN_WIDTH = {"ffn_hidden_size": "moe_intermediate_size"}
_DELTA_NETS = ("linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim")

_MISTRAL = replace(
    LLAMA,
    architecture="MistralForCausalLM",
    defaults={"num_key_value_heads": 8},
    biases=NO_BIASES,
    window="sliding_window",
    default_window=4096,
)
_QWEN3 = replace(
    LLAMA,
    architecture="Qwen3ForCausalLM",
    defaults={"head_dim": 128},
    fixed={**RMS, "qk_layernorm": True},
    biases=Biases("attention_bias", "attention_bias", False),
    only={"attention_bias": (False,)},
    window="use_sliding_window",
    layer_types=True,
)
_QWEN3_MOE = replace(
    _QWEN3,
    architecture="Qwen3MoeForCausalLM",
    names={**LLAMA_NAMES, **_OWN_WIDTH, **_EXPERTS},
    aliases={"num_experts": "num_local_experts"},
    defaults={"num_experts_per_tok": 8},
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
)
_MIXTRAL = replace(
    _MISTRAL,
    architecture="MixtralForCausalLM",
    names={**LLAMA_NAMES, **_LOCAL_EXPERTS},
    aliases={"num_local_experts": "num_experts"},
    defaults={
        "num_key_value_heads": 8,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e6,
    },
    default_window=None,
    tensors=tensors.MIXTRAL,
)
_OLMO2 = replace(
    LLAMA,
    architecture="Olmo2ForCausalLM",
    defaults={"rms_norm_eps": 1e-5},
    biases=NO_BIASES,
    fixed={**RMS, "qk_layernorm": True, "qk_layernorm_across_heads": True, "norm_placement": "after"},
    only={"attention_bias": (False,)},
    tensors=tensors.OLMO3,
)
_QWEN35 = replace(
    LLAMA,
    architecture="Qwen3_5ForCausalLM",
    names={**LLAMA_NAMES, "rotary_percent": "partial_rotary_factor", **{name: name for name in _DELTA_NETS}},
    defaults={
        "num_key_value_heads": 4,
        "head_dim": 256,
        "partial_rotary_factor": 0.25,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_key_head_dim": 128,
    },
    biases=NO_BIASES,
    fixed={**RMS, "qk_layernorm": True, "apply_layernorm_1p": True, "attention_output_gate": True},
    own_activation="swiglu",  # it is that of the convolution of delta nets, too
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
TRAINED: dict[str, Family] = {
    "llama": LLAMA,
    "mistral": _MISTRAL,
    "ministral": replace(_MISTRAL, architecture="MinistralForCausalLM", layer_types=True),
    "ministral3": replace(
        _MISTRAL,
        architecture="Ministral3ForCausalLM",
        defaults={**_MISTRAL.defaults, "head_dim": 128, "rms_norm_eps": 1e-5, "rope_theta": 1e6},
        default_window=None,
        scales_queries=True,
    ),
    "mistral4": MISTRAL4,
    "qwen2": replace(
        LLAMA,
        architecture="Qwen2ForCausalLM",
        biases=Biases(True, False, False),
        window="use_sliding_window",
        layer_types=True,
    ),
    "qwen3": _QWEN3,
    "qwen3_moe": _QWEN3_MOE,
    "qwen3_vl_text": replace(_QWEN3, architecture="Qwen3VLTextModel", window="", layer_types=False),
    "qwen3_vl_moe_text": replace(
        _QWEN3_MOE,
        architecture="Qwen3VLMoeTextModel",
        defaults={**_QWEN3_MOE.defaults, "num_experts_per_tok": 4, "head_dim": 128},
        renormalises="",
        tensors=tensors.QWEN3_VL_MOE,
    ),
    "qwen3_5_text": _QWEN35,
    "qwen3_5_moe_text": _QWEN35_MOE,
    "qwen3_next": replace(
        _QWEN35_MOE,
        architecture="Qwen3NextForCausalLM",
        defaults={**_QWEN35_MOE.defaults, "num_experts_per_tok": 10, "norm_topk_prob": True},
        renormalises="norm_topk_prob",
        only={**_QWEN35.only, "decoder_sparse_step": (1,), "mlp_only_layers": ([], None)},
        tensors=tensors.QWEN3_NEXT,
    ),
    "gpt_oss": replace(
        LLAMA,
        architecture="GptOssForCausalLM",
        names={**LLAMA_NAMES, **_LOCAL_EXPERTS},
        aliases={"num_local_experts": "num_experts"},
        defaults={
            "head_dim": 64,
            "num_key_value_heads": 8,
            "num_local_experts": 128,
            "num_experts_per_tok": 4,
            "rms_norm_eps": 1e-5,
            "rope_theta": 150000.0,
        },
        biases=ALL_BIASES,
        fixed={**RMS, "attention_sinks": True},
        own_activation="swiglu_clamped",
        only={"attention_bias": (True,), "swiglu_alpha": (1.702,), "swiglu_limit": (7.0,)},
        window="sliding_window",
        default_window=128,
        layer_types=True,
        default_layer_types=("sliding_attention", "full_attention"),
        default_rope={"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096, "truncate": False},
        packed=True,
        tensors=tensors.GPT_OSS,
    ),
    "glm4_moe": GLM4_MOE,
    "glm4_moe_lite": GLM4_MOE_LITE,
    "deepseek_v3": DEEPSEEK3,
    "deepseek_v2": DEEPSEEK2,
    "mixtral": _MIXTRAL,
    "minimax_m2": replace(
        _MIXTRAL,
        architecture="MiniMaxM2ForCausalLM",
        names={**_MIXTRAL.names, "rotary_percent": "partial_rotary_factor"},
        defaults={
            **_MIXTRAL.defaults,
            "head_dim": 128,
            "num_local_experts": 256,
            "num_experts_per_tok": 8,
            "rms_norm_eps": 1e-6,
            "rope_theta": 5e6,
            "partial_rotary_factor": 1.0,
        },
        fixed={
            **RMS,
            "qk_layernorm": True,
            "qk_layernorm_across_heads": True,
            "moe_router_score_function": "sigmoid",
            "moe_router_enable_expert_bias": True,
        },
        rotary_channels="rotary_dim",
        window="",
        tensors=tensors.MINIMAX_M2,
    ),
    "gemma2": GEMMA2,
    "gemma3_text": GEMMA3,
    "gemma4_text": GEMMA4,
    "gemma4_unified_text": GEMMA4_UNIFIED,
    "olmo2": _OLMO2,
    "olmo3": replace(
        _OLMO2,
        architecture="Olmo3ForCausalLM",
        defaults={**_OLMO2.defaults, "rope_theta": 500000.0},
        window="sliding_window",
        default_window=4096,
        layer_types=True,
        default_layer_types=(*["sliding_attention"] * 3, "full_attention"),
        sliding_base="rope_theta",
    ),
    "olmoe": replace(
        _OLMO2,
        architecture="OlmoeForCausalLM",
        names={**LLAMA_NAMES, **_EXPERTS},
        aliases={"num_experts": "num_local_experts"},
        defaults={**_OLMO2.defaults, "num_experts": 64, "num_experts_per_tok": 8},
        fixed={**RMS, "qk_layernorm": True, "qk_layernorm_across_heads": True},
        renormalises="norm_topk_prob",
        only={"attention_bias": (False,), "clip_qkv": (None,)},
        tensors=tensors.QWEN3_MOE,
    ),
    "phi3": replace(
        LLAMA,
        architecture="Phi3ForCausalLM",
        names={**LLAMA_NAMES, "rotary_percent": "partial_rotary_factor"},
        defaults={
            "rms_norm_eps": 1e-5,
            "partial_rotary_factor": 1.0,
            "original_max_position_embeddings": 4096,
        },
        biases=NO_BIASES,
        rotations=("default", "longrope"),
        window="sliding_window",
        tensors=tensors.PHI3,
    ),
    "seed_oss": replace(
        LLAMA,
        architecture="SeedOssForCausalLM",
        defaults={"num_key_value_heads": 8, "head_dim": 128, "attention_bias": True},
        biases=Biases("attention_bias", "attention_out_bias", "mlp_bias"),
    ),
    "exaone4": replace(
        _QWEN3,
        architecture="Exaone4ForCausalLM",
        defaults={"num_key_value_heads": 32, "max_position_embeddings": 2048, "rms_norm_eps": 1e-5},
        biases=NO_BIASES,
        fixed={**RMS, "qk_layernorm": True, "norm_placement": "after"},
        only={},
        window="sliding_window",
        default_window=4096,
        default_layer_types=(*["sliding_attention"] * 3, "full_attention"),
        layer_pattern="sliding_window_pattern",
        rope_layers="sliding_attention",
        tensors=tensors.OLMO3,
    ),
    "smollm3": replace(
        LLAMA,
        architecture="SmolLM3ForCausalLM",
        defaults={**TIED, "num_key_value_heads": 4, "rope_theta": 2e6, "no_rope_layer_interval": 4},
        only={"use_sliding_window": (False, None)},
        rope_layers="no_rope_layers",
    ),
    "gpt2": replace(
        GPT2,
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
        names={**ROPE_NAMES, "norm_epsilon": "norm_epsilon"},
        defaults={**TIED, "num_key_value_heads": 2, "initializer_range": 0.018042, "hidden_act": "gelu_pytorch_tanh"},
        fixed={},
        gated=False,
        biases=Biases("use_bias", "use_bias", "use_bias"),
        tensors=tensors.STARCODER2,
        window="sliding_window",
    ),
}
"""By model_type, in the order in which messages list them and an export tries them."""
FAMILIES = {**TRAINED, **COUNTED}
