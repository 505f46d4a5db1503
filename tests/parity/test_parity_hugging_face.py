"""Our model is Hugging Face's, weight for weight: logits, losses and the gradient of every weight.

transformers computes rotary angles, RMS norms and eager softmax in fp32 even when all weights are fp64, so
its answers are good to 1e-5. `Wide` turns each request for fp32 into one for fp64; then they are good to
1e-10.
"""

import functools
import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from forward import Result, run_once
from hugging_face import (
    Sources,
    Wide,
    deepseek_sources,
    gemma3_sources,
    gemma4_sources,
    glm4_moe_sources,
    gpt2_sources,
    gpt_oss_sources,
    llama_sources,
    minimax_m2_sources,
    olmo3_sources,
    phi3_sources,
    qwen3_next_sources,
    qwen35_sources,
    to_global,
)
from torch import Tensor

from memo.config import RunConfig
from memo.config.model import ModelConfig
from memo.model.transformer import Microbatch

transformers = pytest.importorskip("transformers")
torch.set_num_threads(1)

SEQ_LENGTH, BATCH = 32, 2
VOCAB = 97  # at tp 2, 64 rows lie on one rank and 33 and padding on the other


@dataclass(frozen=True)
class Family:
    """The same tiny model in their words and in ours.

    Their classes have names here, as transformers loads a class, for a second or two, when it is first looked at.
    """

    config_class: str
    model_class: str
    theirs: dict[str, Any]
    ours: ModelConfig
    sources: Callable[[ModelConfig], Sources] = llama_sources


_LLAMA_THEIRS: dict[str, Any] = {
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "intermediate_size": 48,
    "vocab_size": VOCAB,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 100.0,  # so small that heads of 8 channels have slow, fast and middling pairs
    "tie_word_embeddings": False,
}
_LLAMA_OURS = ModelConfig(
    num_layers=2,
    hidden_size=32,
    num_attention_heads=4,
    num_query_groups=2,
    ffn_hidden_size=48,
    vocab_size=VOCAB,
    normalization="RMSNorm",
    activation="swiglu",
    rotary_base=100.0,
    untie_embeddings_and_output_weights=True,
)


def _llama(**ours: Any) -> Family:
    """Llama, its RoPE stretched by 4 if `ours` names a way."""
    theirs = dict(_LLAMA_THEIRS)
    if ours:
        scaling = {"rope_type": ours["rope_scaling_type"], "factor": 4.0}
        if "rope_original_max_position_embeddings" in ours:
            scaling["original_max_position_embeddings"] = ours["rope_original_max_position_embeddings"]
        if scaling["rope_type"] == "llama3":
            scaling |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
        theirs["rope_scaling"] = scaling
        ours["rope_scaling_factor"] = 4.0
    model = replace(_LLAMA_OURS, **ours)
    return Family("LlamaConfig", "LlamaForCausalLM", theirs, model)


_YARN_WITHOUT_ROUNDING = {"rope_type": "yarn", "factor": 4.0, "truncate": False}
_QWEN3_MOE_THEIRS = {
    **_LLAMA_THEIRS,
    "head_dim": 16,
    "moe_intermediate_size": 24,
    "num_experts": 6,
    "num_experts_per_tok": 3,
}
_QWEN3_MOE = replace(
    _LLAMA_OURS, kv_channels=16, qk_layernorm=True, ffn_hidden_size=24, num_experts=6, moe_router_topk=3
)
_GLM4_MOE_THEIRS = {
    **_LLAMA_THEIRS,
    "num_hidden_layers": 3,
    "head_dim": 16,
    "attention_bias": True,
    "use_qk_norm": True,
    "moe_intermediate_size": 24,
    "n_shared_experts": 2,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 2.5,
}
_GLM4_MOE = replace(
    _LLAMA_OURS,
    num_layers=3,
    kv_channels=16,
    add_qkv_bias=True,
    qk_layernorm=True,
    rotary_percent=0.5,
    num_experts=8,
    moe_ffn_hidden_size=24,
    moe_layer_freq="[0]+[1]*2",
    moe_shared_expert_intermediate_size=48,
    moe_router_topk=3,
    moe_router_score_function="sigmoid",
    moe_router_enable_expert_bias=True,
    moe_router_num_groups=4,
    moe_router_group_topk=2,
    moe_router_topk_scaling_factor=2.5,
)
_LATENT_THEIRS = {
    **_GLM4_MOE_THEIRS,
    "num_key_value_heads": 4,
    "attention_bias": False,
    "q_lora_rank": 24,
    "kv_lora_rank": 20,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 6,
    "v_head_dim": 16,
}
for _key in ("head_dim", "use_qk_norm"):
    del _LATENT_THEIRS[_key]
