"""Where each global tensor lies in a Hugging Face model.

Import, export and checks all ask here, so that no other code depends on how a family of models names, fuses or
transposes its matrices, which is in `memo.config.hugging_face_families`.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor

from memo.config.hugging_face_families import TRAINED
from memo.config.hugging_face_family import TensorNames
from memo.config.model import ModelConfig
from memo.spec.shapes import shape_of

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


_LAYER = re.compile(r"layers\.(\d+)\.(.+?)(\.weight|\.bias|)")
_EXPERT = re.compile(r"experts\.(\d+)")

BASE_PREFIXES = ("model.", "transformer.")
"""Prefixes that the names lack in a model that was saved without its head."""

# Masks and angles, which some versions store and memo computes.
_NO_WEIGHTS = re.compile(r"(.*\.)?(rotary_emb\.inv_freq|attn\.(bias|masked_bias)|rope\.freqs)")


def global_shapes(model: ModelConfig, num_positions: int) -> dict[str, Shape]:
    """{memo's global name: shape} in the model's order.

    `num_positions`: rows of a learned position table, if the model has one.
    """
    shape = shape_of(model, "", num_positions)
    layers = [(f"layers.{index}.", shape.layer_weights) for index in range(model.num_layers)]
    return {
        f"{prefix}{name}": size
        for prefix, weights in [("", shape.embedding_weights), *layers, ("", shape.head_weights)]
        for weight in weights
        for name, size in weight.part_shapes().items()
    }


def places(model_type: str, names: Iterable[str]) -> dict[str, HuggingFacePlace]:
    """{memo's global name: its place} in a model of a family that memo trains."""
    return {name: _place(TRAINED[model_type].tensors, name) for name in names}


def is_no_weight(name: str) -> bool:
    """Whether a tensor of the Hugging Face model is one that memo computes instead of storing it."""
    return _NO_WEIGHTS.fullmatch(name) is not None


def _place(theirs: TensorNames, name: str) -> HuggingFacePlace:
    layer = _LAYER.fullmatch(name)
    if layer is None:
        module, kind = name.rsplit(".", 1)
        return HuggingFacePlace(f"{theirs.ends[module]}.{kind}")
    index, module, kind = layer.groups()
    expert = _EXPERT.search(module)
    module = _EXPERT.sub("experts.*", module)
    found = theirs.modules[module]
    fused = [each for each in theirs.modules if theirs.modules[each] == found]
    return HuggingFacePlace(
        f"{theirs.layers}.{index}.{found if expert is None else found.replace('*', expert[1])}{kind}",
        transposed=theirs.transposed and kind == ".weight" and not module.endswith("norm"),
        part=fused.index(module),
        num_parts=len(fused),
    )
