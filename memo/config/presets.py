"""Models by name: the paper's, those that people name, and tiny ones of each family for tests.

Sources: MEMO table 2 (gpt-7b .. gpt-65b); the published config.json of all others, those of Qwen2.5 of its -Instruct
models, of Mistral 7B that of v0.3, of Mistral Small that of 2501.
"""

from dataclasses import replace
from typing import Any

from memo.config.model import ModelConfig


def _paper_gpt(num_layers: int, hidden_size: int, heads: int) -> ModelConfig:
    """The paper counts P = 12 n h^2 + v h: tied embedding, no biases, no position table (rotary)."""
    return ModelConfig(num_layers=num_layers, hidden_size=hidden_size, num_attention_heads=heads, vocab_size=50257)


def _sized(
    family: ModelConfig, layers: int, hidden: int, heads: int, groups: int, ffn: int, **others: Any
) -> ModelConfig:
    return replace(
        family,
        num_layers=layers,
        hidden_size=hidden,
        num_attention_heads=heads,
        num_query_groups=groups,
        ffn_hidden_size=ffn,
        **others,
    )


_LLAMA = ModelConfig(
    normalization="RMSNorm",
    activation="swiglu",
    untie_embeddings_and_output_weights=True,
)
_LLAMA_2 = replace(_LLAMA, vocab_size=32000, max_position_embeddings=4096)
_LLAMA_3 = replace(_LLAMA, vocab_size=128256, max_position_embeddings=8192, rotary_base=500000.0)
_LLAMA_31 = replace(
    _LLAMA_3,
    max_position_embeddings=131072,
    rope_scaling_type="llama3",
    rope_scaling_factor=8.0,
    rope_original_max_position_embeddings=8192,
)
_LLAMA_32 = replace(_LLAMA_31, rope_scaling_factor=32.0, untie_embeddings_and_output_weights=False)
_MISTRAL = replace(_LLAMA, vocab_size=32768, max_position_embeddings=32768, rotary_base=1e6)
_QWEN = replace(_LLAMA, norm_epsilon=1e-6, rotary_base=1e6)
_QWEN_25 = replace(_QWEN, vocab_size=152064, max_position_embeddings=32768, add_qkv_bias=True)
_QWEN_25_SMALL = replace(_QWEN_25, vocab_size=151936, untie_embeddings_and_output_weights=False)
_QWEN_3 = replace(_QWEN, vocab_size=151936, max_position_embeddings=40960, kv_channels=128, qk_layernorm=True)
_QWEN_3_MOE = replace(_QWEN_3, num_experts=128, moe_router_topk=8)
_GPT_OSS = replace(
    _LLAMA,
    activation="swiglu_clamped",
    add_bias_linear=True,
    attention_sinks=True,
    kv_channels=64,
    moe_router_topk=4,
    window_size=128,
    layer_types="sliding,full",
    max_position_embeddings=131072,
    rotary_base=150000.0,
    rope_scaling_type="yarn",
    rope_scaling_factor=32.0,
    rope_original_max_position_embeddings=4096,
    rope_truncate=False,
)
_GEMMA_3 = ModelConfig(
    normalization="RMSNorm",
    norm_epsilon=1e-6,
    norm_placement="around",
    apply_layernorm_1p=True,
    activation="geglu_tanh",
    scale_embeddings=True,
    qk_layernorm=True,
    kv_channels=256,
    query_pre_attn_scalar=256,
    window_size=512,
    layer_types="sliding,sliding,sliding,sliding,sliding,full",
    max_position_embeddings=32768,
    rotary_base=1e6,
    sliding_rotary_base=10000.0,
)
_GEMMA_3_SEEING = replace(  # the text of models that see images
    _GEMMA_3,
    vocab_size=262208,
    window_size=1024,
    max_position_embeddings=131072,
    rope_scaling_type="linear",
    rope_scaling_factor=8.0,
)
_QWEN_35 = replace(
    _QWEN_3,
    vocab_size=248320,
    kv_channels=256,
    apply_layernorm_1p=True,
    attention_output_gate=True,
    rotary_base=1e7,
    rotary_percent=0.25,
    max_position_embeddings=262144,
    layer_types="linear,linear,linear,full",
    linear_num_key_heads=16,
    linear_num_value_heads=32,
)
_QWEN_35_MOE = replace(
    _QWEN_35,
    num_experts=256,
    moe_router_topk=8,
    moe_shared_expert_intermediate_size=512,
    moe_shared_expert_gate=True,
)
_GLM_45 = replace(
    _LLAMA,
    kv_channels=128,
    add_qkv_bias=True,
    rotary_base=1e6,
    rotary_percent=0.5,
    max_position_embeddings=131072,
    vocab_size=151552,
    moe_router_topk=8,
    moe_router_score_function="sigmoid",
    moe_router_enable_expert_bias=True,
)
_OLMO_3 = replace(
    _LLAMA,
    norm_epsilon=1e-6,
    norm_placement="after",
    qk_layernorm=True,
    qk_layernorm_across_heads=True,
    window_size=4096,
    layer_types="sliding,sliding,sliding,full",
    max_position_embeddings=65536,
    rotary_base=500000.0,
    sliding_rotary_base=500000.0,
    rope_scaling_type="yarn",
    rope_scaling_factor=8.0,
    rope_original_max_position_embeddings=8192,
)
_QWEN_3_SMALL = replace(_QWEN_3, untie_embeddings_and_output_weights=False)

