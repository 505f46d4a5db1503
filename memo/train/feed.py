"""Makes microbatches of this data-parallel rank's samples, with this context-parallel rank's tokens."""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import DTypeLike
from torch import Tensor

from memo.config import RunConfig
from memo.data import GlobalBatchSampler, Sample, SampleDataset, checked_sample
from memo.mesh import Mesh
from memo.model.parts import Documents
from memo.model.transformer import Microbatch
from memo.parallel.collectives import all_reduce
from memo.parallel.zigzag import token_indices


class Feed:
    """Draws global batches from a dataset in the sampler's order.

    `tiles` is the number of tiles that layers work on. Each tile is split over the tp ranks, and if layers are swept,
    over the cp ranks too (memo.parallel.zigzag).
    """

    def __init__(
        self,
        dataset: SampleDataset,
        sampler: GlobalBatchSampler,
        mesh: Mesh,
        config: RunConfig,
        device: torch.device,
        tiles: int = 1,
    ) -> None:
        self.dataset, self.sampler, self.mesh = dataset, sampler, mesh
        self.micro_batch_size, self.device = config.training.micro_batch_size, device
        self.vocab_size = config.model.vocabulary
        parts = tiles if config.memory.sweeps else 1
        self.attention_order = token_indices(dataset.seq_length, mesh.grid.cp, mesh.at.cp, parts)
        self.shard_order = self.attention_order
        if tiles > 1 and mesh.grid.tp > 1:
            # [tile, tp rank, row] -> [tp rank, tile, row]
            self.shard_order = self.attention_order.view(tiles, mesh.grid.tp, -1).transpose(0, 1).flatten()

    def own_samples(self) -> list[list[int]]:
        """The indices of this rank's samples in the next global batch, one list for each microbatch."""
        return self.sampler.indices(self.mesh.at.dp, self.mesh.grid.dp, self.micro_batch_size)

    def next_global_batch(self, *, per_token: bool = False) -> list[Microbatch]:
        """This rank's microbatches of the next global batch; advances the sampler.

        With `per_token` the loss weight of a token is its loss mask; without, the mask is divided by the sum of all
        masks of the global batch (see Microbatch). A sample that the model cannot be trained on raises DataError on
        the ranks that read it.
        """
        groups = self.own_samples()
        self.sampler.advance()
        batches = [[checked_sample(self.dataset, index, self.vocab_size) for index in group] for group in groups]
        microbatches = [self._microbatch(samples) for samples in batches]
        if per_token:
            return microbatches
        counts = (float(sample.loss_mask.sum()) for samples in batches for sample in samples)
        counted = torch.tensor(sum(counts), dtype=torch.float64)
        # At least 1, so that a global batch without unmasked labels does not divide by zero. The sum stays on the
        # device, so that the host need not wait for it.
        total = all_reduce(self._on_device(counted), self.mesh.dp).clamp_(min=1.0)
        for microbatch in microbatches:
            microbatch.loss_weight.div_(total)
        return microbatches

    def peek(self) -> list[Microbatch]:
        """The microbatches that `next_global_batch` will return; the sampler does not advance."""
        consumed_samples = self.sampler.consumed_samples
        batches = self.next_global_batch()
        self.sampler.consumed_samples = consumed_samples
        return batches

    def in_shard_order(self, rows: Tensor) -> Tensor:
        """[b, s] of the whole sequence -> this rank's tokens [s / cp, b] in the order of its shards (tp ranks)."""
        return self._own(rows, self.shard_order)

    def _microbatch(self, samples: Sequence[Sample]) -> Microbatch:
        """Return one microbatch on the device, whose loss weight is the loss mask."""

        def rows(name: str, dtype: DTypeLike = np.int32) -> Tensor:
            """[b, s]"""
            return torch.from_numpy(np.stack([getattr(sample, name) for sample in samples]).astype(dtype))

        of_tokens = rows("positions")
        positions = self.in_shard_order(of_tokens)
        one_order = self.shard_order is self.attention_order
        return Microbatch(
            tokens=self.in_shard_order(rows("tokens")),
            labels=self.in_shard_order(rows("labels")),
            positions=positions,
            loss_weight=self.in_shard_order(rows("loss_mask", np.float64)),
            attention_positions=positions if one_order else self._own(of_tokens, self.attention_order),
            documents=documents_of(samples),
        )

    def _own(self, rows: Tensor, order: Tensor) -> Tensor:
        """[b, s] of the whole sequence -> this rank's tokens [s / cp, b] in one of the two orders."""
        return self._on_device(rows[:, order].t().contiguous())

    def _on_device(self, x: Tensor) -> Tensor:
        """Copy to the device without blocking the host, which needs pinned memory; on a CPU nothing is copied.

        torch does not reuse a pinned block before the copies from it have ended.
        """
        return (x.pin_memory() if self.device.type == "cuda" else x).to(self.device, non_blocking=True)


def documents_of(samples: Sequence[Sample]) -> Documents:
    """Document boundaries of each sample, from 0 to s. None if every sample is one document: attention then takes its
    fastest path, one causal block for each row."""
    found = tuple(tuple(sample.cu_seqlens.tolist()) for sample in samples)
    return None if all(len(boundaries) == 2 for boundaries in found) else found
