"""Quantized weights, decoded for the layer that runs (memo.parallel.quantized).

All layers share one buffer. The compute stream decodes: one pass over the layer's weights takes little time beside a
layer of long sequences, and needs no copy that could be hidden.
"""

from collections.abc import Mapping

import torch

from memo.parallel.data import ShardedDataParallel
from memo.parallel.quantized import Decoder
from memo.parallel.units import Unit, parts_of, size_of


class CodedWeights:
    """Decodes the quantized weights of one rank's layers (memo.executor.streamed.LayerStates)."""

    def __init__(self, data_parallel: ShardedDataParallel, positions: Mapping[int, int]) -> None:
        """`positions` maps the global index of each layer to its position on this rank."""
        self._data_parallel = data_parallel
        self._units: dict[int, Unit] = {layer: data_parallel.layer_units[at] for layer, at in positions.items()}
        coded = [unit.coded for unit in self._units.values()]
        self._flat = torch.empty(max(map(size_of, coded)), dtype=data_parallel.dtype, device=data_parallel.device)
        self._decoder = Decoder(max(b.plan.size for each in coded for b in each), data_parallel.device)
        self._holds: int | None = None

    @property
    def device_bytes(self) -> int:
        """Bytes of the buffer and of the decoder."""
        return self._flat.nbytes + self._decoder.num_bytes

    def begin(self, kind: str, layer: int) -> None:
        """Before an operation of a layer: decode its weights, unless the buffer holds them, and bind them."""
        unit = self._units[layer]
        parts = parts_of(unit.coded, self._flat)
        if self._holds != layer:
            for bucket, part in zip(unit.coded, parts, strict=True):
                self._decoder.decode(bucket, part)
            self._holds = layer
        self._data_parallel.bind_coded(unit, parts)

    def end(self, kind: str, layer: int) -> None:
        """After an operation of a layer: unbind its weights."""
        self._data_parallel.bind_coded(self._units[layer], None)

    def begin_unplanned(self, layer: int) -> None:
        self.begin("F", layer)

    def end_unplanned(self, layer: int) -> None:
        self.end("F", layer)
