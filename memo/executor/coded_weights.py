"""Weights in few bits, made again for the layer that runs (memo.parallel.quantized).

All layers take turns in one buffer. Its numbers are made on the stream that computes: they take one pass over the
layer's weights, which is little beside a layer of long sequences, and need no copy that could be hidden.
"""

from collections.abc import Mapping

import torch

from memo.parallel.data import ShardedDataParallel
from memo.parallel.quantized import Decoder
from memo.parallel.units import Unit


class CodedWeights:
    """Gives the layers of one rank their coded weights (memo.executor.streamed.LayerStates)."""

    def __init__(self, data_parallel: ShardedDataParallel, positions: Mapping[int, int]) -> None:
        """`positions`: on this rank, by the global index of a layer."""
        self._data_parallel = data_parallel
        self._units: dict[int, Unit] = {layer: data_parallel.layer_units[at] for layer, at in positions.items()}
        coded = [unit.coded for unit in self._units.values()]
        numel = max(sum(bucket.plan.size for bucket in each) for each in coded)
        self._flat = torch.empty(numel, dtype=data_parallel.dtype, device=data_parallel.device)
        self._decoder = Decoder(max(b.plan.size for each in coded for b in each), data_parallel.device)
        self._holds: int | None = None

    @property
    def device_bytes(self) -> int:
        """Of the buffer, and of what fills it."""
        return self._flat.nbytes + self._decoder.num_bytes

    def begin(self, kind: str, layer: int) -> None:
        """Before an operation of a layer."""
        unit = self._units[layer]
        parts = list(self._flat.split([bucket.plan.size for bucket in unit.coded] + [self._rest(unit)]))[:-1]
        if self._holds != layer:
            for bucket, part in zip(unit.coded, parts, strict=True):
                self._decoder.decode(bucket, part)
            self._holds = layer
        self._data_parallel.bind_coded(unit, parts)

    def _rest(self, unit: Unit) -> int:
        return self._flat.numel() - sum(bucket.plan.size for bucket in unit.coded)

    def end(self, kind: str, layer: int) -> None:
        """After it."""
        self._data_parallel.bind_coded(self._units[layer], None)

    def begin_unplanned(self, layer: int) -> None:
        self.begin("F", layer)

    def end_unplanned(self, layer: int) -> None:
        self.end("F", layer)