_LATENT = replace(
    _GLM4_MOE,
    num_query_groups=4,
    kv_channels=None,
    rotary_percent=1.0,
    qk_layernorm=False,
    add_qkv_bias=False,
    multi_latent_attention=True,
    q_lora_rank=24,
    kv_lora_rank=20,
    qk_head_dim=10,
    qk_pos_emb_head_dim=6,
    v_head_dim=16,
)
_LATENT_BY_SOFTMAX = replace(
    _LATENT,
    v_head_dim=8,
    moe_router_score_function="softmax",
    moe_router_enable_expert_bias=False,
    moe_router_topk_scaling_factor=1.0,
    moe_router_num_groups=1,
    moe_router_group_topk=1,
)
_YARN_OF_SCORES = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
_QWEN35_THEIRS = {
    **_LLAMA_THEIRS,
    "head_dim": 16,
    "partial_rotary_factor": 0.5,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "layer_types": ["linear_attention", "full_attention"],
}
_QWEN35 = replace(
    _LLAMA_OURS,
    kv_channels=16,
    qk_layernorm=True,
    apply_layernorm_1p=True,
    attention_output_gate=True,
    rotary_percent=0.5,
    layer_types="linear,full",
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=16,
)
_QWEN35_MOE_THEIRS = {
    **_QWEN35_THEIRS,
    "num_experts": 6,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 40,
}
_QWEN35_EXPERTS: dict[str, Any] = {
    "num_experts": 6,
    "moe_router_topk": 3,
    "ffn_hidden_size": 24,
    "moe_shared_expert_intermediate_size": 40,
    "moe_shared_expert_gate": True,
}
_LAYER_TYPES = ["sliding_attention", "full_attention"]
_GEMMA_THEIRS: dict[str, Any] = {
    **_LLAMA_THEIRS,
    "head_dim": 16,
    "sliding_window": 5,
    "layer_types": _LAYER_TYPES,
    "tie_word_embeddings": True,
    "query_pre_attn_scalar": 24,
}
_GEMMA_OURS = replace(
    _LLAMA_OURS,
    activation="geglu_tanh",
    norm_placement="around",
    apply_layernorm_1p=True,
    scale_embeddings=True,
    untie_embeddings_and_output_weights=False,
    kv_channels=16,
    query_pre_attn_scalar=24,
    window_size=5,
    layer_types="sliding,full",
)
_GEMMA4_THEIRS: dict[str, Any] = {
    **_GEMMA_THEIRS,
    "global_head_dim": 24,
    "num_global_key_value_heads": 1,
    "attention_k_eq_v": True,
    "final_logit_softcapping": 1.5,
    "rope_parameters": {
        "full_attention": {"rope_theta": 100.0, "rope_type": "proportional", "partial_rotary_factor": 0.5},
        "sliding_attention": {"rope_theta": 30.0, "rope_type": "default"},
    },
}
del _GEMMA4_THEIRS["rope_theta"], _GEMMA4_THEIRS["query_pre_attn_scalar"]
_GEMMA4_OURS = replace(
    _GEMMA_OURS,
    apply_layernorm_1p=False,
    rope_scaling_type="proportional",
    rotary_percent=0.5,
    sliding_rotary_base=30.0,
    qk_layernorm=True,
    v_layernorm=True,
    full_kv_channels=24,
    query_pre_attn_scalar=1,
    final_logit_softcapping=1.5,
    layer_scalar=True,
)
FAMILIES = {
    "llama": _llama(),
    "llama-linear": _llama(rope_scaling_type="linear"),
    "llama-llama3": _llama(rope_scaling_type="llama3", rope_original_max_position_embeddings=64),
    "llama-yarn": _llama(rope_scaling_type="yarn", rope_original_max_position_embeddings=64),
    "qwen2": Family(
        "Qwen2Config",
        "Qwen2ForCausalLM",
        _LLAMA_THEIRS,
        replace(_LLAMA_OURS, add_qkv_bias=True),
    ),
    "qwen3": Family(
        "Qwen3Config",
        "Qwen3ForCausalLM",
        {**_LLAMA_THEIRS, "head_dim": 16, "rms_norm_eps": 1e-6},
        replace(_LLAMA_OURS, kv_channels=16, norm_epsilon=1e-6, qk_layernorm=True),
    ),
    "mistral-window": Family(
        "MistralConfig",
        "MistralForCausalLM",
        {**_LLAMA_THEIRS, "sliding_window": 5},
        replace(_LLAMA_OURS, window_size=5),
    ),
    "qwen2-window": Family(
        "Qwen2Config",
        "Qwen2ForCausalLM",
        {**_LLAMA_THEIRS, "use_sliding_window": True, "sliding_window": 7, "max_window_layers": 0},
        replace(_LLAMA_OURS, add_qkv_bias=True, window_size=7),
    ),
    "ministral": Family(
        "MinistralConfig",
        "MinistralForCausalLM",
        {**_LLAMA_THEIRS, "head_dim": 16, "sliding_window": 5, "layer_types": _LAYER_TYPES},
        replace(_LLAMA_OURS, kv_channels=16, window_size=5, layer_types="sliding,full"),
    ),
    "qwen3-layers": Family(
        "Qwen3Config",
        "Qwen3ForCausalLM",
        {**_LLAMA_THEIRS, "head_dim": 16, "use_sliding_window": True, "sliding_window": 7, "layer_types": _LAYER_TYPES},
        replace(_LLAMA_OURS, kv_channels=16, qk_layernorm=True, window_size=7, layer_types="sliding,full"),
    ),
    "qwen3_moe": Family(
        "Qwen3MoeConfig",
        "Qwen3MoeForCausalLM",
        {**_QWEN3_MOE_THEIRS, "norm_topk_prob": True},
        _QWEN3_MOE,
    ),
    "qwen3_moe-shares-of-all": Family(
        "Qwen3MoeConfig",
        "Qwen3MoeForCausalLM",
        {**_QWEN3_MOE_THEIRS, "norm_topk_prob": False},
        replace(_QWEN3_MOE, moe_router_pre_softmax=True),
    ),
    "gpt_oss": Family(
        "GptOssConfig",
        "GptOssForCausalLM",
        {**_LLAMA_THEIRS, "head_dim": 16, "num_local_experts": 6, "num_experts_per_tok": 3, "sliding_window": 5}
        | {"rope_parameters": {"rope_theta": 100.0, "original_max_position_embeddings": 64, **_YARN_WITHOUT_ROUNDING}},
        replace(
            _LLAMA_OURS,
            activation="swiglu_clamped",
            add_bias_linear=True,
            attention_sinks=True,
            kv_channels=16,
            num_experts=6,
            moe_router_topk=3,
            window_size=5,
            layer_types="sliding,full",
            rope_scaling_type="yarn",
            rope_scaling_factor=4.0,
            rope_original_max_position_embeddings=64,
            rope_truncate=False,
        ),
        gpt_oss_sources,
    ),
    "glm4_moe": Family("Glm4MoeConfig", "Glm4MoeForCausalLM", _GLM4_MOE_THEIRS, _GLM4_MOE, glm4_moe_sources),
    "glm4_moe-one-group-of-scores": Family(
        "Glm4MoeConfig",
        "Glm4MoeForCausalLM",
        {**_GLM4_MOE_THEIRS, "n_group": 1, "topk_group": 1, "norm_topk_prob": False, "attention_bias": False}
        | {"use_qk_norm": False},
        replace(
            _GLM4_MOE,
            moe_router_num_groups=1,
            moe_router_group_topk=1,
            moe_router_pre_softmax=True,
            add_qkv_bias=False,
            qk_layernorm=False,
        ),
        glm4_moe_sources,
    ),
    "glm4_moe_lite": Family("Glm4MoeLiteConfig", "Glm4MoeLiteForCausalLM", _LATENT_THEIRS, _LATENT, deepseek_sources),
    "deepseek_v3": Family(
        "DeepseekV3Config",
        "DeepseekV3ForCausalLM",
        {**_LATENT_THEIRS, "v_head_dim": 10, "rope_parameters": {**_YARN_OF_SCORES, "rope_theta": 100.0}}
        | {"first_k_dense_replace": 1, "rms_norm_eps": 1e-3},
        replace(
            _LATENT,
            v_head_dim=10,
            norm_epsilon=1e-3,
            rope_scaling_type="yarn",
            rope_scaling_factor=4.0,
            rope_original_max_position_embeddings=64,
            rope_attention_factor=1.0,
            mscale_all_dim=1.0,
        ),
        deepseek_sources,
    ),
    "deepseek_v2": Family(
        "DeepseekV2Config",
        "DeepseekV2ForCausalLM",
        {**_LATENT_THEIRS, "v_head_dim": 8, "q_lora_rank": None, "routed_scaling_factor": 1.0}
        | {"first_k_dense_replace": 1},
        replace(_LATENT_BY_SOFTMAX, q_lora_rank=None, moe_router_pre_softmax=True),
        deepseek_sources,
    ),
    "mistral4": Family(
        "Mistral4Config",
        "Mistral4ForCausalLM",
        {**_LATENT_THEIRS, "v_head_dim": 8, "routed_scaling_factor": 1.0, "n_group": 1, "topk_group": 1}
        | {
            "pad_token_id": None,
            "first_k_dense_replace": 1,
            "rope_parameters": {**_YARN_OF_SCORES, "rope_theta": 100.0, "llama_4_scaling_beta": 0.3}
            | {"original_max_position_embeddings": 8},
        },
        replace(
            _LATENT_BY_SOFTMAX,
            rope_scaling_type="yarn",
            rope_scaling_factor=4.0,
            rope_original_max_position_embeddings=8,
            rope_attention_factor=1.0,
            mscale_all_dim=1.0,
            rope_llama_4_scaling_beta=0.3,
        ),
        deepseek_sources,
    ),
    "qwen3_5_text": Family("Qwen3_5TextConfig", "Qwen3_5ForCausalLM", _QWEN35_THEIRS, _QWEN35, qwen35_sources),
    "qwen3_5_moe_text": Family(
        "Qwen3_5MoeTextConfig",
        "Qwen3_5MoeForCausalLM",
        _QWEN35_MOE_THEIRS,
        replace(_QWEN35, **_QWEN35_EXPERTS),
        qwen35_sources,
    ),
    "qwen3_next": Family(
        "Qwen3NextConfig",
        "Qwen3NextForCausalLM",
        {**_QWEN35_MOE_THEIRS, "norm_topk_prob": False},
        replace(_QWEN35, **_QWEN35_EXPERTS, moe_router_pre_softmax=True),
        qwen3_next_sources,
    ),
    "mixtral": Family(
        "MixtralConfig",
        "MixtralForCausalLM",
        {**_LLAMA_THEIRS, "num_local_experts": 4, "sliding_window": 7},
        replace(_LLAMA_OURS, num_experts=4, window_size=7),
    ),
    "minimax_m2": Family(
        "MiniMaxM2Config",
        "MiniMaxM2ForCausalLM",
        {**_LLAMA_THEIRS, "head_dim": 16, "num_local_experts": 6, "num_experts_per_tok": 3, "rotary_dim": 8},
        replace(
            _LLAMA_OURS,
            kv_channels=16,
            rotary_percent=0.5,
            qk_layernorm=True,
            qk_layernorm_across_heads=True,
            num_experts=6,
            moe_router_topk=3,
            moe_router_score_function="sigmoid",
            moe_router_enable_expert_bias=True,
        ),
        minimax_m2_sources,
    ),
    "gemma2": Family(
        "Gemma2Config",
        "Gemma2ForCausalLM",
        _GEMMA_THEIRS | {"attn_logit_softcapping": 1.5, "final_logit_softcapping": 1.5},
        replace(_GEMMA_OURS, attn_logit_softcapping=1.5, final_logit_softcapping=1.5),
        gemma3_sources,
    ),
    "gemma3_text": Family(
        "Gemma3TextConfig",
        "Gemma3ForCausalLM",
        _GEMMA_THEIRS | {"rope_local_base_freq": 30.0, "rope_scaling": {"rope_type": "linear", "factor": 4.0}},
        replace(
            _GEMMA_OURS,
            qk_layernorm=True,
            sliding_rotary_base=30.0,
            rope_scaling_type="linear",
            rope_scaling_factor=4.0,
        ),
        gemma3_sources,
    ),
    "gemma4_text": Family(
        "Gemma4TextConfig",
        "Gemma4ForCausalLM",
        _GEMMA4_THEIRS | {"hidden_size_per_layer_input": 0},
        replace(_GEMMA4_OURS, full_num_query_groups=1, full_keys_as_values=True),
        gemma4_sources,
    ),
    "gemma4_unified_text": Family(
        "Gemma4UnifiedTextConfig",
        "Gemma4UnifiedForCausalLM",
        _GEMMA4_THEIRS | {"attention_k_eq_v": False},
        _GEMMA4_OURS,
        gemma4_sources,
    ),
    "olmo3": Family(
        "Olmo3Config",
        "Olmo3ForCausalLM",
        {**_LLAMA_THEIRS, "sliding_window": 5, "layer_types": _LAYER_TYPES}
        | {
            "rope_parameters": {
                "full_attention": {"rope_theta": 100.0, "original_max_position_embeddings": 64}
                | {"rope_type": "yarn", "factor": 4.0},
                "sliding_attention": {"rope_theta": 100.0, "rope_type": "default"},
            }
        },
        replace(
            _LLAMA_OURS,
            norm_placement="after",
            qk_layernorm=True,
            qk_layernorm_across_heads=True,
            window_size=5,
            layer_types="sliding,full",
            sliding_rotary_base=100.0,
            rope_scaling_type="yarn",
            rope_scaling_factor=4.0,
            rope_original_max_position_embeddings=64,
        ),
        olmo3_sources,
    ),
    "ministral3": Family(
        "Ministral3Config",
        "Ministral3ForCausalLM",
        {**_LLAMA_THEIRS, "head_dim": 16, "pad_token_id": None}
        | {
            "rope_parameters": {"rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0}
            | {"original_max_position_embeddings": 8, "llama_4_scaling_beta": 0.3, "attention_factor": 1.0}
        },
        replace(
            _LLAMA_OURS,
            kv_channels=16,
            rope_scaling_type="yarn",
            rope_scaling_factor=4.0,
            rope_original_max_position_embeddings=8,
            rope_attention_factor=1.0,
            rope_llama_4_scaling_beta=0.3,
        ),
    ),
    "olmo2": Family(
        "Olmo2Config",
        "Olmo2ForCausalLM",
        _LLAMA_THEIRS,
        replace(_LLAMA_OURS, norm_placement="after", qk_layernorm=True, qk_layernorm_across_heads=True),
        olmo3_sources,
    ),
    "olmoe": Family(
        "OlmoeConfig",
        "OlmoeForCausalLM",
        {**_LLAMA_THEIRS, "num_experts": 6, "num_experts_per_tok": 3},
        replace(
            _LLAMA_OURS,
            qk_layernorm=True,
            qk_layernorm_across_heads=True,
            num_experts=6,
            moe_router_topk=3,
            moe_router_pre_softmax=True,
        ),
    ),
    "phi3": Family(
        "Phi3Config",
        "Phi3ForCausalLM",
        {**_LLAMA_THEIRS, "sliding_window": 5, "pad_token_id": None, "partial_rotary_factor": 0.5}
        | {"rope_scaling": {"type": "longrope", "short_factor": [1.5, 2.0], "long_factor": [2.0, 9.0]}}
        | {"original_max_position_embeddings": 8},
        replace(
            _LLAMA_OURS,
            window_size=5,
            rotary_percent=0.5,
            rope_scaling_type="longrope",
            rope_scaling_factor=32.0,
            rope_original_max_position_embeddings=8,
            rope_short_factor="1.5,2",
            rope_long_factor="2,9",
        ),
        phi3_sources,
    ),
    "seed_oss": Family(
        "SeedOssConfig",
        "SeedOssForCausalLM",
        {**_LLAMA_THEIRS, "head_dim": 16},
        replace(_LLAMA_OURS, kv_channels=16, add_qkv_bias=True),
    ),
    "exaone4": Family(
        "Exaone4Config",
        "Exaone4ForCausalLM",
        {**_LLAMA_THEIRS, "sliding_window": 5, "layer_types": _LAYER_TYPES},
        replace(
            _LLAMA_OURS,
            norm_placement="after",
            qk_layernorm=True,
            window_size=5,
            layer_types="sliding,full",
            no_rope_freq="[0,1]",
        ),
        olmo3_sources,
    ),
    "smollm3": Family(
        "SmolLM3Config",
        "SmolLM3ForCausalLM",
        {**_LLAMA_THEIRS, "no_rope_layer_interval": 2, "pad_token_id": None},
        replace(_LLAMA_OURS, no_rope_freq="[0,1]"),
    ),
    "gpt2": Family(
        "GPT2Config",
        "GPT2LMHeadModel",
        {"n_embd": 32, "n_head": 4, "n_layer": 2, "n_positions": 64, "vocab_size": VOCAB}
        | {"bos_token_id": 0, "eos_token_id": 0},
        ModelConfig(
            num_layers=2,
            hidden_size=32,
            num_attention_heads=4,
            vocab_size=VOCAB,
            activation="gelu_tanh",
            position_embedding_type="learned_absolute",
            max_position_embeddings=64,
            add_bias_linear=True,
        ),
        gpt2_sources,
    ),
}


def make_batch() -> Microbatch:
    """Random tokens, labels and loss weights."""
    generator = torch.Generator().manual_seed(3)
    tokens, labels = torch.randint(0, VOCAB, (2, SEQ_LENGTH, BATCH), generator=generator)
    positions = torch.arange(SEQ_LENGTH).unsqueeze(1).expand(-1, BATCH).contiguous()
    weight = torch.rand(SEQ_LENGTH, BATCH, generator=generator, dtype=torch.float64)
    return Microbatch(tokens, labels, positions, weight, positions, None)


def build_theirs(family: Family, dtype: torch.dtype, attention: str) -> Any:
    """Their model; weights are random everywhere and exact in fp32, so all dtypes start from the same."""
    config = getattr(transformers, family.config_class)(**family.theirs, attn_implementation=attention)
    config._experts_implementation = "eager"  # the others have no fp64
    model = getattr(transformers, family.model_class)(config).to(dtype).eval()
    generator = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = 0.2 * torch.randn(parameter.shape, generator=generator)
            is_norm_weight = parameter.ndim == 1 and name.endswith("weight")
            parameter.copy_(noise + 1.0 if is_norm_weight else noise)
        for name, buffer in constants(model):
            is_factor = name.endswith("layer_scalar")
            buffer.copy_(is_factor + (0.2 if is_factor else 0.05) * torch.randn(buffer.shape, generator=generator))
    return model


def constants(model: Any) -> list[tuple[str, Tensor]]:
    """Buffers with which files are written: biases by which experts are chosen, and factors on layers' outputs."""
    ends = ("e_score_correction_bias", "layer_scalar")
    return [(name, buffer) for name, buffer in model.named_buffers() if name.endswith(ends)]


ROUTER_LOSSES = {"moe_aux_loss_coeff": 0.3, "moe_z_loss_coeff": 0.02}


def their_router_losses(model: Any, scores: list[Tensor]) -> Tensor:
    """Sums over layers of what transformers calls load_balancing_loss, whose shares of the load sum to K, not to 1, and
    of the z-loss; of the scores of all layers, [t, E] each."""
    config, balance = model.config, transformers.models.mixtral.modeling_mixtral.load_balancing_loss_func
    top_k = config.num_experts_per_tok
    found = scores[0].new_zeros(())
    for each in scores:
        found += ROUTER_LOSSES["moe_aux_loss_coeff"] * balance((each,), each.shape[-1], top_k) / top_k
        found += ROUTER_LOSSES["moe_z_loss_coeff"] * each.logsumexp(-1).square().mean()
    return found


def listen_to_scores(model: Any) -> list[Tensor]:
    """Filled in each forward of their model: the scores of each layer's router, before any softmax."""
    scores: list[Tensor] = []

    def note(router: Any, args: tuple[Tensor, ...], _: object) -> None:
        x = args[0].reshape(-1, router.weight.shape[1])
        scores.append(F.linear(x, router.weight, getattr(router, "bias", None)))

    for layer in model.model.layers:
        router = layer.mlp.router if hasattr(layer.mlp, "router") else layer.mlp.gate
        router.register_forward_hook(note)
    return scores


@functools.cache
def run_theirs(
    name: str, dtype: torch.dtype, *, wide: bool, router_losses: bool = False
) -> tuple[Result, dict[str, Tensor]]:
    """Their result on make_batch(), gradients under our names; and the weights."""
    family, batch = FAMILIES[name], make_batch()
    with Wide() if wide else nullcontext():
        has_sdpa = not (family.ours.attention_sinks or family.ours.attn_logit_softcapping)
        model = build_theirs(family, dtype, "sdpa" if has_sdpa and not wide else "eager")
        scores = listen_to_scores(model) if router_losses else []
        logits = model(input_ids=batch.tokens.t(), use_cache=False).logits.transpose(0, 1)
        of_routers = their_router_losses(model, scores) if router_losses else 0.0
    losses = F.cross_entropy(logits.flatten(0, 1), batch.labels.flatten(), reduction="none")
    losses = losses.view(SEQ_LENGTH, BATCH)
    loss = (losses * batch.loss_weight).sum()
    (loss + of_routers).backward()
    parameters = dict(model.named_parameters())
    sources = family.sources(family.ours)
    others = dict(constants(model))
    of_parameters = {name: source for name, source in sources.items() if source.name not in others}
    gradients = to_global({name: p.grad for name, p in parameters.items()}, of_parameters)
    weights = to_global({name: p.detach() for name, p in (parameters | others).items()}, sources)
    assert sum(weights[name].numel() for name in of_parameters) == sum(p.numel() for p in parameters.values())
    return Result(logits.detach(), losses.detach(), loss.detach(), gradients), weights


def run_ours(name: str, dtype: str, weights: dict[str, Tensor], tp: int = 1, **flags: Any) -> Result:
    values = {"seq_length": SEQ_LENGTH, "micro_batch_size": BATCH, "global_batch_size": BATCH}
    config = RunConfig(model=FAMILIES[name].ours).override(
        {**values, "params_dtype": dtype, "device": "cpu", "loss_chunk_size": 24, "mock_data": True, **flags}
    )
    return run_once(config, make_batch(), weights, tp, passes=2 if flags else 1)


def errors(actual: Result, expected: Result) -> dict[str, float]:
    """Of each tensor, in the L2 norm.

    The gradient of a key bias without RoPE is zero (softmax ignores a common shift): what is left is
    rounding noise, which must be as small beside the query bias's gradient.
    """
    pairs = {
        "logits": (actual.logits, expected.logits),
        "losses": (actual.losses, expected.losses),
        "loss": (actual.loss, expected.loss),
        **{name: (actual.gradients[name], value) for name, value in expected.gradients.items()},
    }
    assert actual.gradients.keys() == expected.gradients.keys()
    found = {}
    for name, (mine, true) in pairs.items():
        scale = true.norm().item()
        if name.endswith("k.bias") and scale < 1e-10:
            scale = expected.gradients[name.replace("k.bias", "q.bias")].norm().item()
        found[name] = (mine.double() - true).norm().item() / scale
    return found


def assert_below(found: dict[str, float], bound: float) -> None:
    worst = max(found, key=lambda name: found[name])
    assert found[worst] < bound, f"{worst}: relative error {found[worst]:.1e} is not below {bound:.0e}"


@pytest.mark.parametrize("name", FAMILIES)
def test_fp64_equals_theirs_in_true_fp64(name: str) -> None:
    """1e-10 in fp64 throughout."""
    truth, weights = run_theirs(name, torch.float64, wide=True)
    assert_below(errors(run_ours(name, "fp64", weights), truth), 1e-10)


@pytest.mark.parametrize("name", FAMILIES)
def test_fp32_is_as_accurate_as_theirs(name: str) -> None:
    """fp32, error against fp64 at most twice theirs: logits, losses, gradients (mean square over tensors)."""
    truth, _ = run_theirs(name, torch.float64, wide=True)
    theirs, weights = run_theirs(name, torch.float32, wide=False)
    ours, allowed = (_summary(errors(result, truth)) for result in (run_ours(name, "fp32", weights), theirs))
    for kind, error in ours.items():
        assert error <= 2 * allowed[kind], f"{kind}: our fp32 error is {error:.1e}, theirs {allowed[kind]:.1e}"


def _summary(found: dict[str, float]) -> dict[str, float]:
    kinds = {kind: found.pop(kind) for kind in ("logits", "losses")}
    del found["loss"]  # one number may be right by luck
    return kinds | {"gradients": math.sqrt(sum(error**2 for error in found.values()) / len(found))}


IN_FULL = ("gpt_oss", "glm4_moe", "qwen3_5_moe_text", "olmo3")
"""Families whose tp 2 equals one process in tests/distributed/test_layouts.py."""


@pytest.mark.parametrize(
    "name", ["gpt2", "gemma2", "gemma3_text", *(pytest.param(name, marks=pytest.mark.full) for name in IN_FULL)]
)
def test_tensor_parallel_equals_theirs(name: str) -> None:
    """tp 2, 1e-10 in fp64: logits, losses and every weight's gradient put together from the ranks."""
    truth, weights = run_theirs(name, torch.float64, wide=True)
    assert_below(errors(run_ours(name, "fp64", weights, tp=2), truth), 1e-10)


@pytest.mark.parametrize(("name", "tp"), [("qwen3_moe-shares-of-all", 2), ("gpt_oss", 1)])
def test_router_losses_have_the_gradients_of_theirs(name: str, tp: int) -> None:
    """1e-10 in fp64, once the load of the step before is that of the same tokens; they are no part of the loss."""
    truth, weights = run_theirs(name, torch.float64, wide=True, router_losses=True)
    ours = run_ours(name, "fp64", weights, tp, **ROUTER_LOSSES)
    assert_below(errors(ours, truth), 1e-10)
    without, _ = run_theirs(name, torch.float64, wide=True)
    moved = errors(ours, without)
    assert moved["loss"] < 1e-10 and moved["layers.0.mlp.router.weight"] > 1e-3
