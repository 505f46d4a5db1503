"""Questions to a model between training steps: evaluation losses, recall of needles, log-probs, generated text."""

import os
from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import Tensor

from memo.data import NeedleDataset, PreferencePairs, Sample, Tokenizer, load_tokenizer
from memo.data.chat_templates import load_run_template
from memo.errors import ConfigError
from memo.mesh.objects import from_rank_zero
from memo.train.data_sources import evaluation_set, open_dataset
from memo.train.evaluation import (
    Evaluated,
    LossByPosition,
    NeedleRecall,
    loss_by_position,
    mean_loss,
    needle_recall,
    num_batches,
)
from memo.train.events import Events
from memo.train.feed import Feed
from memo.train.generate import Prompt, Sampling, continuations, decode, encode
from memo.train.log_probs import GivenSamples, check_reference, check_samples, read_log_probs
from memo.train.preference import mean_preference_loss
from memo.train.run import Run


class EvaluationApi(Run):
    """The part of a Trainer that evaluates and generates. Only forwards run, on all ranks; no state changes."""

    def evaluate(self, iters: int | None = None, name: str | None = None) -> float:
        """Mean loss in nats per token over the first `iters` global batches of one of `eval_sets`.

        `iters` defaults to config.training.eval_iters, `name` to the first set. For preference pairs it is the mean
        loss per pair. Raises ConfigError if there is no set of this name or iters is below 1, and DataError if no token
        counts.
        """
        feed, iters = self._eval_feed(name), num_batches(self.config, iters)
        if isinstance(feed.dataset, PreferencePairs):
            return mean_preference_loss(self.parts, feed, iters)
        return mean_loss(self.parts, feed, iters)

    def evaluate_positions(
        self, iters: int | None = None, edges: Sequence[int] | None = None, name: str | None = None
    ) -> LossByPosition:
        """The loss of `evaluate` by the position of a token in its text (memo.train.evaluation).

        `edges` separate the buckets of positions; default: 512 and its doublings. Raises ConfigError without evaluation
        data.
        """
        return loss_by_position(self.parts, self._eval_feed(name), num_batches(self.config, iters), edges)

    def log_evaluation(self, found: Evaluated, name: str | None = None) -> None:
        """Write a result of `evaluate` or `evaluate_positions` into the run's log; `name` defaults to the first set.

        train() logs its own evaluations; this is for evaluations before and after it. Only rank 0 writes.
        """
        name = next(iter(self.eval_sets), "") if name is None else name
        if self.parts.mesh.is_main_rank:
            with Events(self.parts) as events:
                events.open_log()
                events.evaluated(self.iteration, {name: found})

    def evaluate_needles(
        self, needles: NeedleDataset, iters: int | None = None, edges: Sequence[int] | None = None
    ) -> NeedleRecall:
        """How often the model recalls the values that `needles` hide, by distance. Raises ConfigError if the seq_length
        of `needles` is not the run's."""
        open_dataset(self.config, needles, stream=1)
        feed = self.parts.feed(needles)
        return needle_recall(self.parts, feed, needles, num_batches(self.config, iters), edges)

    def log_probs(self, samples: Sequence[Sample], *, reference: bool = False) -> Tensor:
        """log p of each label of `samples`, [samples, s] fp64 on the host; 0 where the sample's loss mask is 0.

        Collective: all ranks give the same samples, any number of them, and get the same numbers. Logits of half of
        --loss-chunk-size tokens exist at a time. Changes no training state.

        With `reference` the model runs without its LoRA adapters. That is the model before training, unless
        --lora-checkpoint gave it adapters. Raises ConfigError if there are no samples, or if `reference` is asked of a
        model that has no adapters or trains more than these; DataError for a sample that the model cannot read.
        """
        check_samples(samples, "log_probs")
        if reference:
            check_reference(self.config.model, "compute the reference's log-probs before the first step")
        feed = self.parts.feed(GivenSamples(samples, self.config.data.seq_length))
        return read_log_probs(self.parts, feed, len(samples), reference=reference)

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
        """Generate a continuation of `prompt`: text for a text, token ids for token ids; collective.

        This shows what the model has learnt; it is slow, because each token takes a forward over all --seq-length
        tokens. A list of prompts, at most one global batch, takes as long as one prompt and returns a list. Changes no
        training state.

        A `temperature` of 0 takes the likeliest token each time; otherwise tokens are drawn from the `top_k` likeliest
        (0: all), and from the fewest whose probabilities sum to `top_p`. Draws depend on `seed`, and on the layout only
        by its rounding.

        A text ends after `max_new_tokens` or where the model ends the document. Raises ConfigError for a prompt that is
        too long, and for a text if the run has no tokenizer.
        """
        sampling = Sampling(max_new_tokens, temperature, top_k, top_p, seed)
        alone = isinstance(prompt, str) or (len(prompt) > 0 and isinstance(prompt[0], int | np.integer))
        prompts: list[Any] = [prompt] if alone else list(prompt)
        tokenizer = self._tokenizer()
        found = self._continue(prompts, sampling, tokenizer)
        texts = [decode(ids, tokenizer) if isinstance(p, str) else ids for p, ids in zip(prompts, found, strict=True)]
        return texts[0] if alone else texts

    def chat(self, message: str, *, chat_template: str | None = None, **how: Any) -> str:
        """Return the model's answer to a user's `message`, in the chat template that the model learned; collective.

        The template is `chat_template` (a Jinja file, or a directory that has one), else the template of the run's
        conversations or of the pretrained model. The answer also ends at the special token with which the template ends
        an answer. `how` are keywords of `generate`, such as temperature. Raises the errors of `generate`, and
        ConfigError for a message that the template refuses.
        """
        tokenizer = self._tokenizer()
        if tokenizer is None:
            raise ConfigError("chat() got a text, but this run has no tokenizer: give --tokenizer (tokenizer=)")

        def asked() -> tuple[list[int], list[int]]:
            template = load_run_template(self.config, tokenizer.special_texts, chat_template)
            question: dict[str, Any] = {"role": "user", "content": message}
            texts = [template.prompt((question,), "the message"), template.end_of_answer() or ""]
            prompt, end = (located.ids.tolist() for located in tokenizer.encode_located(texts))
            return prompt, end

        prompt, end = from_rank_zero(asked, self.parts.mesh.world)  # a template may write the time of day
        return decode(self._continue([prompt], Sampling(**how), tokenizer, end)[0], tokenizer)

    def _continue(
        self, prompts: Sequence[Prompt], sampling: Sampling, tokenizer: Tokenizer | None, ends: Sequence[int] = ()
    ) -> list[list[int]]:
        """The tokens that follow each prompt, up to one of `ends` or the end of the document. Raises ConfigError."""
        if not 1 <= len(prompts) <= self.global_batch_size:
            raise ConfigError(
                f"generate() got {len(prompts)} prompts, but --global-batch-size is {self.global_batch_size}: give 1 "
                f"to {self.global_batch_size} at a time"
            )
        rows = [encode(each, tokenizer, self.config.model.vocabulary) for each in prompts]
        ends = [*ends, *([] if tokenizer is None else [tokenizer.eod])]
        return continuations(self.parts, rows, sampling, ends)

    def _tokenizer(self) -> Tokenizer | None:
        """The tokenizer of the run, else of the pretrained model; None without either."""
        pretrained, own = self.config.checkpoint.pretrained_checkpoint, self._prepared.tokenizer
        if own is None and pretrained is not None and os.path.exists(f"{pretrained}/tokenizer.json"):
            return load_tokenizer(pretrained)
        return own

    def _eval_feed(self, name: str | None) -> Feed:
        dataset = evaluation_set(self.eval_sets, name)
        if isinstance(dataset, PreferencePairs) and self.config.training.preference is None:
            raise ConfigError(
                "the evaluation data are pairs of a chosen and a rejected answer, of which --preference dpo tells the "
                "loss: evaluate them in such a run, or give texts or conversations as --eval-data-path"
            )
        return self.parts.feed(dataset)
