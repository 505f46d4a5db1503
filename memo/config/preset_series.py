"""Keys of config.json that the models of one published series share (memo.config.presets)."""

from typing import Any

LLAMA: dict[str, Any] = {"model_type": "llama", "rms_norm_eps": 1e-5, "max_position_embeddings": None}
LLAMA_2: dict[str, Any] = {**LLAMA, "vocab_size": 32000, "max_position_embeddings": 4096}
LLAMA_3: dict[str, Any] = {**LLAMA, "vocab_size": 128256, "max_position_embeddings": 8192, "rope_theta": 500000.0}
_STRETCHED = {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 8192}
LLAMA_31: dict[str, Any] = {**LLAMA_3, "max_position_embeddings": 131072, "rope_scaling": _STRETCHED}
LLAMA_32: dict[str, Any] = {**LLAMA_31, "rope_scaling": {**_STRETCHED, "factor": 32.0}, "tie_word_embeddings": True}
MISTRAL: dict[str, Any] = {**LLAMA, "vocab_size": 32768, "max_position_embeddings": 32768, "rope_theta": 1e6}
_GROWING = {"rope_type": "yarn", "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1}
MINISTRAL_3: dict[str, Any] = {
    "model_type": "ministral3",
    "vocab_size": 131072,
    "max_position_embeddings": 262144,
    "rope_scaling": {**_GROWING, "factor": 16.0, "original_max_position_embeddings": 16384},
}
MISTRAL_SMALL_4: dict[str, Any] = {
    **MINISTRAL_3,
    "model_type": "mistral4",
    "max_position_embeddings": 1048576,
    "rope_theta": 10000.0,
    "rope_scaling": {**_GROWING, "factor": 128.0, "original_max_position_embeddings": 8192},
}
MIXTRAL: dict[str, Any] = {"model_type": "mixtral", "max_position_embeddings": 32768, "vocab_size": 32000}
QWEN_25: dict[str, Any] = {
    "model_type": "qwen2",
    "rope_theta": 1e6,
    "vocab_size": 152064,
    "max_position_embeddings": 32768,
}
QWEN_25_SMALL: dict[str, Any] = {**QWEN_25, "vocab_size": 151936, "tie_word_embeddings": True}
QWEN_3: dict[str, Any] = {
    "model_type": "qwen3",
    "rope_theta": 1e6,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
}
QWEN_3_SMALL: dict[str, Any] = {**QWEN_3, "tie_word_embeddings": True}
QWEN_3_MOE: dict[str, Any] = {
    **QWEN_3,
    "model_type": "qwen3_moe",
    "num_experts": 128,
    "head_dim": 128,
    "norm_topk_prob": True,
}
GPT_OSS: dict[str, Any] = {"model_type": "gpt_oss", "vocab_size": 201088, "max_position_embeddings": 131072}
GEMMA_2: dict[str, Any] = {"model_type": "gemma2"}
GEMMA_3: dict[str, Any] = {
    "model_type": "gemma3_text",
    "sliding_window": 512,
    "max_position_embeddings": 32768,
    "vocab_size": 262144,
}
GEMMA_3_SEEING: dict[str, Any] = {  # the text model of models that read images
    "model_type": "gemma3_text",
    "sliding_window": 1024,
    "rope_scaling": {"rope_type": "linear", "factor": 8.0},
}
GEMMA_4: dict[str, Any] = {
    "model_type": "gemma4_text",
    "sliding_window": 1024,
    "max_position_embeddings": 262144,
    "attention_k_eq_v": True,
    "hidden_size_per_layer_input": 0,
    "final_logit_softcapping": 30.0,
}
GEMMA_4_MOE: dict[str, Any] = {**GEMMA_4, "enable_moe_block": True, "num_experts": 128, "top_k_experts": 8}
QWEN_35: dict[str, Any] = {
    "model_type": "qwen3_5_text",
    "vocab_size": 248320,
    "max_position_embeddings": 262144,
    "rope_theta": 1e7,
}
QWEN_35_MOE: dict[str, Any] = {
    **QWEN_35,
    "model_type": "qwen3_5_moe_text",
    "num_experts": 256,
    "shared_expert_intermediate_size": 512,
}
GLM_45: dict[str, Any] = {
    "model_type": "glm4_moe",
    "head_dim": 128,
    "attention_bias": True,
    "rope_theta": 1e6,
    "max_position_embeddings": 131072,
    "vocab_size": 151552,
}
_BY_40 = {"rope_type": "yarn", "factor": 40.0, "original_max_position_embeddings": 4096}
DEEPSEEK_V3: dict[str, Any] = {
    "model_type": "deepseek_v3",
    "vocab_size": 129280,
    "max_position_embeddings": 163840,
    "rope_scaling": {**_BY_40, "mscale": 1.0, "mscale_all_dim": 1.0},
}
DEEPSEEK_V2_LITE: dict[str, Any] = {
    **DEEPSEEK_V3,
    "model_type": "deepseek_v2",
    "vocab_size": 102400,
    "q_lora_rank": None,
    "moe_intermediate_size": 1408,
    "num_experts_per_tok": 6,
    "first_k_dense_replace": 1,
    "rope_scaling": {**_BY_40, "mscale": 0.707, "mscale_all_dim": 0.707},
}
GLM_47_FLASH: dict[str, Any] = {
    "model_type": "glm4_moe_lite",
    "vocab_size": 154880,
    "max_position_embeddings": 202752,
    "rope_theta": 1e6,
}
MOONLIGHT: dict[str, Any] = {
    "model_type": "deepseek_v3",
    "vocab_size": 163840,
    "max_position_embeddings": 8192,
    "rope_theta": 50000.0,
    "rms_norm_eps": 1e-5,
    "q_lora_rank": None,
    "moe_intermediate_size": 1408,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "num_experts_per_tok": 6,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 2.446,
}
OLMO_2: dict[str, Any] = {
    "model_type": "olmo2",
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 4096,
    "rope_theta": 500000.0,
    "vocab_size": 100352,
}
OLMOE: dict[str, Any] = {"model_type": "olmoe", "vocab_size": 50304, "max_position_embeddings": 4096}
OLMO_3: dict[str, Any] = {
    "model_type": "olmo3",
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 65536,
    "rope_scaling": {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 8192},
    "vocab_size": 100278,
}
MINIMAX_M2: dict[str, Any] = {
    "model_type": "minimax_m2",
    "vocab_size": 200064,
    "max_position_embeddings": 196608,
    "rotary_dim": 64,
}
PHI_4: dict[str, Any] = {
    "model_type": "phi3",
    "vocab_size": 100352,
    "max_position_embeddings": 16384,
    "rope_theta": 250000.0,
}
PHI_4_MINI: dict[str, Any] = {
    **PHI_4,
    "vocab_size": 200064,
    "max_position_embeddings": 131072,
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.75,
    "rope_scaling": {
        "type": "longrope",
        "short_factor": [1.0] * 48,
        "long_factor": [
            *(1, 1.118320672, 1.250641126, 1.398617824, 1.564103225, 1.74916897, 1.956131817, 2.187582649),
            *(2.446418898, 2.735880826, 3.059592084, 3.421605075, 3.826451687, 4.279200023, 4.785517845, 5.351743533),
            *(5.984965424, 6.693110555, 7.485043894, 8.370679318, 9.36110372, 10.4687158, 11.70738129, 13.09260651),
            *(14.64173252, 16.37415215, 18.31155283, 20.47818807, 22.90118105, 25.61086418, 28.64115884, 32.03, 32.1),
            *(32.13, 32.23, 32.6, 32.61, 32.64, 32.66, 32.7, 32.71, 32.93, 32.97, 33.28, 33.49, 33.5, 44.16, 47.77),
        ],
    },
    "tie_word_embeddings": True,
}
EXAONE_4: dict[str, Any] = {
    "model_type": "exaone4",
    "head_dim": 128,
    "vocab_size": 102400,
    "max_position_embeddings": 131072,
    "rope_theta": 1e6,
    "rope_scaling": {**_STRETCHED, "factor": 16.0},
}
SMOLLM_3: dict[str, Any] = {
    "model_type": "smollm3",
    "vocab_size": 128256,
    "max_position_embeddings": 65536,
    "rope_theta": 5e6,
}
