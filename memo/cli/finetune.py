"""`memo finetune`: a Hugging Face model learns conversations, of which the assistant's answers alone count.

With --preference it learns pairs of answers, of which one was chosen and the other rejected (memo.train.preference).
Renders the data with the model's own chat template, holds some out, trains, says what answers cost before and after,
and exports to SAVE/hf: the model, or LoRA's adapters where PEFT's files hold all that was trained. On several GPUs
`memo.plan` chooses how to spread the model and what activations do, unless flags do. docs/finetuning.md has the forms
of the data and what is masked.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from memo.config import RunConfig
from memo.config.derived import world_size_from_env
from memo.config.flags import parse_command
from memo.config.launching import require_started
from memo.data import PackedConversations, PackedDataset, PreferencePairs, Reading, build_chat, build_pairs
from memo.data.chat_template import TEMPLATE_SUFFIX
from memo.data.conversations import ChatForm
from memo.errors import ConfigError, is_first_of_node
from memo.train.stop import GracefulStop

if TYPE_CHECKING:
    from memo.train.trainer import Trainer

ABOUT = (
    "Fine-tune a Hugging Face model on conversations, of which the assistant's answers alone count, or with "
    "--preference on pairs of answers. Says what held-out ones cost before and after, and writes SAVE/hf for Hugging "
    "Face. Takes every flag of `memo train`, also under torchrun."
)
EXAMPLES = (
    "memo finetune --model Qwen3-0.6B --train-data chats.jsonl --num-epochs 1 --save runs/small",
    "torchrun --nproc-per-node 8 -m memo finetune --model Llama-3.1-8B-Instruct --train-data chats.jsonl --seq-len 8K "
    "--gbs 32 --num-epochs 2 --lr 1e-5 --save runs/chat",
    "memo finetune --preference dpo --lora-rank 16 --model Qwen3-0.6B --train-data pairs.jsonl --num-epochs 1 "
    "--save runs/dpo",
)


@dataclass(frozen=True)
class Options:
    """Of fine-tuning, beside those of a run."""

    train_data: str | None = None
    """File or directory of conversations, as `memo data chat` reads them, or with preference of pairs, as
    `memo data pairs` does; default: what it wrote at data-path, with a split."""
    chat_form: ChatForm | None = None
    """Form of all records of train-data, where their fields tell two: messages, conversations, instruction, prompt."""
    eval_fraction: float = 0.05
    """Share of train-data that is held out."""
    chat_template: str | None = None
    """chatml, llama3 or plain, a file of Jinja, or the directory of a model; default: the chat template of --model."""
    plan: Literal["auto", "off"] | None = None
    """auto: `memo plan` chooses layout, recomputation and swapping; default: on several GPUs where no flag does."""
    plan_hardware: str | None = None
    """Machine to plan for, as in `memo plan --hardware`; default: by the name of the GPU."""


def main(argv: Sequence[str]) -> None:
    """Raises MemoError for a run that cannot be, before torch is loaded where that is known by then."""
    config, options = parse_command(argv, Options(), prog="memo finetune", about=ABOUT, examples=EXAMPLES)
    if options.plan != "auto":  # which refuses flags of layout
        require_started(config, "memo finetune", argv)
    model, save = config.checkpoint.pretrained_checkpoint, config.checkpoint.save
    if model is None or save is None:
        raise ConfigError("--model DIR and --save OUT are needed: a Hugging Face directory, and where to write")
    export = Path(save, "hf")
    if export.exists():  # better told now than after the training
        raise ConfigError(f"--save {save}: {export} exists: choose another directory, or remove it")
    if config.training.preference is not None:
        _check_preference(config, options)
    with GracefulStop().listening() as stop:
        from memo.checkpoint.hugging_face.exporter import export_run
        from memo.train.outputs import check_files
        from memo.train.trainer import Trainer

        check_files(config)
        corpus = build_corpus(config, options, model, save)
        config = _with_plan(config.override({"data_path": corpus}), options, model)
        with Trainer(config=config, eval_data=f"{corpus}-eval", stop=stop) as trainer:
            _finetune(trainer)
            if not trainer.was_stopped and trainer.mesh.rank == 0:
                exported = export_run(trainer.config, export, alone=True)
                print(f"exported {exported.content} to {exported.path}")


def _finetune(trainer: "Trainer") -> None:
    trainer.print_header()
    held_out = trainer.eval_data
    assert isinstance(held_out, PackedConversations | PackedDataset | PreferencePairs), "a corpus is one of them"
    trainer.print(f"held out: {held_out.describe()}")
    rounds = math.ceil(held_out.samples_per_epoch / trainer.global_batch_size)
    begun = f"at iteration {trainer.iteration}" if trainer.iteration else "before"
    before = trainer.evaluate(rounds)
    trainer.log_evaluation(before)
    trainer.train()
    if trainer.was_stopped:  # by a signal: whoever sent it waits
        return
    after = trainer.evaluate(rounds)
    trainer.log_evaluation(after)
    of = "pairs" if isinstance(held_out, PreferencePairs) else "answers, nats a token"
    trainer.print(f"loss of held-out {of}: {before:.4f} {begun}, {after:.4f} after")


def build_corpus(config: RunConfig, options: Options, model: str, save: str) -> str:
    """Prefix of the corpus, which the first rank builds while the others wait; PREFIX-eval is held out."""
    kind = "chat" if config.training.preference is None else "pairs"
    train_data = options.train_data
    if train_data is None:
        words = config.data.data_path or ("None",)
        if len(words) != 1 or not Path(f"{words[0]}{TEMPLATE_SUFFIX if kind == 'chat' else '.idx'}").exists():
            raise ConfigError(
                f"--data-path {' '.join(words)} is no corpus of `memo data {kind}`: give one, or --train-data"
            )
        return words[0]
    from memo.train.first_rank import on_first_rank

    prefix = f"{save}/data/{kind}"
    build = partial(build_chat, chat_form=options.chat_form) if kind == "chat" else build_pairs

    def build_it() -> None:
        build(
            [train_data],
            prefix,
            tokenizer=config.data.tokenizer or model,
            chat_template=options.chat_template,
            split_eval=options.eval_fraction,
            reading=Reading(progress=config.logging.progress),
        )

    on_first_rank(build_it)
    return prefix


def _check_preference(config: RunConfig, options: Options) -> None:
    """Raises ConfigError for what does not go with --preference here, beside what `memo train` refuses."""
    from memo.train.log_probs import check_reference

    if options.chat_form is not None:
        raise ConfigError(
            f"--chat-form {options.chat_form} fights with --preference {config.training.preference}, whose pairs have "
            "other forms: leave it out"
        )
    check_reference(config.model)  # held-out pairs are compared with it


def _with_plan(config: RunConfig, options: Options, model: str) -> RunConfig:
    """The fastest layout that fits, if it is asked for or several GPUs are here and no flag chooses."""
    import torch

    from memo.train.plan_run import has_own_layout, plan_run

    ranks = world_size_from_env()
    automatic = options.plan is None and ranks > 1 and torch.cuda.is_available() and not has_own_layout(config)
    if options.plan != "auto" and not automatic:
        return config
    config, choice = plan_run(config, model, ranks, options.plan_hardware)
    if is_first_of_node():
        print(f"plan: {choice.layout}, {choice.strategy}", flush=True)
    return config
