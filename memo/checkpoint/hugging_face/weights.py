"""The weights of a Hugging Face directory under memo's names; all are checked against a model before any is read."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from memo.checkpoint.chunks import Shape
from memo.checkpoint.hugging_face import bnb_nf4, fp8, mxfp4
from memo.checkpoint.hugging_face.files import DTYPES, FileTensor, TensorFiles
from memo.checkpoint.hugging_face.names import HuggingFacePlace, global_shapes, is_no_weight, places
from memo.config.hugging_face_wrappers import NAMINGS, renamed
from memo.config.model import ModelConfig
from memo.errors import CheckpointError

_ROWS_AT_ONCE = 4096


class _Codec(Protocol):
    """A module that reads the matrices of one quantised format."""

    DTYPE: torch.dtype

    def is_coded(self, files: TensorFiles, name: str) -> bool: ...
    def companions(self, name: str) -> tuple[str, ...]: ...
    def shape_of(self, files: TensorFiles, name: str) -> Shape: ...
    def read(self, files: TensorFiles, name: str, slices: Sequence[slice]) -> Tensor: ...


_CODECS: tuple[_Codec, ...] = (bnb_nf4, fp8)


class PretrainedWeights:
    """The global tensors of a model; rectangles of them are read from the files of a Hugging Face model. `rest` are the
    names of tensors of a wrapper around the text model, which memo does not train."""

    def __init__(
        self,
        directory: str | Path,
        model: ModelConfig,
        model_type: str,
        num_positions: int,
        *,
        in_wrapper: bool = False,
    ) -> None:
        """Raises CheckpointError unless the directory holds exactly the weights of `model`, besides a wrapper's."""
        self.files = TensorFiles(directory)
        self.shapes = global_shapes(model, num_positions)
        self.places = self._find(model, model_type)
        for name in self.shapes:
            (self._check_packed if self._is_packed(name) else self._check)(name)
        self.rest = self._check_rest(model_type, model.num_layers, in_wrapper)

    def dtype(self, name: str) -> torch.dtype:
        """The dtype of the result of `read`."""
        if codec := self._codec(name):
            return codec.DTYPE
        return mxfp4.DTYPE if self._is_packed(name) else DTYPES[self._stored(name).dtype]

    def file(self, name: str) -> str:
        """The file with this tensor. Reading tensors in the order of their files opens each file once."""
        return self._stored(name).file

    def read(self, name: str, offset: Shape, size: Shape) -> Tensor:
        """The rectangle `size` at `offset` of memo's global tensor `name`, in `dtype(name)`."""
        place, shape = self.places[name], self.shapes[name]
        if codec := self._codec(name):
            return place.of_slices(shape, codec.read(self.files, place.name, place.slices(shape, offset, size)))
        if not self._is_packed(name):
            return place.of_slices(shape, self.files.read(place.name, place.slices(shape, offset, size)))
        expert, columns, rows = place.slices(shape, offset, size)
        blocks, scales = (self.files.read(place.name + kind, (expert, rows)) for kind in (mxfp4.BLOCKS, mxfp4.SCALES))
        return place.of_slices(shape, mxfp4.unpack(blocks, scales)[..., columns].transpose(1, 2))

    def _codec(self, name: str) -> _Codec | None:
        return next((codec for codec in _CODECS if codec.is_coded(self.files, self.places[name].name)), None)

    def _is_packed(self, name: str) -> bool:
        return self.places[name].name + mxfp4.BLOCKS in self.files.tensors

    def _stored(self, name: str) -> FileTensor:
        stored = self.places[name].name
        return self.files.tensors[stored + mxfp4.BLOCKS if self._is_packed(name) else stored]

    def _check_packed(self, name: str) -> None:
        place, tensors = self.places[name], self.files.tensors
        experts, columns, rows = place.whole_shape(self.shapes[name])
        expected = (experts, rows, columns // mxfp4.BLOCK)
        for kind, shape in ((mxfp4.BLOCKS, (*expected, mxfp4.BLOCK // 2)), (mxfp4.SCALES, expected)):
            stored = tensors.get(place.name + kind)
            if stored is None or stored.shape != shape or stored.dtype != "U8":
                found = "is missing" if stored is None else f"has shape {stored.shape} and dtype {stored.dtype} there"
                raise CheckpointError(
                    f"{self.files.directory}: {place.name}{kind} {found}, and this model needs {shape} in U8: restore "
                    "the file, or leave out the model flags that change it"
                )

    def read_whole(self, name: str) -> Tensor:
        """All of a global tensor, contiguous."""
        shape = self.shapes[name]
        return self.read(name, (0,) * len(shape), shape).contiguous()

    def _find(self, model: ModelConfig, model_type: str) -> dict[str, HuggingFacePlace]:
        """The place of each weight by its name in the files, or by the family's name if the files lack the weight."""
        try:
            own = places(model, model_type, self.shapes)
        except KeyError as error:
            raise CheckpointError(
                f"{self.files.directory}: models of {model_type} have no {error.args[0]}, which this model needs: its "
                "files belong to another model than its config.json or the model flags say"
            ) from None
        found = {name: self._stored_as(place) for name, place in own.items()}
        stacked = own if all(found.values()) else places(model, model_type, self.shapes, stacked=True)
        found = {name: place or self._stored_as(stacked[name]) for name, place in found.items()}
        return {name: own[name] if place is None else self._turned(name, place) for name, place in found.items()}

    def _turned(self, name: str, place: HuggingFacePlace) -> HuggingFacePlace:
        """The place, with the matrices of all experts in the order of their two dimensions in the files: the hub has
        those of Qwen3-VL as [in, out], a model that transformers made as [out, in], and transformers reads both."""
        stored, turned = self.files.tensors.get(place.name), replace(place, transposed=not place.transposed)
        ours, theirs = (each.whole_shape(self.shapes[name]) for each in (place, turned))
        return turned if place.num_experts and stored is not None and stored.shape == theirs != ours else place

    def _stored_as(self, place: HuggingFacePlace) -> HuggingFacePlace | None:
        for naming in NAMINGS:
            name = renamed(place.name, naming)
            if name is not None and (name in self.files.tensors or name + mxfp4.BLOCKS in self.files.tensors):
                return replace(place, name=name)
        return None

    def _check(self, name: str) -> None:
        place, directory, codec = self.places[name], self.files.directory, self._codec(name)
        stored = self.files.tensors.get(place.name)
        if stored is None:
            raise CheckpointError(
                f"{directory} holds no {place.name}, which this model needs as {name}: its files belong to another "
                "model than its config.json or the model flags say"
            )
        expected = place.whole_shape(self.shapes[name])
        shape = codec.shape_of(self.files, place.name) if codec else stored.shape
        if shape != expected:
            raise CheckpointError(
                f"{directory}: {place.name} has shape {shape} there and {expected} in this model: leave out "
                "the model flags that change it, or restore config.json"
            )
        if codec is None and stored.dtype not in DTYPES:
            raise CheckpointError(
                f"{directory}: {place.name} is stored as {stored.dtype}, but memo reads {', '.join(DTYPES)}: "
                "use the model's version that is not quantised"
            )

    def _check_rest(self, model_type: str, num_layers: int, in_wrapper: bool) -> list[str]:
        """The names of tensors of a wrapper around the text model. Raises CheckpointError for an unknown tensor."""
        names = [place.name for place in self.places.values()]
        used = {name + kind for name in names for kind in ("", mxfp4.BLOCKS, mxfp4.SCALES)}
        used |= {beside for name in names for codec in _CODECS for beside in codec.companions(name)}
        heads = {renamed("lm_head.weight", naming) for naming in NAMINGS}
        text = tuple(instead for _, instead in NAMINGS if "language_model." in instead)
        rest = []
        for name in self.files.tensors:
            if name in used:
                continue
            if name in heads and "head.weight" not in self.shapes:
                self._check_tied(name)
            elif in_wrapper and not name.startswith(text):
                rest.append(name)
            elif not is_no_weight(name, model_type, num_layers):
                raise CheckpointError(
                    f"{self.files.directory} holds {name}, which this model lacks: its files belong to another model "
                    "than its config.json or the model flags say"
                )
        return rest

    def _check_tied(self, head: str) -> None:
        """Raises CheckpointError unless a stored head equals the embedding with which the model ties it."""
        embedding = self.places["embedding.weight"].name
        stored = self.files.tensors
        equal = stored[head].shape == stored[embedding].shape
        num_rows = stored[head].shape[0] if equal else 0
        for start in range(0, num_rows, _ROWS_AT_ONCE):
            rows = [slice(start, min(start + _ROWS_AT_ONCE, num_rows)), slice(None)]
            equal = equal and torch.equal(self.files.read(head, rows), self.files.read(embedding, rows))
        self.files.close()
        if not equal:
            raise CheckpointError(
                f"{self.files.directory}: {head} differs from {embedding}, though the model ties them: "
                "set tie_word_embeddings to false in config.json"
            )
