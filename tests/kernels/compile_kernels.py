"""Compiles the Triton kernels of all operations to machine code of a GPU that need not be there.

    TRITON_DUMP_PTXAS_LOG=1 python compile_kernels.py CAPABILITY

Prints the name of each kernel, and then what NVIDIA's assembler says of it: registers, and bytes that it had to spill.
"""

import sys
from itertools import product
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from memo_kernels import Ops, select_ops

TOKENS, HIDDEN, HEADS, HEAD_DIM, VOCABULARY = 64, 4096, 8, 128, 32768


class AbsentGpu:
    """What Triton asks of its driver before it compiles."""

    def __init__(self, capability: int) -> None:
        self.target = GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def compile_instead_of_running() -> None:
    run = JITFunction.run

    def compiled(self: JITFunction[Any], *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        sizes = [tuple(each.shape) for each in args if isinstance(each, torch.Tensor)]
        print(f"{self.__module__}.{self.__name__} of {sizes[0]}", flush=True)
        return run(self, *args, grid=grid, warmup=True, **options)

    JITFunction.run = compiled


def values(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.ones(*shape, dtype=dtype, requires_grad=dtype.is_floating_point)


def norms(ops: Ops) -> None:
    """Of hidden states and of heads; LayerNorm, RMSNorm, and RMSNorm with a wide weight."""
    for size, (of_weight, centered) in product(
        (HIDDEN, 2 * HIDDEN, HEAD_DIM), ((torch.bfloat16, True), (torch.bfloat16, False), (torch.float32, False))
    ):
        weight, bias = values(size, dtype=of_weight), values(size, dtype=of_weight) if centered else None
        ops.norm(values(TOKENS, 1, size), weight, bias, 1e-6).sum().backward()
        total, normed = ops.add_norm(values(TOKENS, 1, size), values(TOKENS, 1, size), weight, bias, 1e-6)
        (total + normed).sum().backward()


def activations(ops: Ops) -> None:
    for kind in ("gelu", "gelu_tanh", "swiglu", "swiglu_clamped", "geglu_tanh"):
        ops.activate(values(TOKENS, 1, 2 * HIDDEN), kind).sum().backward()


@torch.no_grad()
def heads(ops: Ops) -> None:
    q, angles = values(TOKENS, 1, HEADS, HEAD_DIM), values(TOKENS, 1, 1, HEAD_DIM // 2)
    ops.rotate(q, angles, angles)
    for back in (False, True):
        ops.rotate_(q, angles, angles, back=back)
    total, part = values(1, HEADS, TOKENS, HEAD_DIM, dtype=torch.float32), values(1, HEADS, TOKENS, HEAD_DIM)
    sums = values(1, HEADS, TOKENS, dtype=torch.float32)
    ops.merge_(total, sums, part, sums.clone())


@torch.no_grad()
def loss(ops: Ops) -> None:
    logits, labels = values(TOKENS, VOCABULARY), torch.zeros(TOKENS, dtype=torch.int64)
    of_rows = values(TOKENS, dtype=torch.float32)
    ops.logit_sums(logits, labels, VOCABULARY, lambda largest: largest)
    ops.logit_gradient_(logits, logits, labels, of_rows, of_rows, of_rows, VOCABULARY)
    ops.squared_norm(values(1 << 16, dtype=torch.float32))


def main() -> None:
    triton.runtime.driver.set_active(AbsentGpu(int(sys.argv[1])))
    compile_instead_of_running()
    ops = select_ops("triton", torch.bfloat16)
    for part in (norms, activations, heads, loss):
        part(ops)


if __name__ == "__main__":
    main()
