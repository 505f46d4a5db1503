"""The table of skeletal activations: tensors of a layer's forward that its backward needs.

In the order in which a layer makes them (h hidden size, a / k query / key-value heads, d head size, f MLP size):

    name            width       layout  policy auto   policy paper   share of a GPT's 16 h
    input           h           tokens  always        always          1
    attention_norm  h           tokens  never         token-wise      1
    qkv             (a + 2k) d  heads   token-wise    token-wise      3
    attention_out   a d         heads   always        always          1
    lse             a, wide     heads   always        always          (a / h, the paper leaves it out)
    residual        h           tokens  token-wise    token-wise      1
    mlp_norm        h           tokens  never         token-wise      1
    fc1             f or 2f     heads   token-wise    token-wise      4
    activation      f           heads   never         token-wise      4

Attention costs O(s^2) to recompute, so its output always moves to host memory, and so does the input, from
which all else is rebuilt. Norms and activations cost next to nothing to recompute and never pay for the link;
the paper moves a share of them all the same (MEMO, section 4.1).

In a gated delta net (memo.attention.delta_rule) qkv has two more numbers for each value head, and q and k are as wide
as k above. In the place of lse, where layers are swept, it has

    carries         carry, wide carried always        always          of each tile: the state before its first token

With multi-latent attention (--multi-latent-attention), whose latents are as wide as q_lora_rank, kv_lora_rank and
qk_pos_emb_head_dim together, k = a and qkv is made from

    latent          latents     whole   token-wise    token-wise

and where heads of values are narrower than d, the projection reads

    trimmed         a v_head    heads   never         token-wise      as the activation

With a gate on attention's output (--attention-output-gate),

    gate            a d         heads   token-wise    token-wise
    gated           a d         heads   never         token-wise      as the activation

With experts (memo.parallel.experts), fc1 and activation have a row for each of a token's K experts. The experts that
all tokens share have shared_fc1 and shared_activation, and their gate shared_score, which move like fc1 and activation.
One more tensor, the experts of each token and their weights, always moves:

    routing         2 K, wide   whole   always        always

With norms of the outputs of attention and MLP (--norm-placement after or around), these outputs are token-wise too:

    projected       h           tokens  token-wise    token-wise
    mlp_out         h           tokens  token-wise    token-wise

The residual is then recomputed from them without a matrix, so it never moves, as norms. With norms of outputs alone
there are no attention_norm and mlp_norm. With norms of experts of their own (--moe-separate-norms) there are also

    experts_norm    h           tokens  never         token-wise      as mlp_norm, and so is router_norm
    shared_out      h           tokens  token-wise    token-wise      as mlp_out

In a custom layer (memo.spec.custom_layer) memo knows input, qkv, attention_out and lse, and the outputs of the
column-parallel matrices after attention, which are token-wise as fc1 is. All else is recomputed in backward.
"""

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

from memo.config.memory import OffloadPolicy
from memo.config.model import ModelConfig
from memo.config.model_marks import INTO_EXPERTS
from memo.config.training import Dtype
from memo.spec.custom_layer import custom_facts
from memo.spec.delta import carry_size
from memo.spec.stack import kinds_of
from memo.units import DTYPE_BYTES

Kind = Literal["always", "token_wise", "never"]
Layout = Literal["tokens", "heads", "whole", "carried"]
Group = str
"""A group's name: in memo's own layer latent, qkv, gate, projected, residual, fc1, mlp_out, shared_out, norm or
activation, or "" for none; in a custom layer qkv, or the name of a matrix."""


@dataclass(frozen=True)
class SkeletalTensor:
    """One row of the table.

    Attributes:
        kind: whether it always moves to host memory, or its first tokens do, or it never does (under policy auto).
        group: the name of the tensors that move the same share of their tokens; "" for tensors that always move.
        layout: what tp splits: the tokens (each rank has s / tp of them, in full width), the heads, that is the width
            (each rank has width / tp of all s tokens), or nothing ("whole"). A "carried" tensor has a row for each
            tile, and its width is split over cp as well.
        width: elements for each token before any split.
        dtype: "model", or "wide": fp32, and fp64 in an fp64 model.
    """

    name: str
    kind: Kind
    group: Group
    layout: Layout
    width: int
    dtype: Literal["model", "wide"] = "model"


