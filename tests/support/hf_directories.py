"""Tiny models of every family, written by transformers as users find them on the hub."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from memo.checkpoint.hugging_face.weights import PretrainedWeights
from memo.config.hugging_face import read_config
from memo.config.hugging_face_families import TRAINED

ALONE = [name for name in TRAINED if name not in ("qwen3_vl_text", "qwen3_vl_moe_text", "mistral4")]
"""Trained families that transformers has as models of their own, not in larger models alone."""
VOCAB = 97
_SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "intermediate_size": 48,
    "vocab_size": VOCAB,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 16.0,
    "beta_slow": 2.0,
}
_LLAMA_4 = {"original_max_position_embeddings": 8, "llama_4_scaling_beta": 0.3}
_LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_GPT2 = {"n_embd": 32, "n_head": 4, "n_layer": 2, "n_positions": 64, "vocab_size": VOCAB}

_QWEN3_MOE = {**_SIZES, "head_dim": 16, "moe_intermediate_size": 24, "num_experts": 6, "num_experts_per_tok": 3}
_GLM4_MOE = {**_SIZES, "head_dim": 16, "moe_intermediate_size": 24, "n_routed_experts": 8, "num_experts_per_tok": 3}
_GLM4_MOE |= {"n_shared_experts": 2, "routed_scaling_factor": 2.5}
_DELTA_NETS = {
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"],
}
_GATED_EXPERTS = {
    "num_experts": 6,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 40,
}
_LATENTS = {
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 20,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 6,
    "v_head_dim": 12,
    "moe_intermediate_size": 24,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_group": 4,
    "topk_group": 2,
    "n_shared_experts": 2,
    "routed_scaling_factor": 2.5,
}
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {**_SIZES, "rms_norm_eps": 1e-5, "rope_theta": 500.0}),
    "llama3": ("LlamaConfig", {**_SIZES, "rope_theta": 500.0, "rope_scaling": _LLAMA3}),
    "llama-linear-tied": (
        "LlamaConfig",
        {**_SIZES, "tie_word_embeddings": True, "rope_scaling": {"rope_type": "linear", "factor": 2.0}},
    ),
    "llama-biases": ("LlamaConfig", {**_SIZES, "attention_bias": True, "mlp_bias": True, "head_dim": 16}),
    "mistral": ("MistralConfig", {**_SIZES, "sliding_window": None}),
    "mistral-window": ("MistralConfig", {**_SIZES, "sliding_window": 5}),
    "ministral": (
        "MinistralConfig",
        {**_SIZES, "head_dim": 16, "sliding_window": 9, "layer_types": ["full_attention", "sliding_attention"]},
    ),
    "ministral3": (
        "Ministral3Config",
        {**_SIZES, "head_dim": 16, "bos_token_id": 1, "pad_token_id": None, "rope_theta": 500.0}
        | {"rope_scaling": {**_YARN, **_LLAMA_4, "mscale": 1.0, "mscale_all_dim": 0.5}},
    ),
    "qwen2": ("Qwen2Config", {**_SIZES, "tie_word_embeddings": True}),
    "qwen2-yarn": ("Qwen2Config", {**_SIZES, "rope_scaling": _YARN}),
    "qwen2-window": (
        "Qwen2Config",
        {**_SIZES, "use_sliding_window": True, "sliding_window": 7, "max_window_layers": 0},
    ),
    "qwen3": ("Qwen3Config", {**_SIZES, "head_dim": 16}),
    "qwen3-layers": (
        "Qwen3Config",
        {**_SIZES, "head_dim": 16, "use_sliding_window": True, "sliding_window": 7}
        | {"layer_types": ["sliding_attention", "full_attention"]},
    ),
    "qwen3_moe": ("Qwen3MoeConfig", {**_QWEN3_MOE, "norm_topk_prob": True}),
    "qwen3_moe-shares-of-all": ("Qwen3MoeConfig", {**_QWEN3_MOE, "norm_topk_prob": False}),
    "gpt_oss": (
        "GptOssConfig",
        {**_SIZES, "head_dim": 16, "num_local_experts": 6, "num_experts_per_tok": 3, "sliding_window": 9}
        | {"rope_theta": 500.0, "rope_scaling": {**_YARN, "truncate": False}},
    ),
    "glm4_moe": (
        "Glm4MoeConfig",
        {**_GLM4_MOE, "attention_bias": True, "use_qk_norm": True, "n_group": 4, "topk_group": 2}
        | {"rope_theta": 500.0, "rope_scaling": {**_YARN}},
    ),
    "glm4_moe-one-group-of-scores": (
        "Glm4MoeConfig",
        {**_GLM4_MOE, "num_hidden_layers": 3, "n_group": 1, "topk_group": 1, "norm_topk_prob": False},
    ),
    "glm4_moe_lite": ("Glm4MoeLiteConfig", {**_SIZES, **_LATENTS, "v_head_dim": 16, "rope_theta": 500.0}),
    "deepseek_v3": (
        "DeepseekV3Config",
        {**_SIZES, **_LATENTS, "first_k_dense_replace": 1, "rms_norm_eps": 1e-4}
        | {"rope_scaling": {**_YARN, "mscale": 1.0, "mscale_all_dim": 0.5}},
    ),
    "deepseek_v2": (
        "DeepseekV2Config",
        {**_SIZES, **_LATENTS, "q_lora_rank": None, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1}
        | {"routed_scaling_factor": 1.0, "rope_scaling": {**_YARN, "mscale": 0.7, "mscale_all_dim": 0.7}},
    ),
    "mistral4": (
        "Mistral4Config",
        {**_SIZES, **_LATENTS, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.0}
        | {"pad_token_id": None, "rope_parameters": {**_YARN, **_LLAMA_4, "mscale": 1.0, "mscale_all_dim": 0.5}}
        | {"rope_theta": 500.0},
    ),
    "qwen3_5_text": ("Qwen3_5TextConfig", {**_SIZES, **_DELTA_NETS}),
    "qwen3_5_moe_text": ("Qwen3_5MoeTextConfig", {**_SIZES, **_DELTA_NETS, **_GATED_EXPERTS}),
    "qwen3_next": ("Qwen3NextConfig", {**_SIZES, **_DELTA_NETS, **_GATED_EXPERTS, "norm_topk_prob": False}),
    "gemma2": (
        "Gemma2Config",
        {**_SIZES, "head_dim": 16, "sliding_window": 9, "query_pre_attn_scalar": 24}
        | {"attn_logit_softcapping": 0.5, "final_logit_softcapping": 5.0},
    ),
    "gemma3_text": (
        "Gemma3TextConfig",
        {**_SIZES, "head_dim": 16, "sliding_window": 9, "layer_types": ["sliding_attention", "full_attention"]}
        | {"query_pre_attn_scalar": 24, "rope_local_base_freq": 30.0, "rope_theta": 500.0}
        | {"rope_scaling": {"rope_type": "linear", "factor": 8.0}},
    ),
    "gemma4_text": (
        "Gemma4TextConfig",
        {**_SIZES, "head_dim": 16, "sliding_window": 9, "layer_types": ["sliding_attention", "full_attention"]}
        | {"global_head_dim": 24, "num_global_key_value_heads": 2, "attention_k_eq_v": True}
        | {"hidden_size_per_layer_input": 0, "final_logit_softcapping": 5.0},
    ),
    "gemma4_text-experts": (
        "Gemma4TextConfig",
        {**_SIZES, "head_dim": 16, "sliding_window": 9, "layer_types": ["sliding_attention", "full_attention"]}
        | {"hidden_size_per_layer_input": 0, "enable_moe_block": True, "num_experts": 6, "top_k_experts": 3}
        | {"moe_intermediate_size": 24},
    ),
    "gemma4_unified_text": (
        "Gemma4UnifiedTextConfig",
        {**_SIZES, "head_dim": 16, "sliding_window": 9, "layer_types": ["sliding_attention", "full_attention"]},
    ),
    "olmo3": (
        "Olmo3Config",
        {**_SIZES, "sliding_window": 9, "layer_types": ["sliding_attention", "full_attention"]}
        | {
            "rope_parameters": {
                "full_attention": {**_YARN, "rope_theta": 500.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
            }
        },
    ),
    "olmo2": ("Olmo2Config", {**_SIZES, "rope_scaling": _YARN}),
    "olmoe": (
        "OlmoeConfig",
        {**_SIZES, "intermediate_size": 24, "num_experts": 6, "num_experts_per_tok": 3, "pad_token_id": None},
    ),
    "phi3": ("Phi3Config", {**_SIZES, "rope_theta": 500.0, "sliding_window": 9, "pad_token_id": None}),
    "phi3-longrope": (
        "Phi3Config",
        {**_SIZES, "pad_token_id": None, "partial_rotary_factor": 0.5, "original_max_position_embeddings": 16}
        | {"rope_scaling": {"type": "longrope", "short_factor": [1.0, 1.5], "long_factor": [1.0, 7.0]}},
    ),
    "seed_oss": ("SeedOssConfig", {**_SIZES, "head_dim": 16}),
    "seed_oss-no-bias": ("SeedOssConfig", {**_SIZES, "head_dim": 16, "attention_bias": False}),
    "exaone4": (
        "Exaone4Config",
        {**_SIZES, "sliding_window": 9, "layer_types": ["sliding_attention", "full_attention"]}
        | {"rope_theta": 500.0, "rope_scaling": _LLAMA3},
    ),
    "exaone4-no-window": ("Exaone4Config", {**_SIZES, "sliding_window": None, "layer_types": ["full_attention"] * 2}),
    "smollm3": ("SmolLM3Config", {**_SIZES, "no_rope_layers": [1, 0], "rope_theta": 500.0, "pad_token_id": None}),
    "mixtral": ("MixtralConfig", {**_SIZES, "num_local_experts": 4}),
    "minimax_m2": (
        "MiniMaxM2Config",
        {**_SIZES, "head_dim": 16, "num_local_experts": 6, "num_experts_per_tok": 3, "rotary_dim": 8},
    ),
    "gpt2": ("GPT2Config", {**_GPT2, "bos_token_id": 1, "eos_token_id": 2}),
    "gpt2-untied": ("GPT2Config", {**_GPT2, "activation_function": "gelu", "tie_word_embeddings": False}),
    "starcoder2": ("Starcoder2Config", {**_SIZES, "num_key_value_heads": 2}),
    "starcoder2-no-bias": ("Starcoder2Config", {**_SIZES, "use_bias": False, "tie_word_embeddings": False}),
}


def make_model(name: str, dtype: torch.dtype = torch.float32, attention: str | None = None) -> Any:
    """A transformers model of CONFIGS with random weights everywhere, in evaluation mode; experts in eager kernels, as
    the others have no fp64. `attention`: its kernels, which are by default those that transformers chooses."""
    import transformers

    class_name, fields = CONFIGS[name]
    config = getattr(transformers, class_name)(**fields, attn_implementation=attention)
    config._experts_implementation = "eager"
    make = transformers.AutoModelForCausalLM.from_config
    if class_name == "Mistral4Config":  # which transformers itself has in larger models alone
        make = transformers.Mistral4ForCausalLM._from_config
    model = make(config).to(dtype).eval()
    generator = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            noise = 0.2 * torch.randn(parameter.shape, generator=generator)
            is_norm_weight = parameter.ndim == 1 and key.endswith("weight")
            parameter.copy_(noise + 1.0 if is_norm_weight else noise)
        for key, buffer in model.named_buffers():
            if key.endswith("e_score_correction_bias"):  # of fp32 in any model
                model.get_submodule(key.rpartition(".")[0]).e_score_correction_bias = 0.05 * torch.randn(
                    buffer.shape, generator=generator
                )
            if key.endswith("layer_scalar"):
                buffer.copy_(1 + 0.2 * torch.randn(buffer.shape, generator=generator))
    return model


def write_model(name: str, directory: Path, dtype: torch.dtype = torch.float32, max_shard: str = "5GB") -> Path:
    """`save_pretrained` of make_model(name) into directory/name; returns that."""
    path = directory / name
    make_model(name, dtype).save_pretrained(path, max_shard_size=max_shard)
    return path


def load_model(directory: Path) -> Any:
    """transformers' model of a directory in fp64, which experts have in its eager kernels alone."""
    import transformers

    return transformers.AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float64, attn_implementation="eager", experts_implementation="eager"
    )


def weights_of(directory: Path) -> PretrainedWeights:
    """memo's reader of the weights of a directory."""
    theirs = read_config(directory)
    return PretrainedWeights(directory, theirs.model, theirs.model_type, theirs.model.max_position_embeddings or 256)


def global_tensors(directory: Path) -> dict[str, Tensor]:
    """All tensors of a directory under memo's names."""
    weights = weights_of(directory)
    return {name: weights.read_whole(name) for name in weights.shapes}
