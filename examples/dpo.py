"""Learn preferences with adapters: `memo train --preference dpo`, as a script for launchers that take one.

    python examples/dpo.py --model Qwen3-0.6B --lora-rank 16 --data-path pairs.jsonl --save runs/dpo --num-epochs 1
    torchrun --nproc-per-node 8 examples/dpo.py --model Llama-3.1-8B-Instruct --lora-rank 16 --data-path pairs.jsonl \
        --save runs/dpo --seq-len 64K --cp 8 --gbs 16 --num-epochs 1

Any other flag of memo train may follow; --preference ipo chooses the other loss.
"""

import sys

from memo.train.entry import main

if __name__ == "__main__":
    sys.exit(main(["--preference", "dpo", *sys.argv[1:]], prog="examples/dpo.py"))
