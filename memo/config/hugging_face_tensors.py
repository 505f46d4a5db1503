"""What the weights of each family of Hugging Face are called (memo.config.hugging_face_families)."""

from memo.config.hugging_face_family import TensorNames

_NORMS_AND_ATTENTION = {
    "attention_norm": "input_layernorm",
    "attention.q": "self_attn.q_proj",
    "attention.k": "self_attn.k_proj",
    "attention.v": "self_attn.v_proj",
    "attention.q_norm": "self_attn.q_norm",
    "attention.k_norm": "self_attn.k_norm",
    "attention.sinks": "self_attn.sinks",
    "attention.projection": "self_attn.o_proj",
    "mlp_norm": "post_attention_layernorm",
}
_ENDS = {"embedding": "model.embed_tokens", "final_norm": "model.norm", "head": "lm_head"}
LLAMA_TENSORS = TensorNames(
    "model.layers",
    {**_NORMS_AND_ATTENTION, "mlp.gate": "mlp.gate_proj", "mlp.up": "mlp.up_proj", "mlp.fc2": "mlp.down_proj"},
    _ENDS,
)
QWEN3_MOE_TENSORS = TensorNames(
    "model.layers",
    {
        **_NORMS_AND_ATTENTION,
        "mlp.router": "mlp.gate",
        "mlp.experts.*.gate": "mlp.experts.*.gate_proj",
        "mlp.experts.*.up": "mlp.experts.*.up_proj",
        "mlp.experts.*.fc2": "mlp.experts.*.down_proj",
    },
    _ENDS,
)
GLM4_MOE_TENSORS = TensorNames(
    "model.layers",
    {
        **LLAMA_TENSORS.modules,
        **QWEN3_MOE_TENSORS.modules,
        "mlp.router.expert_bias": "mlp.gate.e_score_correction_bias",
        "mlp.shared.gate": "mlp.shared_experts.gate_proj",
        "mlp.shared.up": "mlp.shared_experts.up_proj",
        "mlp.shared.fc2": "mlp.shared_experts.down_proj",
    },
    _ENDS,
)
MIXTRAL_TENSORS = TensorNames(
    "model.layers",
    {
        **_NORMS_AND_ATTENTION,
        "mlp.router": "block_sparse_moe.gate",
        "mlp.experts.*.gate": "block_sparse_moe.experts.*.w1",
        "mlp.experts.*.up": "block_sparse_moe.experts.*.w3",
        "mlp.experts.*.fc2": "block_sparse_moe.experts.*.w2",
    },
    _ENDS,
)
GPT_OSS_TENSORS = TensorNames(
    "model.layers",
    {
        **_NORMS_AND_ATTENTION,
        "mlp.router": "mlp.router",
        "mlp.experts.*.gate": "mlp.experts.gate_up_proj",
        "mlp.experts.*.up": "mlp.experts.gate_up_proj",
        "mlp.experts.*.fc2": "mlp.experts.down_proj",
    },
    _ENDS,
)
GEMMA3_TENSORS = TensorNames(
    "model.layers",
    {
        **LLAMA_TENSORS.modules,
        "attention_out_norm": "post_attention_layernorm",
        "mlp_norm": "pre_feedforward_layernorm",
        "mlp_out_norm": "post_feedforward_layernorm",
    },
    _ENDS,
)
STARCODER2_TENSORS = TensorNames(
    "model.layers", {**_NORMS_AND_ATTENTION, "mlp.fc1": "mlp.c_fc", "mlp.fc2": "mlp.c_proj"}, _ENDS
)
GPT2_TENSORS = TensorNames(
    "transformer.h",
    {
        "attention_norm": "ln_1",
        "attention.q": "attn.c_attn",
        "attention.k": "attn.c_attn",
        "attention.v": "attn.c_attn",
        "attention.projection": "attn.c_proj",
        "mlp_norm": "ln_2",
        "mlp.fc1": "mlp.c_fc",
        "mlp.fc2": "mlp.c_proj",
    },
    {
        "embedding": "transformer.wte",
        "position_embedding": "transformer.wpe",
        "final_norm": "transformer.ln_f",
        "head": "lm_head",
    },
    transposed=True,
)
