"""Where each global tensor lies in a Hugging Face model.

Import, export and checks all ask here, so that no other code depends on how a family of models names, fuses or
transposes its matrices, which is in `memo.config.hugging_face_tensors`.
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
    """Where one of memo's global tensors lies: in a tensor of the Hugging Face model, or in a part of it.

    Attributes:
        name: name of the tensor in the Hugging Face model.
        transposed: whether that is stored as [in, out], as by GPT-2's Conv1D; memo stores [out, in].
        part, num_parts: which of several equal parts of the rows of a fused matrix, counted as memo stores it.
        alternating: whether rows of the parts take turns; else one part stands below the other.
        expert, num_experts: which of the matrices of a tensor that has those of all experts; 0: it is one matrix.
    """

    name: str
    transposed: bool = False
    part: int = 0
    num_parts: int = 1
    alternating: bool = False
    expert: int = 0
    num_experts: int = 0

    def whole_shape(self, shape: Shape) -> Shape:
        """Shape of the tensor in the Hugging Face model, given that of memo's."""
        fused = (shape[0] * self.num_parts, *shape[1:])
        found = fused[::-1] if self.transposed else fused
        return (self.num_experts, *found) if self.num_experts else found

    def slices(self, shape: Shape, offset: Shape, size: Shape) -> tuple[slice, ...]:
        """Where the rectangle `size` at `offset` of memo's tensor of `shape` lies in that of the Hugging Face model;
        where rows alternate, with those of the other parts between them."""
        if self.alternating:
            rows = slice(offset[0] * self.num_parts, (offset[0] + size[0]) * self.num_parts)
        else:
            rows = slice(offset[0] + self.part * shape[0], offset[0] + self.part * shape[0] + size[0])
        ours = (rows, *(slice(start, start + length) for start, length in zip(offset[1:], size[1:], strict=True)))
        found = ours[::-1] if self.transposed else ours
        return (slice(self.expert, self.expert + 1), *found) if self.num_experts else found

    def of_slices(self, theirs: Tensor) -> Tensor:
        """A view, as memo stores it, of what `slices` select of the tensor in the Hugging Face model."""
        rows = self._rows(theirs[0] if self.num_experts else theirs)
        return rows[self.part :: self.num_parts] if self.alternating else rows

    def of_whole(self, theirs: Tensor) -> Tensor:
        """A view, as memo stores it, of its tensor in the whole one of the Hugging Face model."""
        rows = self._rows(theirs[self.expert] if self.num_experts else theirs)
        return rows[self.part :: self.num_parts] if self.alternating else rows.chunk(self.num_parts)[self.part]

    def _rows(self, matrix: Tensor) -> Tensor:
        return matrix.t() if self.transposed else matrix


_LAYER = re.compile(r"layers\.(\d+)\.(.+?)(\.weight|\.bias|)")
_EXPERT = re.compile(r"experts\.(\d+)")

BASE_PREFIXES = ("model.", "transformer.")
"""Prefixes that the names lack in a model that was saved without its head."""

_THEIR_LAYER = re.compile(r"\blayers\.(\d+)\.")

# Masks and angles, which some versions store and memo computes.
_NO_WEIGHTS = re.compile(r"(.*\.)?(rotary_emb\.inv_freq|attn\.(bias|masked_bias)|rope\.freqs)")


def global_shapes(model: ModelConfig, num_positions: int) -> dict[str, Shape]:
    """{memo's global name: shape} in the model's order.

    `num_positions`: rows of a learned position table, if the model has one.
    """
    shape = shape_of(model, "", num_positions)
    layers = [
        (f"layers.{index}.", (*layer.layer_weights, *layer.constants)) for index, layer in enumerate(shape.of_layers)
    ]
    return {
        f"{prefix}{name}": size
        for prefix, weights in [("", shape.embedding_weights), *layers, ("", shape.head_weights)]
        for weight in weights
        for name, size in weight.part_shapes().items()
    }


def places(model_type: str, names: Iterable[str]) -> dict[str, HuggingFacePlace]:
    """{memo's global name: its place} in a model of a family that memo trains; `names` are all of a model."""
    names = list(names)
    num_experts = len({expert[1] for name in names if (expert := _EXPERT.search(name))})
    return {name: _place(TRAINED[model_type].tensors, name, num_experts) for name in names}


def is_no_weight(name: str, model_type: str, num_layers: int) -> bool:
    """Whether a tensor of the Hugging Face model is one that memo computes instead of storing it, or of a layer beyond
    the last that a family may have there."""
    layer = _THEIR_LAYER.search(name) if TRAINED[model_type].layers_beyond else None
    return _NO_WEIGHTS.fullmatch(name) is not None or (layer is not None and int(layer[1]) >= num_layers)


def _place(theirs: TensorNames, name: str, num_experts: int) -> HuggingFacePlace:
    layer = _LAYER.fullmatch(name)
    if layer is None:
        module, kind = name.rsplit(".", 1)
        return HuggingFacePlace(f"{theirs.ends[module]}.{kind}")
    index, module, kind = layer.groups()
    expert = _EXPERT.search(module)
    module = _EXPERT.sub("experts.*", module)
    found = theirs.modules[module]
    fused = [each for each in theirs.modules if theirs.modules[each] == found]
    is_stacked = expert is not None and "*" not in found
    if is_stacked:
        kind = kind.removeprefix(".weight").replace(".", "_")
    elif expert is not None:
        found = found.replace("*", expert[1])
    return HuggingFacePlace(
        f"{theirs.layers}.{index}.{found}{kind}",
        transposed=is_stacked or (theirs.transposed and kind == ".weight" and not module.endswith("norm")),
        part=fused.index(module),
        num_parts=len(fused),
        alternating=is_stacked and len(fused) > 1,
        expert=int(expert[1]) if expert is not None and is_stacked else 0,
        num_experts=num_experts if is_stacked else 0,
    )
