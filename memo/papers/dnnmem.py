"""DNNMem (Gao et al., 2020) as LLMem's section 3.1 describes it: walk the graph and add up the tensors that are alive.

Operators run in topological order, forward and then backward. Weights exist before and after the run; an operator's
outputs are allocated when it runs, in multiples of 512 bytes, and freed after their last reader. The peak adds a
constant buffer of the allocator, 64 MiB, and the CUDA context. Everything is fp32.

Known errors: no mixed precision, no memory for optimizer states, only one GPU. LLMem's table 2 has it 34 to 43 % below
the measured peaks. The graph here is a decoder's, with checkpointing as in that comparison. The printed values cannot
be recomputed, because the paper does not say how its graphs were cut.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from memo.spec.shapes import ModelShape
from memo.units import MIB

ALIGNMENT_BYTES = 512
BUFFER_BYTES = 64 * MIB
CONTEXT_BYTES = 500 * MIB
"""CUDA context of a V100 with PyTorch. Assumed: the papers measure it but do not print it."""

FP32 = 4


@dataclass(frozen=True)
class Operator:
    """One node of a graph, which reads and makes named tensors.

    Attributes:
        outputs: {name: bytes}; each name is made once.
        keeps: outputs that are never freed (gradients of weights).
    """

    name: str
    inputs: tuple[str, ...]
    outputs: dict[str, int]
    keeps: frozenset[str] = frozenset()


def peak_live_bytes(operators: Sequence[Operator]) -> int:
    """The most bytes alive while any operator runs: its inputs and outputs, and all tensors that later operators
    read."""
    readers = Counter(name for operator in operators for name in operator.inputs)
    sizes: dict[str, int] = {}
    live = peak = 0
    for operator in operators:
        for name, num_bytes in operator.outputs.items():
            sizes[name] = -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
            live += sizes[name]
        peak = max(peak, live)
        for name in operator.inputs:
            readers[name] -= 1
            if readers[name] == 0:
                live -= sizes[name]
        for name in operator.outputs:
            if not readers[name] and name not in operator.keeps:
                live -= sizes[name]
    return peak


class DnnMem(NamedTuple):
    """Bytes of one GPU."""

    weight_bytes: int
    live_bytes: int
    overhead_bytes: int


@lru_cache(maxsize=1024)
def dnnmem(shape: ModelShape, seq_length: int, batch: int) -> DnnMem:
    """Peak of one training iteration on one GPU, with checkpointing at every layer; cached, because it takes long."""
    weights = FP32 * shape.parameters
    return DnnMem(weights, peak_live_bytes(decoder_graph(shape, seq_length, batch)), CONTEXT_BYTES + BUFFER_BYTES)


def decoder_graph(shape: ModelShape, seq_length: int, batch: int) -> list[Operator]:
    """One iteration: forward keeps only each layer's input; backward first runs the layer again."""
    graph = _Graph(shape, seq_length * batch)
    hidden = {"h0": graph.hidden}
    operators = [Operator("embedding", (), hidden)]
    for layer in range(shape.nearest.num_layers):
        operators += graph.layer(layer, "")
    operators += graph.head(shape.nearest.num_layers)
    for layer in reversed(range(shape.nearest.num_layers)):
        operators += graph.layer(layer, "again ", last=False)
        operators += graph.layer_backward(layer)
    table = {"d embedding": FP32 * (shape.embedding + shape.positions * shape.nearest.hidden_size)}
    return [*operators, Operator("embedding backward", ("d h0",), table, frozenset(table))]


class _Graph:
    """Operators of one decoder; sizes in bytes of all tokens of the batch."""

    def __init__(self, shape: ModelShape, tokens: int) -> None:
        self.shape, self.tokens = shape, tokens
        self.hidden = FP32 * tokens * shape.nearest.hidden_size
        qkv = FP32 * tokens * (shape.q_size + 2 * shape.kv_size)
        fc1, wide = FP32 * tokens * shape.fc1_size, FP32 * tokens * shape.nearest.mlp_size
        attention, mlp = self._weights()
        half = shape.layer_replicated * FP32 // 2  # norms and late biases, divided evenly
        self.chain = (  # name, bytes of the output, of the weight's gradient
            ("norm1", self.hidden, half),
            ("qkv", qkv, FP32 * (attention - shape.linears[3])),
            ("attention", FP32 * tokens * shape.q_size, 0),
            ("residual", self.hidden, FP32 * shape.linears[3]),
            ("norm2", self.hidden, half),
            ("fc1", fc1, FP32 * (mlp - shape.linears[-1])),
            ("active", wide, 0),
            ("out", self.hidden, FP32 * shape.linears[-1]),
        )

    def _weights(self) -> tuple[int, int]:
        attention = sum(self.shape.linears[:4])
        return attention, self.shape.layer_split - attention

    def layer(self, layer: int, run: str, *, last: bool = True) -> Iterator[Operator]:
        """Forward of one layer: a chain whose last operator, the sum, reads the residual again."""
        before = f"h{layer}"
        for name, num_bytes, _ in self.chain:
            if name == "out" and not last:
                return  # the input of the next layer is not needed again
            after = f"h{layer + 1}" if name == "out" else f"{run}{name} {layer}"
            extra = {"residual": (f"h{layer}",), "out": (f"{run}residual {layer}",)}.get(name, ())
            yield Operator(f"{run}{name} {layer}", (before, *extra), {after: num_bytes})
            before = after

    def layer_backward(self, layer: int) -> Iterator[Operator]:
        """Backward of one layer: operators read their input of the second forward and the gradient of their output."""
        names = [f"h{layer}", *(f"again {name} {layer}" for name, _, _ in self.chain[:-1])]
        sizes = [self.hidden, *(num_bytes for _, num_bytes, _ in self.chain[:-1])]
        gradient = f"d h{layer + 1}"
        for (name, _, weight), read, num_bytes in reversed(list(zip(self.chain, names, sizes, strict=True))):
            made = f"d h{layer}" if read == f"h{layer}" else f"d {read}"
            weights = {f"d weight {name} {layer}": weight} if weight else {}
            yield Operator(
                f"{name} {layer} backward", (read, gradient), {made: num_bytes, **weights}, frozenset(weights)
            )
            gradient = made

    def head(self, layers: int) -> list[Operator]:
        """Logits, the loss, and the backward to the last layer; the gradient of the logits takes the logits' memory."""
        shape, before = self.shape, f"h{layers}"
        weights = {"d head": FP32 * shape.head} if shape.head else {}
        made = {f"d h{layers}": self.hidden, **weights}
        return [
            Operator("logits", (before,), {"logits": FP32 * self.tokens * shape.nearest.vocabulary}),
            Operator("loss", ("logits",), {"losses": FP32 * self.tokens}),
            Operator("head backward", (before, "logits", "losses"), made, frozenset(weights)),
        ]
