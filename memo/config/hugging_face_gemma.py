"""Gemma 2 and Gemma 3 (the models of text): norms around each block, which multiply by 1 + weight, scaled embeddings,
windows, and caps of scores and logits."""

from dataclasses import replace

from memo.config import hugging_face_tensors as tensors
from memo.config.hugging_face_family import NO_BIASES, SOFTCAPS
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
