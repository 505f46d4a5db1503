"""Families whose mixtures of experts are DeepSeek's: GLM-4.5, DeepSeek-V2 and -V3, GLM-4.7-Flash and Mistral Small
4."""

from dataclasses import replace

from memo.config import hugging_face_tensors as tensors
from memo.config.hugging_face_family import MLP_TYPES, NO_BIASES, Biases
from memo.config.hugging_face_shared import DEFAULTS, LLAMA, LLAMA_NAMES, RMS

GLM4_MOE = replace(
    LLAMA,
    architecture="Glm4MoeForCausalLM",
    names={
        **LLAMA_NAMES,
        "rotary_percent": "partial_rotary_factor",
        "moe_ffn_hidden_size": "moe_intermediate_size",
        "moe_router_topk": "num_experts_per_tok",
        "num_experts": "n_routed_experts",
        "moe_router_num_groups": "n_group",
        "moe_router_group_topk": "topk_group",
        "moe_router_topk_scaling_factor": "routed_scaling_factor",
    },
    aliases={"n_routed_experts": "num_local_experts"},
    defaults={
        **DEFAULTS,
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
    fixed={**RMS, "moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True},
    qk_norm_switch="use_qk_norm",
    renormalises="norm_topk_prob",
    dense_first="first_k_dense_replace",
    shared_experts="n_shared_experts",
    layers_beyond="num_nextn_predict_layers",
    tensors=tensors.GLM4_MOE,
)
_LATENTS = {
    "q_lora_rank": "q_lora_rank",
    "kv_lora_rank": "kv_lora_rank",
    "qk_head_dim": "qk_nope_head_dim",
    "qk_pos_emb_head_dim": "qk_rope_head_dim",
    "v_head_dim": "v_head_dim",
}
_NOT_LATENT = ("kv_channels", "rotary_percent")
DEEPSEEK3 = replace(
    GLM4_MOE,
    architecture="DeepseekV3ForCausalLM",
    names={**{ours: key for ours, key in GLM4_MOE.names.items() if ours not in _NOT_LATENT}, **_LATENTS},
    aliases={**GLM4_MOE.aliases, "qk_rope_head_dim": "head_dim"},
    defaults={
        **GLM4_MOE.defaults,
        "num_key_value_heads": 128,
        "rms_norm_eps": 1e-6,
        "moe_intermediate_size": 2048,
        "n_routed_experts": 256,
        "n_group": 8,
        "topk_group": 4,
        "routed_scaling_factor": 2.5,
        "first_k_dense_replace": 3,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
    },
    biases=NO_BIASES,
    fixed={**GLM4_MOE.fixed, "multi_latent_attention": True},
    qk_norm_switch="",
    only={
        "attention_bias": (False,),
        "rope_interleave": (True, None),
        "scoring_func": ("sigmoid",),
        "topk_method": ("noaux_tc",),
        "moe_layer_freq": (1,),
    },
    scales_scores=True,
    tensors=tensors.DEEPSEEK,
)
GLM4_MOE_LITE = replace(
    DEEPSEEK3,
    architecture="Glm4MoeLiteForCausalLM",
    defaults={
        **DEEPSEEK3.defaults,
        "num_key_value_heads": 20,
        "rms_norm_eps": 1e-5,
        "moe_intermediate_size": 1536,
        "n_routed_experts": 64,
        "num_experts_per_tok": 4,
        "n_group": 1,
        "topk_group": 1,
        "routed_scaling_factor": 1.8,
        "q_lora_rank": 768,
        "qk_nope_head_dim": 192,
        "v_head_dim": 256,
    },
    only={**DEEPSEEK3.only, "first_k_dense_replace": (1,)},
    dense_first=MLP_TYPES,
)
_OF_SIGMOID = ("n_group", "topk_group", "routed_scaling_factor")
DEEPSEEK2 = replace(
    DEEPSEEK3,
    architecture="DeepseekV2ForCausalLM",
    names={ours: key for ours, key in DEEPSEEK3.names.items() if key not in _OF_SIGMOID},
    aliases={**DEEPSEEK3.aliases, "n_routed_experts": "num_experts"},
    defaults={
        **{key: value for key, value in DEEPSEEK3.defaults.items() if key not in ("num_experts_per_tok", *_OF_SIGMOID)},
        "num_key_value_heads": None,
        "moe_intermediate_size": 1407,
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "first_k_dense_replace": 0,
        "norm_topk_prob": False,
    },
    fixed={**RMS, "multi_latent_attention": True},
    only={
        "attention_bias": (False,),
        "mlp_bias": (False,),
        "scoring_func": ("softmax",),
        "topk_method": ("greedy", None),
        "moe_layer_freq": (1,),
        "norm_topk_prob": (False, None),
        "routed_scaling_factor": (1.0,),
        "n_group": (None, 1),
        "topk_group": (None, 1),
    },
    layers_beyond="",
)
MISTRAL4 = replace(
    DEEPSEEK2,
    architecture="Mistral4ForCausalLM",
    aliases=GLM4_MOE.aliases,
    defaults={
        **DEEPSEEK2.defaults,
        "num_key_value_heads": 32,
        "moe_intermediate_size": 2048,
        "n_routed_experts": 128,
        "n_shared_experts": 1,
        "num_experts_per_tok": 4,
        "q_lora_rank": 1024,
        "kv_lora_rank": 256,
        "qk_nope_head_dim": 64,
        "norm_topk_prob": True,
    },
    only={
        "attention_bias": (False,),
        "rope_interleave": (True, None),
        "routed_scaling_factor": (1.0,),
        "n_group": (1, None),
        "topk_group": (1, None),
    },
    scales_queries=True,
    tensors=tensors.MISTRAL4,
)
