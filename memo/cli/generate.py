"""`memo generate`: continues a prompt with a model, or answers it."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from memo.config.evaluation_run import evaluated_run
from memo.config.flag import ReadWith
from memo.config.require import require

ABOUT = (
    "Continue --prompt with --model DIR, or with the newest checkpoint of the run in --load DIR, or answer it with "
    "--chat: to see what was learnt. Slow, as each token takes a forward over all --seq-length tokens. Takes every "
    "flag of `memo train`, also under torchrun; --load DIR brings the flags of its run."
)

EXAMPLES = (
    'memo generate --load runs/a --prompt "def main("',
    'memo generate --model runs/mine/hf --seq-len 512 --chat --prompt "What is 2 + 2?"',
    'memo generate --model Llama-3.1-8B --seq-len 2K --prompt "The capital of France" --temperature 0.8 --top-p 0.95',
)


@dataclass(frozen=True)
class _Options:
    prompt: tuple[str, ...] = ()
    """Texts to continue, one after another."""
    chat: bool = False
    """Treat each prompt as a user's message in the model's chat template, and print only the answer."""
    chat_template: Annotated[str | None, ReadWith("chat")] = None
    """A Jinja file, or the directory of a model with a chat template; default: the template of the
    conversations that the run learned, or of its model."""
    max_new_tokens: int = 64
    """The most tokens after each prompt; the model may end the document, or with --chat its answer, before."""
    temperature: float = 0.0
    """0: always the likeliest token; otherwise logits are divided by it and tokens are drawn."""
    top_k: int = 0
    """Draw only from this number of likeliest tokens; 0: from all."""
    top_p: float = 1.0
    """Draw only from the fewest likeliest tokens whose probabilities sum to this."""
    draw_seed: int = 0
    """Seed of the draws."""


def main(argv: Sequence[str]) -> None:
    """Raises MemoError for a run that cannot start, if possible before torch is loaded."""
    # Of a corpus only the tokenizer is read.
    config, options = evaluated_run(
        argv, _Options(), prog="memo generate", about=ABOUT, examples=EXAMPLES, needs_data=False
    )
    require(options.prompt, '--prompt is not given: give a text to continue, such as --prompt "Once upon a time"')
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
