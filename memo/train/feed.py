"""Feeds microbatches: the samples of this data-parallel rank, cut to its context-parallel tokens."""

import torch
from torch import Tensor

from memo.data import Batch, GlobalBatchSampler, SampleDataset, collate
from memo.mesh import Mesh
from memo.model.transformer import Microbatch
from memo.parallel.collectives import all_reduce
from memo.parallel.context import token_indices


class Feed:
    """Draws global batches from a dataset in the sampler's order."""

    def __init__(
        self,
        dataset: SampleDataset,
        sampler: GlobalBatchSampler,
        mesh: Mesh,
        micro_batch_size: int,
        device: torch.device,
    ) -> None:
        self.dataset, self.sampler, self.mesh = dataset, sampler, mesh
        self.micro_batch_size, self.device = micro_batch_size, device
        self.own_tokens = token_indices(dataset.seq_length, mesh.grid.cp, mesh.at.cp)

    def next_global_batch(self) -> list[Microbatch]:
        """This rank's microbatches of the next global batch; advances the sampler."""
        indices = self.sampler.indices(self.mesh.at.dp, self.mesh.grid.dp, self.micro_batch_size)
        self.sampler.advance()
        batches = [collate([self.dataset.sample(i) for i in group]) for group in indices]
        counted = torch.tensor(sum(float(b.loss_mask.sum()) for b in batches), dtype=torch.float64)
        total = all_reduce(counted.to(self.device), self.mesh.dp).item()
        # A global batch whose every label is masked teaches nothing, and must not divide by zero.
        return [self._microbatch(batch, max(total, 1.0)) for batch in batches]

    def _microbatch(self, batch: Batch, num_tokens: float) -> Microbatch:
        weight = torch.from_numpy(batch.loss_mask).double() / num_tokens
        return Microbatch(
            tokens=self._own(torch.from_numpy(batch.tokens)),
            labels=self._own(torch.from_numpy(batch.labels)),
            positions=self._own(torch.from_numpy(batch.positions)),
            loss_weight=self._own(weight),
            documents=batch.cu_seqlens,
        )

    def _own(self, rows: Tensor) -> Tensor:
        """[b, s] -> this rank's [s / cp, b]."""
        return rows[:, self.own_tokens].t().contiguous().to(self.device, non_blocking=True)
