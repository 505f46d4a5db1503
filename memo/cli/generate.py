"""`memo generate`: what a model writes after a prompt, or answers."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from memo.config import RunConfig
from memo.config.check_fields import check_values
from memo.config.evaluation_run import for_evaluation, require_weights
from memo.config.flags import parse_command
from memo.config.launching import check_ranks, wanted_ranks
from memo.config.require import require

ABOUT = (
    "What --model DIR, or the newest checkpoint of the run in --load DIR, writes after --prompt, or answers to it with "
    "--chat: to see what was learnt. Slow, as each token is a forward over all --seq-length tokens. Takes every flag "
    "of `memo train`, also under torchrun; those of the run in --load DIR are read there."
)

EXAMPLES = (
    'memo generate --load runs/a --prompt "def main("',
    'memo generate --model runs/mine/hf --seq-len 512 --chat --prompt "What is 2 + 2?"',
    'memo generate --model Llama-3.1-8B --seq-len 2K --prompt "The capital of France" --temperature 0.8 --top-p 0.95',
)


@dataclass(frozen=True)
class _Options:
    """What is written, and how."""

    prompt: tuple[str, ...] = ()
    """Texts that are continued, one after the other."""
    chat: bool = False
    """Each prompt is what a user says, written in the model's chat template, and its answer alone is printed."""
    chat_template: str | None = None
    """With --chat: file of Jinja, or a directory of a model that has a chat template; default: the one of the
    conversations that the run learned, or of its model."""
    max_new_tokens: int = 64
    """Tokens after each prompt; fewer where the model ends the document, or with --chat its answer."""
    temperature: float = 0.0
    """0: always the likeliest token; otherwise tokens are drawn, of logits that are divided by it."""
    top_k: int = 0
    """Draw of so many likeliest tokens alone; 0: of all."""
    top_p: float = 1.0
    """Draw of the fewest likeliest tokens whose probabilities sum to this."""
    draw_seed: int = 0
    """Seed of the draws."""


def main(argv: Sequence[str]) -> None:
    """Raises MemoError for a run that cannot be, before torch is loaded where that is known by then."""
    config, options = parse_command(
        argv, _Options(), prog="memo generate", about=ABOUT, examples=EXAMPLES, reads_run=True
    )
    check_values(config)
    config = _without_data(for_evaluation(config, wanted_ranks(config)))
    _check(config, options)
    check_ranks(config, "memo generate", argv)
    from memo.train.generate import Sampling
    from memo.train.trainer import Trainer

    sampling = Sampling(
        options.max_new_tokens, options.temperature, options.top_k, options.top_p, seed=options.draw_seed
    )
    sampling.check()
    how = dataclasses.asdict(sampling)
    with Trainer(config=config) as trainer:
        for text in options.prompt:
            if options.chat:
                trainer.print(trainer.chat(text, chat_template=options.chat_template, **how))
            else:
                trainer.print(text + trainer.generate(text, **how))


def _without_data(config: RunConfig) -> RunConfig:
    """Only a corpus's tokenizer is read; without a corpus, mock data stand for it."""
    return config if config.data.data_path is not None else config.override({"mock_data": True})


def _check(config: RunConfig, options: _Options) -> None:
    require_weights(config)
    require(bool(options.prompt), '--prompt is not given: give a text to continue, such as --prompt "Once upon a time"')
    require(
        options.chat or options.chat_template is None,
        f"--chat-template {options.chat_template} is read with --chat alone, which is not given: give both or none",
    )
