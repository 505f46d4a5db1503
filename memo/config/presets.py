"""Models by name: the paper's, the ones users start from, and tiny ones of each family for tests.

Sources: MEMO table 2 (gpt-7b .. gpt-65b); the published config.json of Llama 3.1 and Qwen3.
"""

import difflib
from dataclasses import replace

from memo.config.model import ModelConfig
from memo.errors import ConfigError


def _paper_gpt(num_layers: int, hidden_size: int, heads: int) -> ModelConfig:
    """The paper counts P = 12 n h^2 + v h: tied embedding, no biases, no position table (rotary)."""
    return ModelConfig(num_layers=num_layers, hidden_size=hidden_size, num_attention_heads=heads, vocab_size=50257)


_LLAMA = ModelConfig(
    normalization="RMSNorm",
    activation="swiglu",
    untie_embeddings_and_output_weights=True,
)

_LLAMA_31 = replace(
    _LLAMA,
    num_query_groups=8,
    vocab_size=128256,
    max_position_embeddings=131072,
    rotary_base=500000.0,
    rope_scaling_type="llama3",
    rope_scaling_factor=8.0,
    rope_original_max_position_embeddings=8192,
)

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
    "llama-3.1-8b": replace(_LLAMA_31, num_layers=32, hidden_size=4096, num_attention_heads=32, ffn_hidden_size=14336),
    "llama-3.1-70b": replace(_LLAMA_31, num_layers=80, hidden_size=8192, num_attention_heads=64, ffn_hidden_size=28672),
    "qwen3-tiny": replace(
        _LLAMA,
        num_query_groups=2,
        kv_channels=32,
        ffn_hidden_size=352,
        norm_epsilon=1e-6,
        rotary_base=1e6,
        qk_layernorm=True,
    ),
    "qwen3-8b": replace(
        _LLAMA,
        num_layers=36,
        hidden_size=4096,
        num_attention_heads=32,
        num_query_groups=8,
        kv_channels=128,
        ffn_hidden_size=12288,
        vocab_size=151936,
        max_position_embeddings=40960,
        norm_epsilon=1e-6,
        rotary_base=1e6,
        qk_layernorm=True,
    ),
}


def preset(name: str) -> ModelConfig:
    """Raises ConfigError that names the nearest preset."""
    if name in PRESETS:
        return PRESETS[name]
    near = difflib.get_close_matches(str(name), PRESETS, n=1, cutoff=0.3)
    hint = f"did you mean '{near[0]}'? " if near else ""
    raise ConfigError(f"--model {name}: no such preset: {hint}use one of {', '.join(PRESETS)}")
