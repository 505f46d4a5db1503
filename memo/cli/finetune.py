"""`memo finetune`: trains a Hugging Face model on answers or preferences, from a file of records to SAVE/hf.

SAVE/hf is the model, or the LoRA adapters if PEFT's files can hold all that was trained. docs/finetuning.md has the
forms of the data and the masks.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from memo.artifacts.regular_file import removed_if_unused
from memo.config import RunConfig
from memo.config.derived import world_size_from_env
from memo.config.evaluation_run import LONGER_THAN_ANY_RUN
from memo.config.flags import parse_command
from memo.config.launching import require_started
from memo.data import PackedConversations, PackedDataset, PreferencePairs, Reading, build_chat, build_pairs
from memo.data.chat_templates import TEMPLATE_SUFFIX
from memo.data.conversations import ChatForm
from memo.data.find import check_corpora
from memo.errors import ConfigError, is_first_of_node
from memo.train.stop import GracefulStop

if TYPE_CHECKING:
    from memo.train.trainer import Trainer

ABOUT = (
    "Fine-tune a Hugging Face model on conversations, in which only the assistant's answers are learned, or with "
    "--preference on pairs of answers. Prints the loss of held-out data before and after, and writes SAVE/hf for "
    "Hugging Face. Takes every flag of `memo train`, also under torchrun."
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
    """Options of fine-tuning besides those of a run."""

    train_data: str | None = None
    """File or directory of conversations for `memo data chat`, or with preference of pairs for `memo data pairs`;
    default: the corpus at data-path, built by one of these commands with a held-out part."""
    chat_form: ChatForm | None = None
    """Form of all records of train-data if their fields fit two: messages, conversations, instruction or prompt."""
    eval_fraction: float = 0.05
    """Share of train-data to hold out; nothing is held out with eval-data-path."""
    chat_template: str | None = None
    """chatml, llama3 or plain, a Jinja file, or the directory of a model; default: the chat template of --model."""
    plan: Literal["auto", "off"] | None = None
    """auto: `memo plan` chooses layout, recomputation and swapping; default: auto on several GPUs unless flags do."""
    plan_hardware: str | None = None
    """Machine to plan for, as in `memo plan --hardware`; default: the machine with this GPU, and this node's host
    memory."""


def main(argv: Sequence[str]) -> None:
    """Raises MemoError for a run that cannot start, if possible before torch is loaded."""
    config, options = parse_command(argv, Options(), prog="memo finetune", about=ABOUT, examples=EXAMPLES)
    if options.plan != "auto":  # a plan refuses flags of layout
        require_started(config.parallel, "memo finetune", argv)
    model, save = config.checkpoint.pretrained_checkpoint, config.checkpoint.save
    if model is None or save is None:
        raise ConfigError("--model DIR and --save OUT are needed: a Hugging Face directory, and where to write")
    export = Path(save, "hf")
    if export.exists():  # refused now rather than after the training
        raise ConfigError(f"--save {save}: {export} exists: choose another directory, or remove it")
    if config.training.preference is not None:
        _check_preference(config, options)
    if config.data.eval_data_path is not None:
        check_corpora(config)
    with GracefulStop().listening() as stop, removed_if_unused(save):
        from memo.checkpoint.hugging_face.exporter import export_run
        from memo.train.outputs import check_files
        from memo.train.trainer import Trainer

        check_files(config)
        corpus = build_corpus(config, options, model, save)
        interval = config.training.eval_interval or LONGER_THAN_ANY_RUN
        held_out = config.data.eval_data_path or (f"{corpus}-eval",)
        data = {"data_path": corpus, "eval_data_path": held_out, "eval_interval": interval}
        config = _with_plan(config.override(data), options, model)
        with Trainer(config=config, stop=stop) as trainer:
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
    if trainer.was_stopped:  # by a signal, whose sender waits for the end
        return
    after = trainer.evaluate(rounds)
    trainer.log_evaluation(after)
    of = "pairs" if isinstance(held_out, PreferencePairs) else "answers, nats a token"
    trainer.print(f"loss of held-out {of}: {before:.4f} {begun}, {after:.4f} after")


def build_corpus(config: RunConfig, options: Options, model: str, save: str) -> str:
    """Return the prefix of the corpus; rank 0 builds it while all other ranks wait. PREFIX-eval is held out, unless
    --eval-data-path names a corpus."""
    kind = "chat" if config.training.preference is None else "pairs"
    train_data, holds_out = options.train_data, config.data.eval_data_path is None
    if train_data is None:
        words = config.data.data_path
        if words is None:
            raise ConfigError(f"there are no answers to learn: give --train-data, or --data-path of `memo data {kind}`")
        if len(words) != 1 or not Path(f"{words[0]}{TEMPLATE_SUFFIX if kind == 'chat' else '.idx'}").exists():
            raise ConfigError(
                f"--data-path {' '.join(words)} is no corpus of `memo data {kind}`: give one, or --train-data"
            )
        if holds_out and not Path(f"{words[0]}-eval.idx").exists():
            raise ConfigError(
                f"--data-path {words[0]} has no held-out part, {words[0]}-eval: build both with `memo data {kind}` and "
                "--eval-fraction 0.05, or give --train-data, or another corpus as --eval-data-path"
            )
        return words[0]
    if holds_out and options.eval_fraction == 0:
        raise ConfigError(
            "--eval-fraction is 0, but the loss of a held-out part is told: give more, such as 0.05, or a corpus as "
            "--eval-data-path"
        )
    from memo.train.first_rank import on_first_rank

    prefix = f"{save}/data/{kind}"
    build = partial(build_chat, chat_form=options.chat_form) if kind == "chat" else build_pairs
    fields: dict[str, Any] = {"tokenizer": config.data.tokenizer or model, "chat_template": options.chat_template}
    reading = Reading(progress=config.logging.progress)
    share = options.eval_fraction if holds_out else 0.0

    def build_it() -> None:
        build([train_data], prefix, **fields, split_eval=share, reading=reading)

    on_first_rank(build_it)
    return prefix


def _check_preference(config: RunConfig, options: Options) -> None:
    """Raises ConfigError for flags that conflict with --preference in this command only."""
    from memo.train.log_probs import check_reference

    if options.chat_form is not None:
        raise ConfigError(
            f"--chat-form {options.chat_form} conflicts with --preference {config.training.preference}, whose pairs "
            "have other forms: leave it out"
        )
    # Held-out pairs are compared with it.
    check_reference(config.model, "give `memo train` --reference-log-probs, which holds no pairs out")


def _with_plan(config: RunConfig, options: Options, model: str) -> RunConfig:
    """Return `config` with the fastest layout that fits if --plan auto is given, or on several GPUs unless flags choose
    one."""
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
