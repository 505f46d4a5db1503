"""Train a LoRA adapter on conversations: `memo finetune` with a rank, as a script to copy and change.

    python examples/lora.py --model Llama-3.1-8B-Instruct --train-data chats.jsonl --save runs/chat

It leaves the adapter in runs/chat/hf, for PEFT and transformers (docs/lora.md). It takes every flag of the command;
given flags override the script's own.
"""

import sys

from memo.cli.main import main

ADAPTERS = ["--lora-rank", "16", "--lora-alpha", "32", "--lora-target-modules", "all-linear", "--lr", "2e-4"]

if __name__ == "__main__":
    sys.exit(main(["finetune", *ADAPTERS, *sys.argv[1:]]))
