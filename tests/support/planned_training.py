"""A small GPT of plain torch modules, trained under the planned allocator; every layer marks its phases."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from memo.allocator.planned import PlannedAllocator
from memo.artifacts.memory_trace import Trace

VOCABULARY, WIDTH, HEADS, NUM_LAYERS, BATCH, SEQ_LENGTH = 67, 32, 4, 3, 2, 48
WARMUP_STEPS = 2  # the optimizer's states are made in the first


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.projection = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.fc1, self.fc2 = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:  # [batch, s, h]
        q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in self.qkv(self.norm1(x)).chunk(3, -1))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.projection(attended)
        return x + self.fc2(F.gelu(self.fc1(self.norm2(x))))


class Gpt(nn.Module):
    def __init__(self, mark: Callable[[str, int], None]) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(NUM_LAYERS))
        self.head = nn.Linear(WIDTH, VOCABULARY)
        for i, layer in enumerate(self.layers):
            layer.register_forward_pre_hook(lambda *_, i=i: mark("layer_forward", i))
            layer.register_full_backward_pre_hook(lambda *_, i=i: mark("layer_backward", i))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Training:
    """A model and its optimizer; the same seed gives the same losses with any allocator."""

    def __init__(self, allocator: PlannedAllocator) -> None:
        torch.manual_seed(0)
        self.allocator = allocator
        self.model = Gpt(allocator.mark)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.num_steps = 0

    def step(self, seq_length: int = SEQ_LENGTH) -> float:
        """One step on its own data."""
        tokens = self.tokens(seq_length)
        self.num_steps += 1
        with self.allocator.iteration():
            self.allocator.mark("embedding")
            self.optimizer.zero_grad()  # gradients outlive their iteration, so the plan leaves them to torch
            loss = self.loss(tokens)
            self.allocator.mark("backward")
            loss.backward()
            self.allocator.mark("optimizer")
            self.optimizer.step()
            return loss.item()

    def tokens(self, seq_length: int) -> Tensor:
        generator = torch.Generator().manual_seed(self.num_steps)
        return torch.randint(0, VOCABULARY, (BATCH, seq_length + 1), generator=generator)

    def loss(self, tokens: Tensor) -> Tensor:
        logits = self.model(tokens[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())

    def record(self) -> tuple[list[float], Trace]:
        """The losses and the trace of the warm-up and of one recorded step."""
        losses = [self.step() for _ in range(WARMUP_STEPS)]
        with self.allocator.record() as recording:
            losses.append(self.step())
        return losses, recording.trace
