"""The part of a Trainer for whoever writes a loss: log-probs of samples, and steps on a function of them."""

from collections.abc import Sequence

from torch import Tensor

from memo.artifacts.run_log import StepRecord
from memo.data import Sample
from memo.train.feed import run_feed
from memo.train.log_probs import (
    Draw,
    GivenSamples,
    LossOfLogProbs,
    batches_over_log_probs,
    check_reference,
    check_samples,
    read_log_probs,
)
from memo.train.questions import Questions


class OverLogProbs(Questions):
    """memo.train.log_probs says why both need nothing of the layout."""

    def log_probs(self, samples: Sequence[Sample], *, reference: bool = False) -> Tensor:
        """log p of each label of `samples`, [samples, s] fp64 on the host; 0 where the sample's loss mask is 0.

        Collective: all ranks give the same samples, any number of them, and get the same numbers. Logits of half of
        --loss-chunk-size tokens exist at a time. Changes no training state.

        `reference`: of the model without LoRA's adapters, which is what it was before training unless
        --lora-checkpoint gave it others. Raises ConfigError for that where the model has none or trains more than them,
        and for no samples; DataError for a sample that the model cannot read.
        """
        check_samples(samples, "log_probs")
        if reference:
            check_reference(self.config.model)
        feed = self._feed(GivenSamples(samples, self.config.data.seq_length))
        return read_log_probs(self.parts, feed, len(samples), reference=reference)

    def step_on(self, samples: Sequence[Sample], loss: LossOfLogProbs) -> StepRecord:
        """One optimizer step on a loss of your own over the log-probs of `samples`; no sample of the data is consumed.

        Collective: all ranks give the same samples, at most one global batch. loss(log_probs) gets what `log_probs`
        returns of them, and returns a number that torch has computed from it, on every rank alike; the record's lm_loss
        is that number. Costs one forward more than step(), and raises as it and `log_probs`, and ConfigError for a loss
        that does not depend on its argument.
        """
        own = GivenSamples(check_samples(samples, "step_on", self.global_batch_size), self.config.data.seq_length)
        training = run_feed(self.config, self.parts.mesh, self.parts.device, own, self.parts.tiles)
        return self._step(lambda _: batches_over_log_probs(self.parts, self._feed(own), training, samples, loss))

    def _step(self, draw: Draw) -> StepRecord:
        """One step on this rank's microbatches, which `draw` gives with fields of the record that it alone knows."""
        raise NotImplementedError
