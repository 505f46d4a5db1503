"""`make demo`: trains a small model on this machine and draws its loss curve, in a few minutes.

Builds a corpus from the sources of Python's standard library, trains a small Llama on its bytes with the trainer that
also runs on GPUs, and leaves a checkpoint, a log and a Hugging Face model in runs/demo.
"""

import json
import math
import shutil
import time
from pathlib import Path

from memo import Trainer
from memo.checkpoint.hugging_face.exporter import export_checkpoint
from memo.data import build_demo
from memo.data.chat_templates import CHAT_TEMPLATES, TEMPLATE_FILE

RUN = Path("runs/demo")
CORPUS, CHECKPOINTS, MODEL = RUN / "corpus", RUN / "checkpoints", RUN / "model"
STEPS = 160
NEXT = f"""
next, with conversations of your own, a line each such as {{"prompt": "2 + 2 =", "completion": "4"}}:

. .venv/bin/activate
memo finetune --model {MODEL} --train-data chats.jsonl --save runs/mine \\
    --seq-len 512 --gbs 2 --train-iters 60 --lr 1e-3
memo generate --model runs/mine/hf --seq-len 128 --chat --prompt '2 + 2 ='

on GPUs: which layout, how fast, what binds

memo plan --model llama-3.1-8b --gpus 8 --hardware h100-80 --seq-len 512K --gbs 16"""


def main() -> None:
    shutil.rmtree(RUN, ignore_errors=True)
    summary = build_demo(CORPUS, split_eval=0.01)
    print(f"corpus: {summary.train.num_documents} files, {summary.train.num_tokens:,} byte tokens")
    with Trainer(
        "llama-tiny",
        train_data=CORPUS,
        eval_data=f"{CORPUS}-eval",
        seq_length=512,
        micro_batch_size=2,
        train_iters=STEPS,
        lr=3e-3,
        lr_warmup_iters=20,
        min_lr=3e-4,
        log_interval=40,
        log_jsonl=str(RUN / "log.jsonl"),
        save=str(CHECKPOINTS),
    ) as trainer:
        trainer.print_header()
        start_s = time.perf_counter()
        trainer.train()
        trained_s = time.perf_counter() - start_s
        if trainer.was_stopped:  # by a signal, whose sender waits for the end
            return
        report(trained_s, trainer.evaluate(4))
    export_checkpoint(CHECKPOINTS, MODEL)
    (MODEL / TEMPLATE_FILE).write_text(CHAT_TEMPLATES["plain"])
    print(f"log: {RUN / 'log.jsonl'}\ncheckpoint: {CHECKPOINTS}\nHugging Face model: {MODEL}")
    print(NEXT)


def report(trained_s: float, eval_loss: float) -> None:
    """Print the loss curve and the final figures."""
    records = [json.loads(line) for line in (RUN / "log.jsonl").read_text().splitlines()]
    losses = [record["lm_loss"] for record in records]
    print(f"\nloss in nats a byte over {len(losses)} steps ({trained_s:.0f} s of training)")
    print(curve(losses))
    print(
        f"first {losses[0]:.3f} (ln of the vocabulary: {math.log(257):.3f}), last {losses[-1]:.3f}, held out "
        f"{eval_loss:.3f}"
    )
    print(f"TGS {records[-1]['tgs']:.0f} tokens/s a device")


def curve(values: list[float], width: int = 60, height: int = 10) -> str:
    """Draw values as text, one mark in each column."""
    columns = [values[i * len(values) // width] for i in range(width)]
    low, high = min(values), max(values)
    rows = [round((value - low) / (high - low) * (height - 1)) for value in columns]
    lines = []
    for level in reversed(range(height)):
        label = low + (high - low) * level / (height - 1)
        lines.append(f"{label:6.2f} |" + "".join("*" if row == level else " " for row in rows))
    return "\n".join([*lines, "       +" + "-" * width])


if __name__ == "__main__":
    main()
