"""Pretrain a GPT or Llama model, under plain python or torchrun.

    python examples/pretrain_gpt.py --mock-data --train-iters 20
    torchrun --nproc-per-node 8 examples/pretrain_gpt.py --model gpt-7b --tp 8 --seq-len 65536 \\
        --data-path DATA

`--help` lists every flag; Megatron-LM's names of flags work, too.
"""

import sys

from memo.train.entry import main

if __name__ == "__main__":
    sys.exit(main(prog="examples/pretrain_gpt.py"))
