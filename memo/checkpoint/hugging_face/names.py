"""Where each global tensor lies in a Hugging Face model.

The way in, the way out and the checks all read this one table, so that none of them knows how a family
names, fuses or transposes its matrices.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Place:
    """A tensor of theirs, or one of several equal parts of its rows, as ours.

    Attributes:
        name: theirs.
        transposed: GPT-2's Conv1D keeps matrices as [in, out]; memo as [out, in], like everybody else.
        part, num_parts: which rows (as memo counts them) of a fused matrix.
    """

    name: str
    transposed: bool = False
    part: int = 0
    num_parts: int = 1

    def whole_shape(self, shape: Shape) -> Shape:
        """Shape of their tensor, given that of ours."""
        fused = (shape[0] * self.num_parts, *shape[1:])
        return fused[::-1] if self.transposed else fused

    def slices(self, shape: Shape, offset: Shape, size: Shape) -> tuple[slice, ...]:
        """Where the rectangle `size` at `offset` of our tensor of `shape` lies in theirs."""
        first = (offset[0] + self.part * shape[0], *offset[1:])
        ours = tuple(slice(start, start + length) for start, length in zip(first, size, strict=True))
        return ours[::-1] if self.transposed else ours

    def oriented(self, theirs: Tensor) -> Tensor:
        """A view of a rectangle of theirs as memo holds it."""
        return theirs.t() if self.transposed else theirs


_LAYER = re.compile(r"layers\.(\d+)\.(.+)\.(weight|bias)")
_NORMS_AND_ATTENTION = {
    "attention_norm": "input_layernorm",
    "attention.q": "self_attn.q_proj",
    "attention.k": "self_attn.k_proj",
    "attention.v": "self_attn.v_proj",
    "attention.q_norm": "self_attn.q_norm",
    "attention.k_norm": "self_attn.k_norm",
    "attention.projection": "self_attn.o_proj",
    "mlp_norm": "post_attention_layernorm",
}
_LLAMA = {
    **_NORMS_AND_ATTENTION,
    "mlp.gate": "mlp.gate_proj",
    "mlp.up": "mlp.up_proj",
    "mlp.fc2": "mlp.down_proj",
}
_STARCODER2 = {**_NORMS_AND_ATTENTION, "mlp.fc1": "mlp.c_fc", "mlp.fc2": "mlp.c_proj"}
_GPT2 = {
    "attention_norm": "ln_1",
    "attention.q": "attn.c_attn",
    "attention.k": "attn.c_attn",
    "attention.v": "attn.c_attn",
    "attention.projection": "attn.c_proj",
    "mlp_norm": "ln_2",
    "mlp.fc1": "mlp.c_fc",
    "mlp.fc2": "mlp.c_proj",
}
_OUTSIDE = {"embedding": "model.embed_tokens", "final_norm": "model.norm", "head": "lm_head"}
_GPT2_OUTSIDE = {
    "embedding": "transformer.wte",
    "position_embedding": "transformer.wpe",
    "final_norm": "transformer.ln_f",
    "head": "lm_head",
}

BASE_PREFIXES = ("model.", "transformer.")
"""What the names of a model without head lack."""

# Masks, angles and the copy of a tied embedding: stored by some versions, read by none of memo.
_NO_WEIGHTS = re.compile(r"(.*\.)?(rotary_emb\.inv_freq|attn\.(bias|masked_bias)|rope\.freqs)")


def places(model_type: str, names: Iterable[str]) -> dict[str, Place]:
    """{our global name: its place} in a model of one of `memo.config.hugging_face.FAMILIES`."""
    return {name: _place(model_type, name) for name in names}


def is_no_weight(name: str) -> bool:
    """A tensor of theirs that memo computes instead."""
    return _NO_WEIGHTS.fullmatch(name) is not None


def _place(model_type: str, name: str) -> Place:
    layer = _LAYER.fullmatch(name)
    is_gpt2 = model_type == "gpt2"
    if layer is None:
        module, kind = name.rsplit(".", 1)
        return Place(f"{(_GPT2_OUTSIDE if is_gpt2 else _OUTSIDE)[module]}.{kind}")
    index, module, kind = layer.groups()
    if not is_gpt2:
        table = _STARCODER2 if model_type == "starcoder2" else _LLAMA
        return Place(f"model.layers.{index}.{table[module]}.{kind}")
    theirs = f"transformer.h.{index}.{_GPT2[module]}.{kind}"
    is_matrix = kind == "weight" and not module.endswith("norm")
    if module in ("attention.q", "attention.k", "attention.v"):
        return Place(theirs, is_matrix, "qkv".index(module[-1]), 3)
    return Place(theirs, is_matrix)