@lru_cache(maxsize=64)
def skeletal_tensors(model: ModelConfig) -> tuple[SkeletalTensor, ...]:
    """The table for a model, in order of execution. Cached, because a search asks thousands of times for one model.

    For layers of several kinds each tensor has the largest width that it has in any kind.
    """
    kinds = kinds_of(model)
    if len(kinds) > 1:
        widest: dict[str, SkeletalTensor] = {}
        for tensor in (tensor for kind in kinds for tensor in skeletal_tensors(kind)):
            widest[tensor.name] = max(widest.get(tensor.name, tensor), tensor, key=lambda each: each.width)
        return tuple(widest.values())
    hidden, size = model.hidden_size, model.head_dim
    q_size = model.num_attention_heads * size
    fc1_size = model.token_ffn_size * (2 if model.gated else 1)
    qkv_size = q_size + (1 if model.full_keys_as_values else 2) * model.kv_heads * size
    qkv = SkeletalTensor("qkv", "token_wise", "qkv", "heads", qkv_size)
    routing = SkeletalTensor("routing", "always", "", "whole", 2 * model.moe_router_topk, "wide")
    shared_fc1 = model.shared_ffn_size * (2 if model.gated else 1)
    shared = (
        SkeletalTensor("shared_fc1", "token_wise", "fc1", "heads", shared_fc1),
        *([SkeletalTensor("shared_score", "token_wise", "fc1", "whole", 1)] if model.shared_is_gated else []),
        SkeletalTensor("shared_activation", "never", "activation", "heads", model.shared_ffn_size),
    )
    beside = SkeletalTensor("lse", "always", "", "heads", model.num_attention_heads, "wide")
    if model.is_linear:
        qkv = replace(qkv, width=qkv.width + 2 * model.num_attention_heads)
        size = carry_size(model.num_attention_heads, model.kv_heads, model.head_dim)
        beside = SkeletalTensor("carries", "always", "", "carried", size, "wide")
    attended = (SkeletalTensor("attention_out", "always", "", "heads", q_size), beside)
    latent = SkeletalTensor("latent", "token_wise", "latent", "whole", sum(model.latents))
    trimmed = SkeletalTensor("trimmed", "never", "activation", "heads", model.num_attention_heads * model.value_dim)
    gates = (
        SkeletalTensor("gate", "token_wise", "gate", "heads", q_size),
        SkeletalTensor("gated", "never", "activation", "heads", q_size),
    )
    if model.custom_layer:
        recalled = custom_facts(model).recalled
        matrices = (SkeletalTensor(name, "token_wise", name, "heads", width) for name, width in recalled)
        return (SkeletalTensor("input", "always", "", "tokens", hidden), qkv, *attended, *matrices)
    outputs_normed, inputs_normed = (name in model.norms for name in ("mlp_out_norm", "mlp_norm"))
    of_experts = INTO_EXPERTS if model.moe_separate_norms else ()
    residual = SkeletalTensor("residual", "token_wise", "residual", "tokens", hidden)
    return (
        SkeletalTensor("input", "always", "", "tokens", hidden),
        *([SkeletalTensor("attention_norm", "never", "norm", "tokens", hidden)] if inputs_normed else []),
        *([latent] if model.multi_latent_attention else []),
        qkv,
        *attended,
        *([trimmed] if model.value_dim < model.head_dim else []),
        *(gates if model.attention_output_gate else ()),
        *([_normed("projected", hidden)] if outputs_normed else []),
        replace(residual, kind="never", group="norm") if outputs_normed else residual,
        *([SkeletalTensor("mlp_norm", "never", "norm", "tokens", hidden)] if inputs_normed else []),
        *(SkeletalTensor(name, "never", "norm", "tokens", hidden) for name in of_experts),
        *([routing] if model.num_experts else []),
        SkeletalTensor("fc1", "token_wise", "fc1", "heads", fc1_size),
        SkeletalTensor("activation", "never", "activation", "heads", model.token_ffn_size),
        *(shared if model.shared_ffn_size else ()),
        *([_normed("mlp_out", hidden)] if outputs_normed else []),
        *([_normed("shared_out", hidden)] if of_experts else []),
    )


def _normed(name: str, hidden: int) -> SkeletalTensor:
    """The output of a matrix that is the input of a norm, whose backward needs it."""
    return SkeletalTensor(name, "token_wise", name, "tokens", hidden)


def wide_dtype(dtype: Dtype) -> Dtype:
    """The dtype of sums and log-sum-exps."""
    return "fp64" if dtype == "fp64" else "fp32"


@dataclass(frozen=True)
class SlotDims:
    """Numbers that decide the shapes on one rank: s tokens that a slot holds, after gathering, b sequences, tp, T
    tiles, the number of tiles whose carries are kept (T, or 0 where layers are not swept), and cp."""

    tokens: int
    batch: int
    tp: int
    tiles: int
    dtype: Dtype
    carried: int = 0
    cp: int = 1


def local_size(tensor: SkeletalTensor, dims: SlotDims) -> tuple[int, int, Dtype]:
    """Rows of one sequence, width and dtype on this rank."""
    dtype = wide_dtype(dims.dtype) if tensor.dtype == "wide" else dims.dtype
    if tensor.layout == "carried":
        return dims.carried, tensor.width // (dims.tp * dims.cp), dtype
    if tensor.layout == "tokens":
        return dims.tokens // dims.tp, tensor.width, dtype
    return dims.tokens, tensor.width // (dims.tp if tensor.layout == "heads" else 1), dtype


def bytes_of(tensor: SkeletalTensor, dims: SlotDims) -> int:
    """Bytes of one tensor on one rank if all its rows are kept."""
    rows, width, dtype = local_size(tensor, dims)
    return rows * dims.batch * width * DTYPE_BYTES[dtype]


def moves_in_part(tensor: SkeletalTensor, policy: OffloadPolicy) -> bool:
    """Whether a share of its tokens may move: under "paper" this holds for every tensor that does not always move."""
    return tensor.kind == "token_wise" or (policy == "paper" and tensor.kind == "never")


@dataclass(frozen=True)
class LayerBytes:
    """Bytes of one layer and microbatch on one rank, by how they move.

    Attributes:
        always: {tensor: bytes} of tensors that always move.
        groups: {group: bytes} that may move at most, in order of execution.
        never: {tensor: bytes} of tensors that are always recomputed.
    """

    always: dict[str, int]
    groups: dict[str, int]
    never: dict[str, int]


def layer_bytes(model: ModelConfig, dims: SlotDims, policy: OffloadPolicy) -> LayerBytes:
    """The table in bytes."""
    sizes = LayerBytes({}, {}, {})
    for tensor in skeletal_tensors(model):
        num_bytes = bytes_of(tensor, dims)
        if tensor.kind == "always":
            sizes.always[tensor.name] = num_bytes
        elif moves_in_part(tensor, policy):
            sizes.groups[tensor.group] = sizes.groups.get(tensor.group, 0) + num_bytes
        else:
            sizes.never[tensor.name] = num_bytes
    return sizes
