"""Where each global tensor lies in a Hugging Face model.

Import, export and checks all use this one table, so that no other code depends on how a family of models names, fuses
or transposes its matrices.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor

Shape = tuple[int, ...]


@dataclass(frozen=True)
class HuggingFacePlace:
    """Where one of memo's global tensors lies: in a tensor of the Hugging Face model, or in a part of its rows.

    Attributes:
        name: name of the tensor in the Hugging Face model.
        transposed: whether that is stored as [in, out], as by GPT-2's Conv1D; memo stores [out, in].
        part, num_parts: which of several equal parts of the rows of a fused matrix, counted as memo stores it.
    """

    name: str
    transposed: bool = False
    part: int = 0
    num_parts: int = 1

    def whole_shape(self, shape: Shape) -> Shape:
        """Shape of the tensor in the Hugging Face model, given that of memo's."""
        fused = (shape[0] * self.num_parts, *shape[1:])
        return fused[::-1] if self.transposed else fused

    def slices(self, shape: Shape, offset: Shape, size: Shape) -> tuple[slice, ...]:
        """Where the rectangle `size` at `offset` of memo's tensor of `shape` lies in that of the Hugging Face model."""
        first = (offset[0] + self.part * shape[0], *offset[1:])
        ours = tuple(slice(start, start + length) for start, length in zip(first, size, strict=True))
        return ours[::-1] if self.transposed else ours

    def oriented(self, theirs: Tensor) -> Tensor:
        """A view, as memo stores it, of a rectangle of the tensor in the Hugging Face model."""
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
"""Prefixes that the names lack in a model that was saved without its head."""

# Masks and angles, which some versions store and memo computes.
_NO_WEIGHTS = re.compile(r"(.*\.)?(rotary_emb\.inv_freq|attn\.(bias|masked_bias)|rope\.freqs)")


def places(model_type: str, names: Iterable[str]) -> dict[str, HuggingFacePlace]:
    """{memo's global name: its place} in a model of one of `memo.config.hugging_face.FAMILIES`."""
    return {name: _place(model_type, name) for name in names}


def is_no_weight(name: str) -> bool:
    """Whether a tensor of the Hugging Face model is one that memo computes instead of storing it."""
    return _NO_WEIGHTS.fullmatch(name) is not None


def _place(model_type: str, name: str) -> HuggingFacePlace:
    layer = _LAYER.fullmatch(name)
    is_gpt2 = model_type == "gpt2"
    if layer is None:
        module, kind = name.rsplit(".", 1)
        return HuggingFacePlace(f"{(_GPT2_OUTSIDE if is_gpt2 else _OUTSIDE)[module]}.{kind}")
    index, module, kind = layer.groups()
    if not is_gpt2:
        table = _STARCODER2 if model_type == "starcoder2" else _LLAMA
        return HuggingFacePlace(f"model.layers.{index}.{table[module]}.{kind}")
    theirs = f"transformer.h.{index}.{_GPT2[module]}.{kind}"
    is_matrix = kind == "weight" and not module.endswith("norm")
    if module in ("attention.q", "attention.k", "attention.v"):
        return HuggingFacePlace(theirs, is_matrix, "qkv".index(module[-1]), 3)
    return HuggingFacePlace(theirs, is_matrix)
