"""Chooses the samples of the next global batch, and those that each data-parallel rank computes.

The order of samples never depends on the layout: global batch k is samples k * g ... (k + 1) * g - 1 of the dataset,
for any dp and micro batch size. As in Megatron-LM's pretraining sampler, a global batch is divided first into
microbatches and then among ranks:

    g = 8, dp = 2, micro batch size 2       microbatch 0      microbatch 1
    rank 0                                  0 1               4 5
    rank 1                                  2 3               6 7
"""

from memo.errors import CheckpointError


class GlobalBatchSampler:
    """Walks through a dataset; its whole state is (seed, consumed_samples).

    The global batch size may change between a save and a load without skipping or repeating a sample.
    """

    def __init__(self, global_batch_size: int, seed: int) -> None:
        """`seed` is the seed that orders the dataset; it is kept so that a resumed run cannot change it unnoticed."""
        self.global_batch_size = global_batch_size
        self.seed = seed
        self.consumed_samples = 0

    def indices(self, dp_rank: int, dp_size: int, micro_batch_size: int) -> list[list[int]]:
        """Samples of the next global batch for one rank: a list of micro_batch_size indices for each microbatch. The
        global batch is a multiple of dp_size x micro_batch_size, as memo.config checks."""
        stride = dp_size * micro_batch_size
        begin = self.consumed_samples + dp_rank * micro_batch_size
        end = self.consumed_samples + self.global_batch_size
        return [list(range(first, first + micro_batch_size)) for first in range(begin, end, stride)]

    def advance(self) -> None:
        """Move to the next global batch."""
        self.consumed_samples += self.global_batch_size

    def resume(self, seed: int, consumed_samples: int) -> None:
        """Continue after samples that were read with `seed`; raises CheckpointError if that is another seed.

        Before the first sample any seed is accepted, because imported weights have none.
        """
        if consumed_samples and seed != self.seed:
            raise CheckpointError(
                f"the checkpoint read its data with seed = {seed}, this run has seed = {self.seed}: "
                f"samples would repeat and others be missed; set seed = {seed}"
            )
        self.consumed_samples = consumed_samples
