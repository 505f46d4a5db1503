"""The place of each of memo's global tensors in a Hugging Face state dict.

A mapping of plain data, {memo's global name: Source}. Because reading only slices and transposes, it serves
gradients as well as weights.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from memo.config.model import ModelConfig


def needs(*packages: str) -> pytest.MarkDecorator:
    """Skip a test if a package is missing. No package is imported: ranks import this mark, and peft takes seconds."""
    missing = [name for name in packages if find_spec(name) is None]
    return pytest.mark.skipif(bool(missing), reason=f"needs {', '.join(missing)}")


class Wide(TorchFunctionMode):
    """Let every explicit request for fp32 give fp64."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def widen(value: Any) -> Any:
            return torch.float64 if value is torch.float32 else value

        if func is torch.Tensor.float:
            func = torch.Tensor.double
        if func is torch.Tensor.div and not args[0].is_floating_point():  # gives fp32
            args = (args[0].double(), *args[1:])
        kwargs = {key: widen(value) for key, value in (kwargs or {}).items()}
        return func(*(widen(value) for value in args), **kwargs)


@dataclass(frozen=True)
class Source:
    """A Hugging Face tensor, or one of several equal parts of it.

    Attributes:
        name: key in the state dict.
        transposed: GPT-2's Conv1D keeps matrices as [in, out], memo as [out, in].
        part, num_parts: the rows of the matrix (after transposition) are part `part` of `num_parts` equal parts.
        alternating: whether rows of the parts take turns.
        expert: index of the matrix in a tensor with the matrices of all experts; None: the tensor is one matrix.
    """

    name: str
    transposed: bool = False
    part: int = 0
    num_parts: int = 1
    expert: int | None = None
    alternating: bool = False

    def read(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """A view of tensors[name]; raises KeyError for a tensor that is not there."""
        tensor = tensors[self.name]
        if self.expert is not None:
            tensor = tensor[self.expert]
        if self.transposed:
            tensor = tensor.t()
        if self.alternating:
            return tensor[self.part :: self.num_parts]
        return tensor.chunk(self.num_parts)[self.part]


@dataclass(frozen=True)
class Rows(Source):
    """Rows of a tensor, one by one; of kernels of a convolution, without their dimension of one."""

    rows: tuple[int, ...] = ()

    def read(self, tensors: Mapping[str, Tensor]) -> Tensor:
        return tensors[self.name].squeeze(1)[list(self.rows)]


Sources = dict[str, Source]


def to_global(tensors: Mapping[str, Tensor], sources: Sources) -> dict[str, Tensor]:
    """Return memo's global tensors (views) from a Hugging Face state dict, or from its gradients."""
    return {name: source.read(tensors) for name, source in sources.items()}


def llama_sources(model: ModelConfig) -> Sources:
    """Return the sources of Llama, Qwen2 (biases on q, k and v), Qwen3 (norms on q and k heads), Qwen3-MoE and Mixtral
    (experts)."""
    found = {
        "embedding.weight": Source("model.embed_tokens.weight"),
        "final_norm.weight": Source("model.norm.weight"),
    }
    if model.untie_embeddings_and_output_weights:
        found["head.weight"] = Source("lm_head.weight")
    matrices = {
        "attention.q": "self_attn.q_proj",
        "attention.k": "self_attn.k_proj",
        "attention.v": "self_attn.v_proj",
        "attention.projection": "self_attn.o_proj",
        "attention_norm": "input_layernorm",
        "mlp_norm": "post_attention_layernorm",
    }
    dense = {"mlp.gate": "mlp.gate_proj", "mlp.up": "mlp.up_proj", "mlp.fc2": "mlp.down_proj"}
    matrices |= {"mlp.router": "mlp.gate"} if model.num_experts else dense
    if model.qk_layernorm:
        matrices |= {"attention.q_norm": "self_attn.q_norm", "attention.k_norm": "self_attn.k_norm"}
    for layer in range(model.num_layers):
        ours, theirs = f"layers.{layer}", f"model.layers.{layer}"
        for name, their_name in matrices.items():
            found[f"{ours}.{name}.weight"] = Source(f"{theirs}.{their_name}.weight")
        for expert in range(model.num_experts):
            both, down = f"{theirs}.mlp.experts.gate_up_proj", f"{theirs}.mlp.experts.down_proj"
            found[f"{ours}.mlp.experts.{expert}.gate.weight"] = Source(both, part=0, num_parts=2, expert=expert)
            found[f"{ours}.mlp.experts.{expert}.up.weight"] = Source(both, part=1, num_parts=2, expert=expert)
            found[f"{ours}.mlp.experts.{expert}.fc2.weight"] = Source(down, expert=expert)
        if model.qkv_bias:
            for part in "qkv":
                found[f"{ours}.attention.{part}.bias"] = Source(f"{theirs}.self_attn.{part}_proj.bias")
    return found


def glm4_moe_sources(model: ModelConfig) -> Sources:
    """The first layers have one MLP. Other layers have experts, shared experts, and biases of the router's choice."""
    found = llama_sources(model)
    dense = llama_sources(replace(model, num_experts=0))
    for layer, has_experts in enumerate(model.layers_with_experts):
        ours, theirs = f"layers.{layer}.mlp", f"model.layers.{layer}.mlp"
        if not has_experts:
            found = {name: source for name, source in found.items() if not name.startswith(f"{ours}.")}
            found |= {name: source for name, source in dense.items() if name.startswith(f"{ours}.")}
            continue
        found[f"{ours}.router.expert_bias"] = Source(f"{theirs}.gate.e_score_correction_bias")
        for name, their_name in {"gate": "gate_proj", "up": "up_proj", "fc2": "down_proj"}.items():
            found[f"{ours}.shared.{name}.weight"] = Source(f"{theirs}.shared_experts.{their_name}.weight")
    return found


def minimax_m2_sources(model: ModelConfig) -> Sources:
    """As Qwen3-MoE, with biases of the router's choice."""
    biases = {
        f"layers.{layer}.mlp.router.expert_bias": Source(f"model.layers.{layer}.mlp.e_score_correction_bias")
        for layer in range(model.num_layers)
    }
    return llama_sources(model) | biases


def deepseek_sources(model: ModelConfig) -> Sources:
    """Latents of queries, if they have one, and of keys and values; experts as GLM-4.5's, with biases where a sigmoid
    scores them."""
    own = {
        "q_down": "q_a_proj",
        "latent_norm.q": "q_a_layernorm",
        "q_up": "q_b_proj",
        "kv_down": "kv_a_proj_with_mqa",
        "latent_norm.kv": "kv_a_layernorm",
        "kv_up": "kv_b_proj",
    }
    if model.q_lora_rank is None:
        own = {"q": "q_proj", **{name: theirs for name, theirs in own.items() if "q_" not in theirs}}
    plain = ("attention.q.", "attention.k.", "attention.v.")
    found = {name: source for name, source in glm4_moe_sources(model).items() if not any(p in name for p in plain)}
    if model.moe_router_score_function == "softmax":
        found = {name: source for name, source in found.items() if not name.endswith("expert_bias")}
    for layer in range(model.num_layers):
        for name, theirs in own.items():
            found[f"layers.{layer}.attention.{name}.weight"] = Source(f"model.layers.{layer}.self_attn.{theirs}.weight")
    return found


def qwen35_sources(model: ModelConfig) -> Sources:
    """Some layers have gated delta nets, and the others gates on attention's output.

    In each head the rows of the query come before the rows of the gate."""
    return _delta_net_sources(model, is_grouped=False)


def qwen3_next_sources(model: ModelConfig) -> Sources:
    """As qwen35_sources, but with all inputs of a key head of a delta net side by side."""
    return _delta_net_sources(model, is_grouped=True)


def _delta_net_sources(model: ModelConfig, is_grouped: bool) -> Sources:
    found, size, heads = llama_sources(model), model.head_dim, model.num_attention_heads
    keys, each = model.linear_num_key_heads, model.linear_num_value_heads // model.linear_num_key_heads
    dim = model.linear_key_head_dim
    sizes = {"q": dim, "k": dim, "v": each * dim}

    def below(sizes: dict[str, int]) -> dict[str, tuple[int, ...]]:
        starts = [sum(list(sizes.values())[:index]) for index in range(len(sizes))]
        return {name: tuple(range(o, o + n)) for (name, n), o in zip(sizes.items(), starts, strict=True)}

    def in_turn(sizes: dict[str, int], count: int) -> dict[str, tuple[int, ...]]:
        total = sum(sizes.values())
        groups = [range(group * total, group * total + total) for group in range(count)]
        return {name: tuple(g[i] for g in groups for i in rows) for name, rows in below(sizes).items()}

    channels = {name: keys * n for name, n in sizes.items()}
    for layer, kind in enumerate(model.types_of_layers):
        ours, theirs = f"layers.{layer}", f"model.layers.{layer}"
        if model.num_experts:
            for name, their_name in {"gate": "gate_proj", "up": "up_proj", "fc2": "down_proj"}.items():
                found[f"{ours}.mlp.shared.{name}.weight"] = Source(f"{theirs}.mlp.shared_expert.{their_name}.weight")
            found[f"{ours}.mlp.shared.score.weight"] = Source(f"{theirs}.mlp.shared_expert_gate.weight")
        if kind == "full":
            for name, rows in in_turn({"q": size, "gate": size}, heads).items():
                found[f"{ours}.attention.{name}.weight"] = Rows(f"{theirs}.self_attn.q_proj.weight", rows=rows)
            continue
        found = {name: source for name, source in found.items() if not name.startswith(f"{ours}.attention.")}
        own, net = f"{ours}.attention.delta", f"{theirs}.linear_attn"
        for name, rows in below(channels).items():
            found[f"{own}.{name}.kernels.weight"] = Rows(f"{net}.conv1d.weight", rows=rows)
        found |= {f"{own}.rates": Source(f"{net}.A_log"), f"{own}.biases": Source(f"{net}.dt_bias")}
        found[f"{own}.norm.weight"] = Source(f"{net}.norm.weight")
        found[f"{own}.projection.weight"] = Source(f"{net}.out_proj.weight")
        inputs = {
            "in_proj_qkv": below(channels),
            "in_proj_z": below({"gate": keys * each * dim}),
            "in_proj_b": below({"beta": keys * each}),
            "in_proj_a": below({"decay": keys * each}),
        }
        if is_grouped:
            inputs = {
                "in_proj_qkvz": in_turn({**sizes, "gate": each * dim}, keys),
                "in_proj_ba": in_turn({"beta": each, "decay": each}, keys),
            }
        for their_name, parts in inputs.items():
            for name, rows in parts.items():
                found[f"{own}.{name}.weight"] = Rows(f"{net}.{their_name}.weight", rows=rows)
    return found


def gemma3_sources(model: ModelConfig) -> Sources:
    """Norms before and after attention and MLP."""
    found = llama_sources(model)
    theirs = {
        "attention_out_norm": "post_attention_layernorm",
        "mlp_norm": "pre_feedforward_layernorm",
        "mlp_out_norm": "post_feedforward_layernorm",
    }
    for layer in range(model.num_layers):
        for name, their_name in theirs.items():
            found[f"layers.{layer}.{name}.weight"] = Source(f"model.layers.{layer}.{their_name}.weight")
    return found


def gemma4_sources(model: ModelConfig) -> Sources:
    """As Gemma 3's, with a factor on each layer's output; full layers may have no matrix of values."""
    found = gemma3_sources(model)
    for layer, kind in enumerate(model.types_of_layers):
        found[f"layers.{layer}.scalar"] = Source(f"model.layers.{layer}.layer_scalar")
        if kind == "full" and model.full_keys_as_values:
            del found[f"layers.{layer}.attention.v.weight"]
    return found


def phi3_sources(model: ModelConfig) -> Sources:
    """q, k and v in one matrix, gate and up in another."""
    found, size = llama_sources(model), model.head_dim
    shares = {"q": model.num_attention_heads, "k": model.kv_heads, "v": model.kv_heads}
    for layer in range(model.num_layers):
        ours, theirs, start = f"layers.{layer}", f"model.layers.{layer}", 0
        for part, count in shares.items():
            rows = tuple(range(start, start := start + count * size))
            found[f"{ours}.attention.{part}.weight"] = Rows(f"{theirs}.self_attn.qkv_proj.weight", rows=rows)
        for part, name in enumerate(("gate", "up")):
            found[f"{ours}.mlp.{name}.weight"] = Source(f"{theirs}.mlp.gate_up_proj.weight", part=part, num_parts=2)
    return found


def olmo3_sources(model: ModelConfig) -> Sources:
    """Norms only after attention and MLP."""
    found = gemma3_sources(model)
    absent = tuple(
        f"layers.{layer}.{name}." for layer in range(model.num_layers) for name in ("attention_norm", "mlp_norm")
    )
    return {name: source for name, source in found.items() if not name.startswith(absent)}


def gpt_oss_sources(model: ModelConfig) -> Sources:
    """Biases everywhere, sinks, and matrices of all experts in one tensor, as [in, out], gate and up in turn."""
    found = {
        name: source
        for name, source in llama_sources(replace(model, num_experts=0, add_qkv_bias=True)).items()
        if "mlp." not in name
    }
    for layer in range(model.num_layers):
        ours, theirs = f"layers.{layer}", f"model.layers.{layer}"
        found[f"{ours}.attention.sinks"] = Source(f"{theirs}.self_attn.sinks")
        found[f"{ours}.attention.projection.bias"] = Source(f"{theirs}.self_attn.o_proj.bias")
        for kind, suffix in (("weight", ""), ("bias", "_bias")):
            found[f"{ours}.mlp.router.{kind}"] = Source(f"{theirs}.mlp.router.{kind}")
            both, down = (f"{theirs}.mlp.experts.{name}{suffix}" for name in ("gate_up_proj", "down_proj"))
            is_matrix = kind == "weight"
            for expert in range(model.num_experts):
                name = f"{ours}.mlp.experts.{expert}"
                for part, of in enumerate(("gate", "up")):
                    found[f"{name}.{of}.{kind}"] = Source(both, is_matrix, part, 2, expert, alternating=True)
                found[f"{name}.fc2.{kind}"] = Source(down, is_matrix, expert=expert)
    return found


def gpt2_sources(model: ModelConfig) -> Sources:
    """GPT-2: biases everywhere, tied head, Conv1D matrices, q, k and v fused as thirds of c_attn."""
    found = {
        "embedding.weight": Source("transformer.wte.weight"),
        "position_embedding.weight": Source("transformer.wpe.weight"),
    }
    norms = {"final_norm": "transformer.ln_f"}
    for layer in range(model.num_layers):
        ours, theirs = f"layers.{layer}", f"transformer.h.{layer}"
        norms |= {f"{ours}.attention_norm": f"{theirs}.ln_1", f"{ours}.mlp_norm": f"{theirs}.ln_2"}
        matrices = {
            "attention.projection": (f"{theirs}.attn.c_proj", 0, 1),
            "mlp.fc1": (f"{theirs}.mlp.c_fc", 0, 1),
            "mlp.fc2": (f"{theirs}.mlp.c_proj", 0, 1),
        }
        for index, part in enumerate("qkv"):
            matrices[f"attention.{part}"] = (f"{theirs}.attn.c_attn", index, 3)
        for name, (their_name, index, num_parts) in matrices.items():
            weight = Source(f"{their_name}.weight", transposed=True, part=index, num_parts=num_parts)
            found[f"{ours}.{name}.weight"] = weight
            found[f"{ours}.{name}.bias"] = Source(f"{their_name}.bias", part=index, num_parts=num_parts)
    for name, their_name in norms.items():
        for kind in ("weight", "bias"):
            found[f"{name}.{kind}"] = Source(f"{their_name}.{kind}")
    return found
