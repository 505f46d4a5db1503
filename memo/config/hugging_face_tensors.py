"""Names of the weights in each family of Hugging Face (memo.config.hugging_face_families)."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

_ENDS = {"embedding": "model.embed_tokens", "final_norm": "model.norm", "head": "lm_head"}
_EXPERTS, _STACK = "mlp.experts.*.", "mlp.experts."


@dataclass(frozen=True)
class TensorNames:
    """Names of modules in *.safetensors; the name of a weight ends with .weight or .bias.

    Attributes:
        modules: memo's modules of a layer -> theirs. Several modules of one name are blocks of its rows, in this order.
            A * stands for the number of an expert; a name without it is of one tensor with all experts' matrices.
        layers: the prefix of the number of a layer.
        ends: memo's modules before and after the layers -> theirs.
        groups: their modules whose blocks are interleaved -> by what: by row, by head, or by head of keys in a delta
            net. In all other modules one block stands below the other.
        transposed: whether matrices of layers are stored as [in, out], as by GPT-2's Conv1D; memo stores [out, in].
        transposed_experts: whether the matrices in a tensor with all experts' are stored as [in, out].
    """

    modules: Mapping[str, str]
    layers: str = "model.layers"
    ends: Mapping[str, str] = field(default_factory=lambda: _ENDS)
    transposed: bool = False
    transposed_experts: bool = False
    groups: Mapping[str, Literal["rows", "heads", "key_heads"]] = field(default_factory=dict)

    def stacked(self) -> "TensorNames":
        """The names in files with all experts' matrices in one tensor, where these names are of one tensor for each
        expert."""
        found = {"gate_proj": "gate_up_proj", "up_proj": "gate_up_proj", "down_proj": "down_proj"}
        modules = {
            ours: theirs if not theirs.startswith(_EXPERTS) else f"{_STACK}{found[theirs.removeprefix(_EXPERTS)]}"
            for ours, theirs in self.modules.items()
        }
        return replace(self, modules=modules)


def _mlp(
    ours: str, theirs: str, gate: str = "gate_proj", up: str = "up_proj", down: str = "down_proj"
) -> dict[str, str]:
    return {f"{ours}.gate": f"{theirs}.{gate}", f"{ours}.up": f"{theirs}.{up}", f"{ours}.fc2": f"{theirs}.{down}"}


_ATTENTION = {
    "attention.q": "self_attn.q_proj",
    "attention.k": "self_attn.k_proj",
    "attention.v": "self_attn.v_proj",
    "attention.q_norm": "self_attn.q_norm",
    "attention.k_norm": "self_attn.k_norm",
    "attention.sinks": "self_attn.sinks",
    "attention.projection": "self_attn.o_proj",
}
_NORMED = {"attention_norm": "input_layernorm", **_ATTENTION, "mlp_norm": "post_attention_layernorm"}
_OF_EXPERTS = {"mlp.router": "mlp.gate", **_mlp("mlp.experts.*", "mlp.experts.*")}
LLAMA = TensorNames({**_NORMED, **_mlp("mlp", "mlp")})
PHI3 = TensorNames(
    {
        **_NORMED,
        **{f"attention.{part}": "self_attn.qkv_proj" for part in "qkv"},
        **_mlp("mlp", "mlp", "gate_up_proj", "gate_up_proj"),
    }
)
QWEN3_MOE = TensorNames({**_NORMED, **_OF_EXPERTS})
QWEN3_VL_MOE = replace(QWEN3_MOE.stacked(), transposed_experts=True)
GLM4_MOE = TensorNames(
    {
        **LLAMA.modules,
        **_OF_EXPERTS,
        "mlp.router.expert_bias": "mlp.gate.e_score_correction_bias",
        **_mlp("mlp.shared", "mlp.shared_experts"),
    }
)
DEEPSEEK = TensorNames(
    {
        **GLM4_MOE.modules,
        "attention.q_down": "self_attn.q_a_proj",
        "attention.latent_norm.q": "self_attn.q_a_layernorm",
        "attention.q_up": "self_attn.q_b_proj",
        "attention.kv_down": "self_attn.kv_a_proj_with_mqa",
        "attention.latent_norm.kv": "self_attn.kv_a_layernorm",
        "attention.kv_up": "self_attn.kv_b_proj",
    }
)
MISTRAL4 = DEEPSEEK.stacked()
MIXTRAL = TensorNames(
    {
        **_NORMED,
        "mlp.router": "block_sparse_moe.gate",
        **_mlp("mlp.experts.*", "block_sparse_moe.experts.*", "w1", "w3", "w2"),
    }
)
MINIMAX_M2 = TensorNames({**MIXTRAL.modules, "mlp.router.expert_bias": "block_sparse_moe.e_score_correction_bias"})
GPT_OSS = TensorNames(
    {**_NORMED, "mlp.router": "mlp.router", **_mlp("mlp.experts.*", "mlp.experts", "gate_up_proj", "gate_up_proj")},
    transposed_experts=True,
    groups={"mlp.experts.gate_up_proj": "rows"},
)
_DELTA_NET = {
    **_NORMED,
    "attention.gate": "self_attn.q_proj",
    **{f"attention.delta.{part}.kernels": "linear_attn.conv1d" for part in "qkv"},
    "attention.delta.rates": "linear_attn.A_log",
    "attention.delta.biases": "linear_attn.dt_bias",
    "attention.delta.norm": "linear_attn.norm",
    "attention.delta.projection": "linear_attn.out_proj",
    **_mlp("mlp", "mlp"),
    **_OF_EXPERTS,
    **_mlp("mlp.shared", "mlp.shared_expert"),
    "mlp.shared.score": "mlp.shared_expert_gate",
}
QWEN35 = TensorNames(
    {
        **_DELTA_NET,
        **{f"attention.delta.{part}": "linear_attn.in_proj_qkv" for part in "qkv"},
        "attention.delta.gate": "linear_attn.in_proj_z",
        "attention.delta.beta": "linear_attn.in_proj_b",
        "attention.delta.decay": "linear_attn.in_proj_a",
    },
    groups={"self_attn.q_proj": "heads"},
)
QWEN3_NEXT = TensorNames(
    {
        **_DELTA_NET,
        **{f"attention.delta.{part}": "linear_attn.in_proj_qkvz" for part in ("q", "k", "v", "gate")},
        **{f"attention.delta.{part}": "linear_attn.in_proj_ba" for part in ("beta", "decay")},
    },
    groups={
        "self_attn.q_proj": "heads",
        "linear_attn.in_proj_qkvz": "key_heads",
        "linear_attn.in_proj_ba": "key_heads",
    },
)
GEMMA3 = TensorNames(
    {
        **LLAMA.modules,
        "attention_out_norm": "post_attention_layernorm",
        "mlp_norm": "pre_feedforward_layernorm",
        "mlp_out_norm": "post_feedforward_layernorm",
    }
)
GEMMA4 = TensorNames(
    {
        **GEMMA3.modules,
        "scalar": "layer_scalar",
        "mlp.router": "router.proj",
        "mlp.router.norm": "router.scale",
        "mlp.router.scale": "router.per_expert_scale",
        "experts_norm": "pre_feedforward_layernorm_2",
        "experts_out_norm": "post_feedforward_layernorm_2",
        "shared_out_norm": "post_feedforward_layernorm_1",
        **_mlp("mlp.experts.*", "experts", "gate_up_proj", "gate_up_proj"),
        **_mlp("mlp.shared", "mlp"),
    }
)
OLMO3 = TensorNames(
    {
        **_ATTENTION,
        "attention_out_norm": "post_attention_layernorm",
        **_mlp("mlp", "mlp"),
        "mlp_out_norm": "post_feedforward_layernorm",
    }
)
STARCODER2 = TensorNames({**_NORMED, "mlp.fc1": "mlp.c_fc", "mlp.fc2": "mlp.c_proj"})
GPT2 = TensorNames(
    {
        "attention_norm": "ln_1",
        **{f"attention.{part}": "attn.c_attn" for part in "qkv"},
        "attention.projection": "attn.c_proj",
        "mlp_norm": "ln_2",
        "mlp.fc1": "mlp.c_fc",
        "mlp.fc2": "mlp.c_proj",
    },
    "transformer.h",
    {
        "embedding": "transformer.wte",
        "position_embedding": "transformer.wpe",
        "final_norm": "transformer.ln_f",
        "head": "lm_head",
    },
    transposed=True,
)
