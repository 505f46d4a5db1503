"""What the weights of each family of Hugging Face are called (memo.config.hugging_face_families)."""

from memo.config.hugging_face_family import TensorNames

_ATTENTION = {
    "attention.q": "self_attn.q_proj",
    "attention.k": "self_attn.k_proj",
    "attention.v": "self_attn.v_proj",
    "attention.q_norm": "self_attn.q_norm",
    "attention.k_norm": "self_attn.k_norm",
    "attention.sinks": "self_attn.sinks",
    "attention.projection": "self_attn.o_proj",
}
_NORMS_AND_ATTENTION = {
    "attention_norm": "input_layernorm",
    **_ATTENTION,
    "mlp_norm": "post_attention_layernorm",
}
_MLP = {"mlp.gate": "mlp.gate_proj", "mlp.up": "mlp.up_proj", "mlp.fc2": "mlp.down_proj"}
_ENDS = {"embedding": "model.embed_tokens", "final_norm": "model.norm", "head": "lm_head"}
LLAMA_TENSORS = TensorNames("model.layers", {**_NORMS_AND_ATTENTION, **_MLP}, _ENDS)
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
    transposed_experts=True,
    groups={"mlp.experts.gate_up_proj": "rows"},
)
_DELTA_NET = {
    **_NORMS_AND_ATTENTION,
    "attention.gate": "self_attn.q_proj",
    "attention.delta.q.kernels": "linear_attn.conv1d",
    "attention.delta.k.kernels": "linear_attn.conv1d",
    "attention.delta.v.kernels": "linear_attn.conv1d",
    "attention.delta.rates": "linear_attn.A_log",
    "attention.delta.biases": "linear_attn.dt_bias",
    "attention.delta.norm": "linear_attn.norm",
    "attention.delta.projection": "linear_attn.out_proj",
    "mlp.gate": "mlp.gate_proj",
    "mlp.up": "mlp.up_proj",
    "mlp.fc2": "mlp.down_proj",
    "mlp.router": "mlp.gate",
    "mlp.experts.*.gate": "mlp.experts.*.gate_proj",
    "mlp.experts.*.up": "mlp.experts.*.up_proj",
    "mlp.experts.*.fc2": "mlp.experts.*.down_proj",
    "mlp.shared.gate": "mlp.shared_expert.gate_proj",
    "mlp.shared.up": "mlp.shared_expert.up_proj",
    "mlp.shared.fc2": "mlp.shared_expert.down_proj",
    "mlp.shared.score": "mlp.shared_expert_gate",
}
QWEN35_TENSORS = TensorNames(
    "model.layers",
    {
        **_DELTA_NET,
        "attention.delta.q": "linear_attn.in_proj_qkv",
        "attention.delta.k": "linear_attn.in_proj_qkv",
        "attention.delta.v": "linear_attn.in_proj_qkv",
        "attention.delta.gate": "linear_attn.in_proj_z",
        "attention.delta.beta": "linear_attn.in_proj_b",
        "attention.delta.decay": "linear_attn.in_proj_a",
    },
    _ENDS,
    groups={"self_attn.q_proj": "heads"},
)
QWEN3_NEXT_TENSORS = TensorNames(
    "model.layers",
    {
        **_DELTA_NET,
        "attention.delta.q": "linear_attn.in_proj_qkvz",
        "attention.delta.k": "linear_attn.in_proj_qkvz",
        "attention.delta.v": "linear_attn.in_proj_qkvz",
        "attention.delta.gate": "linear_attn.in_proj_qkvz",
        "attention.delta.beta": "linear_attn.in_proj_ba",
        "attention.delta.decay": "linear_attn.in_proj_ba",
    },
    _ENDS,
    groups={
        "self_attn.q_proj": "heads",
        "linear_attn.in_proj_qkvz": "key_heads",
        "linear_attn.in_proj_ba": "key_heads",
    },
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
OLMO3_TENSORS = TensorNames(
    "model.layers",
    {
        **_ATTENTION,
        "attention_out_norm": "post_attention_layernorm",
        **_MLP,
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