PRESETS: dict[str, ModelConfig] = {
    "gpt-tiny": ModelConfig(),
    "gpt-7b": _paper_gpt(32, 4096, 32),
    "gpt-13b": _paper_gpt(40, 5120, 40),
    "gpt-30b": _paper_gpt(48, 7168, 56),
    "gpt-65b": _paper_gpt(80, 8192, 64),
    "gpt2-tiny": ModelConfig(
        activation="gelu_tanh",
        position_embedding_type="learned_absolute",
        add_bias_linear=True,
    ),
    "llama-tiny": replace(_LLAMA, num_query_groups=2, ffn_hidden_size=352),
    "tinyllama-1.1b": _sized(_LLAMA_2, 22, 2048, 32, 4, 5632, max_position_embeddings=2048),
    "llama-2-7b": _sized(_LLAMA_2, 32, 4096, 32, 32, 11008),
    "llama-2-13b": _sized(_LLAMA_2, 40, 5120, 40, 40, 13824),
    "llama-2-70b": _sized(_LLAMA_2, 80, 8192, 64, 8, 28672),
    "llama-3-8b": _sized(_LLAMA_3, 32, 4096, 32, 8, 14336),
    "llama-3-70b": _sized(_LLAMA_3, 80, 8192, 64, 8, 28672),
    "llama-3.1-8b": _sized(_LLAMA_31, 32, 4096, 32, 8, 14336),
    "llama-3.1-70b": _sized(_LLAMA_31, 80, 8192, 64, 8, 28672),
    "llama-3.1-405b": _sized(_LLAMA_31, 126, 16384, 128, 8, 53248),
    "llama-3.2-1b": _sized(_LLAMA_32, 16, 2048, 32, 8, 8192),
    "llama-3.2-3b": _sized(_LLAMA_32, 28, 3072, 24, 8, 8192),
    "llama-3.3-70b": _sized(_LLAMA_31, 80, 8192, 64, 8, 28672),
    "mistral-7b": _sized(_MISTRAL, 32, 4096, 32, 8, 14336),
    "mistral-small-24b": _sized(_MISTRAL, 40, 5120, 32, 8, 32768, kv_channels=128, vocab_size=131072, rotary_base=1e8),
    "qwen2.5-0.5b": _sized(_QWEN_25_SMALL, 24, 896, 14, 2, 4864),
    "qwen2.5-1.5b": _sized(_QWEN_25_SMALL, 28, 1536, 12, 2, 8960),
    "qwen2.5-3b": _sized(_QWEN_25_SMALL, 36, 2048, 16, 2, 11008),
    "qwen2.5-7b": _sized(_QWEN_25, 28, 3584, 28, 4, 18944),
    "qwen2.5-14b": _sized(_QWEN_25, 48, 5120, 40, 8, 13824),
    "qwen2.5-32b": _sized(_QWEN_25, 64, 5120, 40, 8, 27648),
    "qwen2.5-72b": _sized(_QWEN_25, 80, 8192, 64, 8, 29568),
    "qwen3-tiny": replace(_QWEN, num_query_groups=2, kv_channels=32, ffn_hidden_size=352, qk_layernorm=True),
    "qwen3-0.6b": _sized(_QWEN_3_SMALL, 28, 1024, 16, 8, 3072),
    "qwen3-1.7b": _sized(_QWEN_3_SMALL, 28, 2048, 16, 8, 6144),
    "qwen3-4b": _sized(_QWEN_3_SMALL, 36, 2560, 32, 8, 9728),
    "qwen3-8b": _sized(_QWEN_3, 36, 4096, 32, 8, 12288),
    "qwen3-14b": _sized(_QWEN_3, 40, 5120, 40, 8, 17408),
    "qwen3-32b": _sized(_QWEN_3, 64, 5120, 64, 8, 25600),
    "qwen3-moe-tiny": replace(
        _QWEN, num_query_groups=2, kv_channels=32, ffn_hidden_size=64, qk_layernorm=True, num_experts=8
    ),
    "gpt-oss-tiny": replace(
        _GPT_OSS, num_query_groups=2, ffn_hidden_size=64, num_experts=8, kv_channels=32, window_size=128
    ),
    "gpt-oss-20b": _sized(_GPT_OSS, 24, 2880, 64, 8, 2880, num_experts=32, vocab_size=201088),
    "gpt-oss-120b": _sized(_GPT_OSS, 36, 2880, 64, 8, 2880, num_experts=128, vocab_size=201088),
    "gemma-3-tiny": replace(
        _GEMMA_3,
        num_query_groups=2,
        ffn_hidden_size=352,
        kv_channels=32,
        query_pre_attn_scalar=24,
        window_size=128,
        layer_types="sliding,full",
    ),
    "gemma-3-1b": _sized(_GEMMA_3, 26, 1152, 4, 1, 6912, vocab_size=262144),
    "gemma-3-4b": _sized(_GEMMA_3_SEEING, 34, 2560, 8, 4, 10240),
    "gemma-3-12b": _sized(_GEMMA_3_SEEING, 48, 3840, 16, 8, 15360),
    "gemma-3-27b": _sized(
        replace(_GEMMA_3_SEEING, kv_channels=128, query_pre_attn_scalar=168), 62, 5376, 32, 16, 21504
    ),
    "qwen3.5-tiny": replace(
        _QWEN_35,
        vocab_size=None,
        num_query_groups=2,
        ffn_hidden_size=352,
        kv_channels=32,
        layer_types="linear,full",
        linear_num_key_heads=4,
        linear_num_value_heads=8,
        linear_key_head_dim=16,
    ),
    "qwen3.5-4b": _sized(replace(_QWEN_35, untie_embeddings_and_output_weights=False), 32, 2560, 16, 4, 9216),
    "qwen3.5-9b": _sized(_QWEN_35, 32, 4096, 16, 4, 12288),
    "qwen3.5-27b": _sized(replace(_QWEN_35, linear_num_value_heads=48), 64, 5120, 24, 4, 17408),
    "qwen3.5-35b-a3b": _sized(_QWEN_35_MOE, 40, 2048, 16, 2, 512),
    "qwen3-next-80b-a3b": _sized(
        replace(_QWEN_35_MOE, vocab_size=151936, num_experts=512, moe_router_topk=10), 48, 2048, 16, 2, 512
    ),
    "glm-4.5-tiny": replace(
        _GLM_45,
        num_query_groups=2,
        kv_channels=32,
        ffn_hidden_size=352,
        vocab_size=None,
        max_position_embeddings=None,
        qk_layernorm=True,
        num_experts=8,
        moe_ffn_hidden_size=64,
        moe_layer_freq="[0]*1+[1]*3",
        moe_shared_expert_intermediate_size=64,
        moe_router_topk=2,
        moe_router_num_groups=4,
        moe_router_group_topk=2,
        moe_router_topk_scaling_factor=2.5,
    ),
    "glm-4.5-air": _sized(
        _GLM_45,
        *(46, 4096, 96, 8, 10944),
        num_experts=128,
        moe_ffn_hidden_size=1408,
        moe_layer_freq="[0]*1+[1]*45",
        moe_shared_expert_intermediate_size=1408,
    ),
    "olmo-3-tiny": replace(
        _OLMO_3, num_query_groups=2, ffn_hidden_size=352, window_size=128, layer_types="sliding,full"
    ),
    "olmo-3-7b": _sized(_OLMO_3, 32, 4096, 32, 32, 11008, vocab_size=100278),
    "olmo-3-32b": _sized(_OLMO_3, 64, 5120, 40, 8, 27648, vocab_size=100278),
    "qwen3-30b-a3b": _sized(_QWEN_3_MOE, 48, 2048, 32, 4, 768),
    "qwen3-235b-a22b": _sized(_QWEN_3_MOE, 94, 4096, 64, 4, 1536),
    "mixtral-8x7b": _sized(replace(_MISTRAL, vocab_size=32000, num_experts=8), 32, 4096, 32, 8, 14336),
    "mixtral-8x22b": _sized(replace(_MISTRAL, max_position_embeddings=65536, num_experts=8), 56, 6144, 48, 8, 16384),
    "smollm2-1.7b": _sized(
        replace(_LLAMA, vocab_size=49152, max_position_embeddings=8192, rotary_base=130000.0),
        *(24, 2048, 32, 32, 8192),
        untie_embeddings_and_output_weights=False,
    ),
}


PUBLISHED = [name for name in PRESETS if not name.endswith("-tiny")]
"""Those that messages list; tiny ones are for tests and examples."""


def listed() -> str:
    """The published ones, a family's sizes behind its first: llama-2-7b, -13b."""
    parts, last = [], ""
    for name in PUBLISHED:
        family, _, size = name.rpartition("-")
        parts.append(f"-{size}" if family == last else name)
        last = family
    return ", ".join(parts)


def preset_name(name: str) -> str | None:
    """The preset that is called so, in letters of any case; None where there is none."""
    return next((each for each in (name, name.lower()) if each in PRESETS), None)
