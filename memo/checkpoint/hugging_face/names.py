"""Finds the place of each global tensor in a Hugging Face model.

Import, export and checks all use it, so that no other code depends on how a family of models names, fuses or transposes
its matrices. `memo.config.hugging_face_tensors` describes the families.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from memo.checkpoint.chunks import Part, Shape
from memo.config.hugging_face_families import TRAINED
from memo.config.hugging_face_tensors import TensorNames
from memo.config.model import ModelConfig
from memo.spec.shapes import shape_of
from memo.spec.weights import is_of_adapter


@dataclass(frozen=True)
class HuggingFacePlace:
    """The place of one of memo's global tensors: a tensor of the Hugging Face model, or a part of it.

    A fused matrix has one or several groups of rows, and each group has a block of every part.

    Attributes:
        name: name of the tensor in the Hugging Face model.
        transposed: whether this tensor is stored as [in, out], like GPT-2's Conv1D; memo stores [out, in].
        block, before, total: numbers of rows, as memo stores them: of a block of this part, of the blocks before it in
            its group, and of the whole group; 0: this part is the whole matrix.
        convolves: whether the tensor has a dimension of one in the middle, like kernels of a convolution.
        expert, num_experts: index of the matrix in a tensor that stacks all experts' matrices, and their number; 0: the
            tensor is one matrix.
    """

    name: str
    transposed: bool = False
    block: int = 0
    before: int = 0
    total: int = 0
    convolves: bool = False
    expert: int = 0
    num_experts: int = 0

    def whole_shape(self, shape: Shape) -> Shape:
        """The shape of the tensor in the Hugging Face model; `shape`: the shape of memo's tensor."""
        fused = (shape[0] // self.block * self.total, *shape[1:]) if self.total else shape
        found = fused[::-1] if self.transposed else fused
        found = (found[0], 1, *found[1:]) if self.convolves else found
        return (self.num_experts, *found) if self.num_experts else found

    def slices(self, shape: Shape, offset: Shape, size: Shape) -> tuple[slice, ...]:
        """The slices of the Hugging Face tensor that contain the rectangle `size` at `offset` of memo's tensor of
        `shape`. If there are several groups, the rectangle must have whole blocks, and the slices also contain the
        blocks of other parts between them."""
        start, stop = offset[0] + self.before, offset[0] + self.before + size[0]
        if self._has_groups(shape):
            start, stop = (row // self.block * self.total for row in (offset[0], offset[0] + size[0]))
        ours = (slice(start, stop), *(slice(o, o + length) for o, length in zip(offset[1:], size[1:], strict=True)))
        found = ours[::-1] if self.transposed else ours
        found = (found[0], slice(0, 1), *found[1:]) if self.convolves else found
        return (slice(self.expert, self.expert + 1), *found) if self.num_experts else found

    def of_slices(self, shape: Shape, theirs: Tensor) -> Tensor:
        """Convert the result of `slices`, taken from the Hugging Face tensor, to the form that memo stores."""
        rows = self._rows(theirs[0] if self.num_experts else theirs)
        if not self._has_groups(shape):
            return rows
        return rows.unflatten(0, (-1, self.total))[:, self.before : self.before + self.block].flatten(0, 1)

    def parts_of(self, shape: Shape, theirs: Tensor) -> list[Part]:
        """Views of this part in the whole Hugging Face tensor `theirs`, in the form that memo stores."""
        rows = self._rows(theirs[self.expert] if self.num_experts else theirs)
        if not self._has_groups(shape):
            return [Part.of((0,) * len(shape), rows[self.before : self.before + shape[0]])]
        if self.block == 1:
            return [Part.of((0,) * len(shape), rows[self.before :: self.total])]
        starts = range(0, shape[0], self.block)
        groups = rows.unflatten(0, (-1, self.total))[:, self.before : self.before + self.block]
        return [Part.of((start, *(0,) * (len(shape) - 1)), group) for start, group in zip(starts, groups, strict=True)]

    def _has_groups(self, shape: Shape) -> bool:
        return 0 < self.block < shape[0]

    def _rows(self, matrix: Tensor) -> Tensor:
        found = matrix.squeeze(1) if self.convolves else matrix
        return found.t() if self.transposed else found


_LAYER = re.compile(r"layers\.(\d+)\.(.+?)(\.weight|\.bias|)")
_EXPERT = re.compile(r"experts\.(\d+)")

_THEIR_LAYER = re.compile(r"\blayers\.(\d+)\.")

# Masks and angles, which some versions store but memo computes; Qwen's layers for multi-token prediction.
_NO_WEIGHTS = re.compile(r"(.*\.)?(rotary_emb\.inv_freq|attn\.(bias|masked_bias)|rope\.freqs)|mtp\..*")


def global_shapes(model: ModelConfig, num_positions: int) -> dict[str, Shape]:
    """{memo's global name: shape} in the model's order, without LoRA's adapters.

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
        if not is_of_adapter(weight.name)
        for name, size in weight.part_shapes().items()
    }


def places(
    model: ModelConfig, model_type: str, shapes: Mapping[str, Shape], *, stacked: bool = False
) -> dict[str, HuggingFacePlace]:
    """{memo's global name: its place} in a model of a family that memo trains; `shapes` has all its tensors.

    `stacked`: one tensor has all experts' matrices, as in some models of families with one tensor for each expert.
    """
    num_experts = len({expert[1] for name in shapes if (expert := _EXPERT.search(name))})
    groups = {"": 1, "heads": model.num_attention_heads, "key_heads": model.linear_num_key_heads}
    tensors = TRAINED[model_type].tensors
    theirs = tensors.stacked() if stacked else tensors
    return {name: _place(theirs, name, shapes, num_experts, groups) for name in shapes}


def is_no_weight(name: str, model_type: str, num_layers: int) -> bool:
    """Whether memo computes a tensor of the Hugging Face model instead of storing it, or the tensor belongs to an extra
    layer beyond the last, which some families have."""
    layer = _THEIR_LAYER.search(name) if TRAINED[model_type].layers_beyond else None
    return _NO_WEIGHTS.fullmatch(name) is not None or (layer is not None and int(layer[1]) >= num_layers)


def _place(
    theirs: TensorNames, name: str, shapes: Mapping[str, Shape], num_experts: int, groups: Mapping[str, int]
) -> HuggingFacePlace:
    layer = _LAYER.fullmatch(name)
    if layer is None:
        module, kind = name.rsplit(".", 1)
        return HuggingFacePlace(f"{theirs.ends[module]}.{kind}")
    index, own, kind = layer.groups()
    expert = _EXPERT.search(own)
    module = _EXPERT.sub("experts.*", own)
    found = theirs.modules[module]
    of_expert = expert[1] if expert is not None else ""
    full = {each: f"layers.{index}.{each.replace('*', of_expert)}{kind}" for each in theirs.modules}
    fused = [each for each, name in full.items() if theirs.modules[each] == found and name in shapes]
    rows = [shapes[full[each]][0] for each in fused if len(fused) > 1]
    count = {**groups, "rows": shapes[name][0]}[theirs.groups.get(found, "")]
    is_stacked = expert is not None and "*" not in found
    if is_stacked:
        kind = kind.removeprefix(".weight").replace(".", "_")
    elif expert is not None:
        found = found.replace("*", expert[1])
    return HuggingFacePlace(
        f"{theirs.layers}.{index}.{found}{kind}",
        transposed=theirs.transposed_experts
        if is_stacked
        else theirs.transposed and kind == ".weight" and not module.endswith("norm"),
        block=shapes[name][0] // count if rows else 0,
        before=sum(rows[: fused.index(module)]) // count,
        total=sum(rows) // count,
        convolves=module.endswith(".kernels"),
        expert=int(expert[1]) if expert is not None and is_stacked else 0,
        num_experts=num_experts if is_stacked else 0,
    )
