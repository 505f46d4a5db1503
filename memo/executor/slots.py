"""The tensors of a rounding buffer: views of its flat memory, at the offsets that `memo.spec.slots` gives."""

from torch import Tensor

from memo.parallel.dtypes import torch_dtype
from memo.spec.slots import Place, SlotLayout


def view_of(place: Place, memory: Tensor) -> Tensor:
    """The tensor [rows, b, width] at its place in a flat uint8 buffer."""
    raw = memory[place.offset_bytes : place.offset_bytes + place.num_bytes]
    return raw.view(torch_dtype(place.dtype)).view(place.shape)


def slot_tensors(layout: SlotLayout, slot: Tensor, workspace: Tensor) -> dict[str, Tensor]:
    """The tensors that a layer works on, by name: views of the flat buffers of one slot and of the workspace."""
    tensors = {name: view_of(place, slot) for name, place in layout.places.items()}
    if layout.workspace is not None:
        tensors[layout.workspace.name] = view_of(layout.workspace, workspace)
    return tensors
