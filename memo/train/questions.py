"""What a model can be asked between two training steps: its losses, what it finds again, what it writes."""

import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from memo.config import RunConfig
from memo.data import GlobalBatchSampler, NeedleDataset, SampleDataset, Tokenizer, load_tokenizer
from memo.errors import ConfigError
from memo.train.build import ParallelModel
from memo.train.data_sources import evaluation_set, open_dataset
from memo.train.evaluation import LossByPosition, NeedleRecall, loss_by_position, mean_loss, needle_recall, num_batches
from memo.train.feed import Feed
from memo.train.generate import Prompt, Sampling, continuations, decode, encode
from memo.train.setup import Prepared


class Questions:
    """The part of a Trainer that asks; forwards alone run, on all ranks, and no training state changes."""

    config: RunConfig
    global_batch_size: int
    eval_sets: dict[str, SampleDataset]
    _eval_tiles: int
    _prepared: Prepared

    @property
    def parts(self) -> ParallelModel:
        """What this rank trains."""
        raise NotImplementedError

    def evaluate(self, iters: int | None = None, name: str | None = None) -> float:
        """Mean loss in nats a token over `iters` global batches of one of `eval_sets`, always the same ones.

        `iters` defaults to config.training.eval_iters, `name` to the first set. Changes no training state, as the other
        two evaluations. Raises ConfigError without such a set or for iters below 1, DataError when no token counts.
        """
        return mean_loss(self.parts, self._eval_feed(name), num_batches(self.config, iters))

    def evaluate_positions(
        self, iters: int | None = None, edges: Sequence[int] | None = None, name: str | None = None
    ) -> LossByPosition:
        """The same loss, apart for tokens with more and less text before them (memo.train.evaluation).

        `edges` part the positions; default: 512 and its doublings. Raises ConfigError without evaluation data.
        """
        return loss_by_position(self.parts, self._eval_feed(name), num_batches(self.config, iters), edges)

    def evaluate_needles(
        self, needles: NeedleDataset, iters: int | None = None, edges: Sequence[int] | None = None
    ) -> NeedleRecall:
        """What the model finds again of what `needles` hide, by distance. Raises ConfigError for another seq_length."""
        open_dataset(self.config, needles, stream=1)
        return needle_recall(
            self.parts, self._feed(needles, self._eval_tiles), needles, num_batches(self.config, iters), edges
        )

    def generate(
        self,
        prompt: Prompt | Sequence[Prompt],
        max_new_tokens: int = 64,
        *,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        seed: int = 0,
    ) -> Any:
        """What the model writes after `prompt`: text after a text, token ids after token ids; collective.

        It shows what was learnt and is slow: each token is a forward over all --seq-length tokens. Several prompts, at
        most one global batch of them, take as long as one, and a list is returned. Changes no training state.

        Args:
            temperature: 0 takes the likeliest token each time; otherwise tokens are drawn, of the `top_k` likeliest
                (0: all), and of the fewest whose probabilities sum to `top_p`.
            seed: of the draws, which do not depend on the layout but for its rounding.

        A text ends at --max-new-tokens or where the model ends the document. Raises ConfigError for a prompt that does
        not fit, and for a text where the run has no tokenizer.
        """
        sampling = Sampling(max_new_tokens, temperature, top_k, top_p, seed)
        alone = isinstance(prompt, str) or (len(prompt) > 0 and isinstance(prompt[0], int | np.integer))
        prompts: list[Any] = [prompt] if alone else list(prompt)
        if not 1 <= len(prompts) <= self.global_batch_size:
            raise ConfigError(
                f"generate() got {len(prompts)} prompts, but --global-batch-size is {self.global_batch_size}: give 1 "
                f"to {self.global_batch_size} at a time"
            )
        config, tokenizer = self.config, self._tokenizer()
        rows = [encode(each, tokenizer, config.model.vocabulary) for each in prompts]
        end = None if tokenizer is None else tokenizer.eod
        found = continuations(
            self.parts, lambda data: self._feed(data, self._eval_tiles), rows, config.data.seq_length, sampling, end
        )
        texts = [decode(ids, tokenizer) if isinstance(p, str) else ids for p, ids in zip(prompts, found, strict=True)]
        return texts[0] if alone else texts

    def _tokenizer(self) -> Tokenizer | None:
        """The run's, or that of the model whose weights it began with."""
        pretrained, own = self.config.checkpoint.pretrained_checkpoint, self._prepared.tokenizer
        if own is None and pretrained is not None and os.path.exists(f"{pretrained}/tokenizer.json"):
            return load_tokenizer(pretrained)
        return own

    def _feed(self, dataset: SampleDataset, tiles: int) -> Feed:
        sampler = GlobalBatchSampler(self.global_batch_size, self.config.training.seed)
        return Feed(dataset, sampler, self.parts.mesh, self.config, self.parts.device, tiles)

    def _eval_feed(self, name: str | None) -> Feed:
        return self._feed(evaluation_set(self.eval_sets, name), self._eval_tiles)
