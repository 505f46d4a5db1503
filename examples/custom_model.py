"""A layer of your own, trained under memo's plans: attention and MLP in parallel, as in GPT-J and PaLM.

    python examples/custom_model.py
    torchrun --nproc-per-node 2 examples/custom_model.py --tp 2 --offload-alpha 0.5

y = x + projection(attention(qkv(norm(x)))) + fc2(activation(fc1(norm(x)))), with one norm for both. Every flag of
`memo train` works, and `memo train --custom-layer examples/custom_model.py:ParallelLayer` trains the same layer.
docs/custom_model.md explains it.
"""

import sys
from pathlib import Path

import memo  # before torch, because it sets how torch's threads wait

# isort: split
from torch import Tensor

from memo.train.entry import main

LAYER = f"{Path(__file__).resolve()}:ParallelLayer"
"""The value of --custom-layer for the class below."""


class ParallelLayer(memo.CustomLayer):
    """Both branches read the same norm of the layer's input, so neither waits for the other."""

    def __init__(self, parts: memo.LayerParts) -> None:
        super().__init__(parts)
        model = parts.model
        q, kv = model.num_attention_heads * model.head_dim, model.kv_heads * model.head_dim
        self.norm = parts.norm("norm")
        self.qkv = parts.column("qkv", {"q": q, "k": kv, "v": kv})
        self.projection = parts.row("projection", q)
        gated = {"gate": model.ffn_size, "up": model.ffn_size}
        self.fc1 = parts.column("fc1", gated if model.gated else model.ffn_size)
        self.fc2 = parts.row("fc2", model.ffn_size)
        self.activate = parts.activate

    def before_attention(self, x: Tensor) -> Tensor:
        return self.qkv(self.norm(x))

    def after_attention(self, x: Tensor, attended: Tensor) -> Tensor:
        return x + self.projection(attended) + self.fc2(self.activate(self.fc1(self.norm(x))))


DEFAULTS = ("--model", "llama-tiny", "--seq-len", "512", "--train-iters", "20", "--lr", "3e-3", "--custom-layer", LAYER)

if __name__ == "__main__":
    data = () if any(word.startswith("--data") for word in sys.argv) else ("--mock-data",)
    sys.exit(main([*DEFAULTS, *data, *sys.argv[1:]], prog="examples/custom_model.py"))
