"""The tensors of a rounding buffer: views of its flat memory, at the offsets that `memo.spec.slots` gives."""

from torch import Tensor

from memo.parallel.dtypes import torch_dtype
from memo.spec.slots import Place, SlotLayout


def view_of(place: Place, memory: Tensor) -> Tensor:
    """[rows, b, width] in a flat uint8 buffer."""
    raw = memory[place.offset_bytes : place.offset_bytes + place.num_bytes]
    return raw.view(torch_dtype(place.dtype)).view(place.shape)


class SlotTensors(dict[str, Tensor]):
    """The tensors that a layer works on, by name: views of flat buffers that live as long as it does.

    So the views of their rows are made once: to make one takes the host longer than many a step of a tile.
    """

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        super().__init__(tensors)
        self._rows: dict[tuple[str, int, int], Tensor] = {}

    def rows(self, name: str, rows: slice) -> Tensor:
        key = name, rows.start, rows.stop
        found = self._rows.get(key)
        if found is None:
            found = self._rows[key] = self[name][rows]
        return found


def slot_tensors(layout: SlotLayout, slot: Tensor, workspace: Tensor) -> SlotTensors:
    """Of the flat buffers of one slot and of the workspace."""
    tensors = {name: view_of(place, slot) for name, place in layout.places.items()}
    if layout.workspace is not None:
        tensors[layout.workspace.name] = view_of(layout.workspace, workspace)
    return SlotTensors(tensors)
