"""Facts that families of models of Hugging Face share: keys of a config.json and their defaults, and the two families
from which most others differ in little."""

from memo.config import hugging_face_tensors as tensors
from memo.config.hugging_face_family import ALL_BIASES, Biases, Family

SIZES = {
    "num_layers": "num_hidden_layers",
    "hidden_size": "hidden_size",
    "num_attention_heads": "num_attention_heads",
    "ffn_hidden_size": "intermediate_size",
    "vocab_size": "vocab_size",
    "max_position_embeddings": "max_position_embeddings",
}
ROPE_NAMES = {
    **SIZES,
    "num_query_groups": "num_key_value_heads",
    "kv_channels": "head_dim",
    "init_method_std": "initializer_range",
    "rotary_base": "rope_theta",
}
LLAMA_NAMES = {**ROPE_NAMES, "norm_epsilon": "rms_norm_eps"}

TIED = {"tie_word_embeddings": True}
RMS = {"normalization": "RMSNorm"}

LLAMA = Family(
    architecture="LlamaForCausalLM",
    names=LLAMA_NAMES,
    biases=Biases("attention_bias", "attention_bias", "mlp_bias"),
    tensors=tensors.LLAMA,
)
GPT2 = Family(
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
    defaults=TIED,
    fixed={"position_embedding_type": "learned_absolute"},
    gated=False,
    biases=ALL_BIASES,
)
