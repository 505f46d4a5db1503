"""Fine-tune a Hugging Face model on conversations: the loss is that of the assistant's answers alone.

Renders the data with the model's own chat template, holds some out, trains, says what answers cost before and after,
and exports to SAVE/hf. On several GPUs `memo.plan` chooses how to spread the model and what activations do, unless
flags do. All flags of `memo train` work. docs/finetuning.md has the forms of the data and what is masked.
"""

import math
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from memo import RunConfig, Trainer  # before torch: it says how torch's threads wait

# isort: split
import torch
import torch.distributed as dist

from memo.checkpoint.hugging_face import export_checkpoint
from memo.config.derived import world_size_from_env
from memo.config.flags import parse_command
from memo.config.launching import require_started
from memo.config.parallel import ParallelConfig
from memo.data import Reading, build_chat
from memo.data.chat import TEMPLATE_SUFFIX
from memo.data.chat_template import TEMPLATE_FILE
from memo.data.conversations import ChatForm
from memo.errors import ConfigError, exit_on_error, is_first_of_node
from memo.mesh import init_distributed
from memo.train.ending import shutdown
from memo.train.outputs import check_files
from memo.train.plan_run import has_own_layout, plan_run
from memo.train.stop import GracefulStop

ABOUT = "Fine-tune a Hugging Face model on conversations: the loss is that of the assistant's answers alone."
EXAMPLES = (
    "python examples/finetune.py --model Qwen3-0.6B --train-data chats.jsonl --num-epochs 1 --save runs/small",
    "torchrun --nproc-per-node 8 examples/finetune.py --model Llama-3.1-8B-Instruct --train-data chats.jsonl "
    "--seq-len 8K --gbs 32 --num-epochs 2 --lr 1e-5 --save runs/chat",
)


@dataclass(frozen=True)
class Options:
    """Of fine-tuning, beside those of a run."""

    train_data: str | None = None
    """File or directory of conversations, as `memo data chat` reads them; default: what it wrote at data-path, with a
    split."""
    chat_form: ChatForm | None = None
    """Form of all records of train-data, where their fields tell two: messages, conversations, instruction, prompt."""
    eval_fraction: float = 0.05
    """Share of the conversations of train-data that is held out."""
    chat_template: str | None = None
    """File of Jinja, or directory of a model; default: the chat template of --model."""
    plan: Literal["auto", "off"] | None = None
    """auto: `memo plan` chooses layout, recomputation and swapping; default: on several GPUs where no flag does."""
    plan_hardware: str | None = None
    """Machine to plan for, as in `memo plan --hardware`; default: by the name of the GPU."""


def main() -> None:
    config, options = parse_command(
        sys.argv[1:], Options(), prog="examples/finetune.py", about=ABOUT, examples=EXAMPLES
    )
    with exit_on_error(needs_output=False), GracefulStop().listening() as stop:
        if options.plan != "auto":  # which refuses flags of layout
            require_started(config, "examples/finetune.py", sys.argv[1:])
        model, save = config.checkpoint.pretrained_checkpoint, config.checkpoint.save
        if model is None or save is None:
            raise ConfigError("--model DIR and --save OUT are needed: a Hugging Face directory, and where to write")
        export = Path(save, "hf")
        if export.exists():  # better told now than after the training
            raise ConfigError(f"--save {save}: {export} exists: choose another directory, or remove it")
        check_files(config)
        corpus = build_corpus(config, options, model, save)
        config = with_plan(config.override({"data_path": corpus}), options, model)
        with Trainer(config=config, eval_data=f"{corpus}-eval", stop=stop) as trainer:
            finetune(trainer)
            if trainer.was_stopped:
                return
            if trainer.mesh.rank == 0:
                exported = export_checkpoint(save, export)
                shutil.copyfile(f"{corpus}{TEMPLATE_SUFFIX}", export / TEMPLATE_FILE)
                print(f"exported {exported.architecture} to {exported.path}")


def finetune(trainer: Trainer) -> None:
    trainer.print_header()
    trainer.print(f"held out: {trainer.eval_data.describe()}")
    rounds = math.ceil(trainer.eval_data.samples_per_epoch / trainer.global_batch_size)
    before = trainer.evaluate(rounds)
    trainer.train()
    if trainer.was_stopped:  # by a signal: whoever sent it waits
        return
    after = trainer.evaluate(rounds)
    trainer.print(f"loss of held-out answers, nats a token: {before:.4f} before, {after:.4f} after")


def build_corpus(config: RunConfig, options: Options, model: str, save: str) -> str:
    """Prefix of the corpus, which the first rank builds while the others wait; PREFIX-eval is held out."""
    if options.train_data is None:
        words = config.data.data_path or ("None",)
        if len(words) != 1 or not Path(f"{words[0]}{TEMPLATE_SUFFIX}").exists():
            raise ConfigError(
                f"--data-path {' '.join(words)} is no corpus of `memo data chat`: give one, or --train-data"
            )
        return words[0]
    world = init_distributed(torch.device("cpu"), ParallelConfig(distributed_timeout_minutes=24 * 60.0))
    prefix, tokenizer = f"{save}/data/chat", config.data.tokenizer or model
    if world.rank == 0:
        template, split = options.chat_template, options.eval_fraction
        build_chat(
            [options.train_data],
            prefix,
            tokenizer=tokenizer,
            chat_template=template,
            chat_form=options.chat_form,
            split_eval=split,
            reading=Reading(progress=config.logging.progress),
        )
    if world.size > 1:
        dist.barrier()
        shutdown()
    return prefix


def with_plan(config: RunConfig, options: Options, model: str) -> RunConfig:
    """The fastest layout that fits, if it is asked for or several GPUs are here and no flag chooses."""
    ranks = world_size_from_env()
    automatic = options.plan is None and ranks > 1 and torch.cuda.is_available() and not has_own_layout(config)
    if options.plan != "auto" and not automatic:
        return config
    config, choice = plan_run(config, model, ranks, options.plan_hardware)
    if is_first_of_node():
        print(f"plan: {choice.layout}, {choice.strategy}", flush=True)
    return config


if __name__ == "__main__":
    main()
