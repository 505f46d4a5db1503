"""Trains with weights and optimizer states on the host by PyTorch's own FSDP2 with CPUOffloadPolicy, on one rank.

    python benchmarks/fsdp2.py '{"num_layers": 2, "hidden_size": 128, "num_attention_heads": 4, "vocab_size": 512,
                                 "seq_length": 512, "device": "cpu"}'

A GPT of torch.nn alone (LayerNorm, GELU, learned positions, scaled-dot-product attention), its blocks checkpointed and
sharded one by one. Weights, gradients and AdamW's moments are fp32 and live on the host, where AdamW runs; a block's
weights come to the device as bf16 when it computes. On a CPU nothing is pinned, and all is fp32. The last line printed
is the row.
"""

import contextlib
import dataclasses
import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from measure import DeviceMemory, percentiles
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

from memo.train.device import peak_memory_bytes
from memo.train.oom import is_out_of_memory


@dataclass(frozen=True)
class Gpt:
    """The model and its training: `warmup` steps, then `steps` measured ones, on one sequence of `seq_length` each."""

    num_layers: int
    hidden_size: int
    num_attention_heads: int
    vocab_size: int
    seq_length: int
    device: str = "cpu"
    warmup: int = 1
    steps: int = 3
    loss_chunk_size: int = 8192
    """Tokens whose logits live at once, as in memo."""
    seed: int = 0


class Block(nn.Module):
    """[b, s, h] -> [b, s, h]; recomputed in backward from its input."""

    def __init__(self, gpt: Gpt) -> None:
        super().__init__()
        size = gpt.hidden_size
        self.heads = gpt.num_attention_heads
        self.attention_norm, self.mlp_norm = nn.LayerNorm(size), nn.LayerNorm(size)
        self.qkv, self.projection = nn.Linear(size, 3 * size), nn.Linear(size, size)
        self.fc1, self.fc2 = nn.Linear(size, 4 * size), nn.Linear(4 * size, size)

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self._compute, x, use_reentrant=False, preserve_rng_state=False)  # type: ignore[no-any-return]

    def _compute(self, x: Tensor) -> Tensor:
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in self.qkv(self.attention_norm(x)).chunk(3, dim=-1)
        )
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.projection(attended.transpose(1, 2).flatten(2))
        return x + self.fc2(F.gelu(self.fc1(self.mlp_norm(x)), approximate="tanh"))  # type: ignore[no-any-return]


class PlainGpt(nn.Module):
    """tokens [b, s], targets [b, s] -> mean loss in nats; the logits of all tokens never live at once."""

    def __init__(self, gpt: Gpt) -> None:
        super().__init__()
        self.chunk = gpt.loss_chunk_size
        self.tokens = nn.Embedding(gpt.vocab_size, gpt.hidden_size)
        self.positions = nn.Embedding(gpt.seq_length, gpt.hidden_size)
        self.blocks = nn.ModuleList(Block(gpt) for _ in range(gpt.num_layers))
        self.norm = nn.LayerNorm(gpt.hidden_size)
        self.head = nn.Linear(gpt.hidden_size, gpt.vocab_size, bias=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        pieces = zip(self.norm(x).split(self.chunk, dim=1), targets.split(self.chunk, dim=1), strict=True)
        losses = [checkpoint(self._loss, *piece, use_reentrant=False, preserve_rng_state=False) for piece in pieces]
        return torch.stack(losses).sum() / targets.numel()

    def _loss(self, x: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(self.head(x).float().flatten(0, 1), targets.flatten(), reduction="sum")


def fsdp2_offload(gpt: Gpt) -> dict[str, Any]:
    """Train; return status, seconds of steps, tgs, peaks of device and host, and losses.

    Starts and ends a process group of one rank if there is none. A run for which memory does not suffice is a row with
    status oom; other errors are raised.
    """
    try:
        with _one_rank(gpt.device):
            return _train(gpt)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        return {"status": "oom", "message": str(error).splitlines()[0]}


def _train(gpt: Gpt) -> dict[str, Any]:
    torch.manual_seed(gpt.seed)
    model = _sharded(PlainGpt(gpt), gpt.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)  # where the weights are: on the host

    def step(tokens: Tensor) -> Tensor:
        loss: Tensor = model(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return {**train_steps(gpt, step), "states_bytes": sum(_states_bytes(model, optimizer))}


def train_steps(gpt: Gpt, step: Callable[[Tensor], Tensor]) -> dict[str, Any]:
    """Warm up, then time `step`, which trains on tokens [1, s + 1] and returns the loss."""
    generator = torch.Generator().manual_seed(gpt.seed)
    tokens = torch.randint(0, gpt.vocab_size, (1, gpt.seq_length + 1), generator=generator).to(gpt.device)
    steps_s, losses = [], []
    for number in range(gpt.warmup + gpt.steps):
        if number == gpt.warmup:
            memory = DeviceMemory.begin(gpt.device)
        start_s = time.perf_counter()
        losses.append(step(tokens).item())  # waits for the device
        steps_s.append(time.perf_counter() - start_s)
    timed = percentiles(steps_s[gpt.warmup :])
    return {
        "status": "ok",
        **timed,
        "tgs": gpt.seq_length / timed["step_p50_s"],
        **memory.end(gpt.steps),
        "host_peak_bytes": peak_memory_bytes(torch.device(gpt.device))[1],
        "losses": losses,
        "last_loss": losses[-1],
    }


def _sharded(model: PlainGpt, device: str) -> PlainGpt:
    """Shard each block, then the rest of the model; all weights stay on the host between uses."""
    mesh = init_device_mesh(device, (1,))
    wide = device == "cpu"
    policy = MixedPrecisionPolicy() if wide else MixedPrecisionPolicy(torch.bfloat16, reduce_dtype=torch.float32)
    offload = CPUOffloadPolicy(pin_memory=not wide)
    for part in (*model.blocks, model):
        fully_shard(part, mesh=mesh, mp_policy=policy, offload_policy=offload)
    return model


def _states_bytes(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[int]:
    """Yield the bytes of weights and of AdamW's states, each once; gradients are freed between steps."""
    for parameter in model.parameters():
        yield parameter.nbytes
    for state in optimizer.state.values():
        yield from (value.nbytes for value in state.values() if isinstance(value, Tensor))


@contextlib.contextmanager
def _one_rank(device: str) -> Iterator[None]:
    if dist.is_initialized():
        yield
        return
    backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"  # norms of gradients are reduced on the host
    dist.init_process_group(backend, rank=0, world_size=1, store=dist.HashStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def main() -> None:
    if len(sys.argv) != 2 or sys.argv[1] in ("-h", "--help"):
        print(f"usage: {sys.argv[0]} GPT\n\n{__doc__}\nFields: {[field.name for field in dataclasses.fields(Gpt)]}")
        raise SystemExit(0 if "-h" in sys.argv or "--help" in sys.argv else 2)
    print(json.dumps(fsdp2_offload(Gpt(**json.loads(sys.argv[1])))))


if __name__ == "__main__":
    main()
