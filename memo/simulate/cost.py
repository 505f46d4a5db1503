"""Seconds of compute on one rank, by kind of work."""

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Cost:
    """Seconds for which the compute stream of a rank is occupied; work that overlaps with compute is not included.

    Attributes:
        matmul: matrix products.
        attention: kernels of attention.
        elementwise: norms, activations, RoPE, sums, copies on the device, the loss: bound by memory.
        tensor: collectives of tp and its sequence parallelism.
        context: messages and collectives of cp.
        host: waiting for the host to start kernels.
    """

    matmul: float = 0.0
    attention: float = 0.0
    elementwise: float = 0.0
    tensor: float = 0.0
    context: float = 0.0
    host: float = 0.0

    @property
    def total_s(self) -> float:
        return self.matmul + self.attention + self.elementwise + self.tensor + self.context + self.host

    def __add__(self, other: "Cost") -> "Cost":
        return Cost(
            self.matmul + other.matmul,
            self.attention + other.attention,
            self.elementwise + other.elementwise,
            self.tensor + other.tensor,
            self.context + other.context,
            self.host + other.host,
        )

    def __mul__(self, times: float) -> "Cost":
        return Cost(
            self.matmul * times,
            self.attention * times,
            self.elementwise * times,
            self.tensor * times,
            self.context * times,
            self.host * times,
        )


NOTHING = Cost()


@dataclass(frozen=True)
class LayerCost:
    """The cost of one layer and microbatch on one rank, averaged over all layers.

    Attributes:
        backward: without recomputation of activations that may move to host memory.
        recompute: by group of `memo.spec.skeleton`, the cost of rebuilding all tokens of the group in backward.
        attention_again: recomputation of attention before backward, averaged over the layers with and without it.
        by_layer: seconds of forward and backward of each layer if the model has several kinds of layer; else empty.
    """

    forward: Cost
    backward: Cost
    recompute: dict[str, Cost] = field(default_factory=dict)
    attention_again: Cost = NOTHING
    by_layer: tuple[tuple[float, float], ...] = ()

    @property
    def computed_s(self) -> tuple[float, float]:
        """Seconds of forward and of backward."""
        return self.forward.total_s, self.backward.total_s + self.attention_again.total_s
