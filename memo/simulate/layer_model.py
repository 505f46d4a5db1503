"""The pieces of one transformer layer on one rank: every product, kernel and collective of the runtime, and its cost.

Follows `memo.model.layer`, `memo.parallel.tensor` and `memo.parallel.context`, and `memo.executor.layer` under a swap
plan. The time of a collective counts as far as the runtime waits for it: in backward, the collectives of a
column-parallel matrix overlap with its two products; messages of a ring overlap with the attention of their step; all
others overlap with nothing. Under a swap plan, backward starts each gather as soon as its input exists
(`LayerModel.swapped_backward`).

Shapes on one rank: t = s b / cp tokens gathered, n = t / tp tokens between matrices; q, kv, fc1, ffn widths / tp.
Known error: documents are not packed, attention is that of one causal document. Elementwise work counts as fused
kernels do it, each tensor read and written once; where torch composes it of several kernels (RoPE, SwiGLU, the
sums of a ring, the loss) it takes up to three times as long.
"""

from dataclasses import dataclass, field
from functools import cached_property

from memo.config import RunConfig
from memo.config.derived import layers_per_chunk, resolved_a2a_size
from memo.simulate.cost import NOTHING, Cost
from memo.simulate.kernels import Group, Kernels
from memo.simulate.sweep import SUM_PASSES, SweptAttention

_RING_KERNELS = 8
"""Kernels of one ring step besides attention: for two blocks, their sums, and the exchange of keys and values."""


@dataclass(frozen=True)
class LayerCost:
    """The cost of one layer and microbatch on one rank.

    Attributes:
        backward: without any recomputation of skeletal activations.
        recompute: by group of `memo.spec.skeleton`, to rebuild all tokens of it in backward.
        attention_again: before backward, on the average of all layers: some recompute attention, others do not.
    """

    forward: Cost
    backward: Cost
    recompute: dict[str, Cost] = field(default_factory=dict)
    attention_again: Cost = NOTHING


@dataclass(frozen=True)
class LayerModel:
    """Sizes of one layer on one rank, and the times of its pieces."""

    config: RunConfig
    kernels: Kernels
    tiles: int = 1
    """Parts of the sequence that are computed at a time (memo.executor.layer)."""
    sweeps: bool = False
    """Whether attention too is computed tile by tile (memo.executor.sweep)."""
    swaps: bool = False
    """Whether the layer runs under a swap plan, which adds weight gradients in products wherever these can."""

    @cached_property
    def tokens(self) -> float:
        return self.config.data.seq_length * self.config.training.micro_batch_size / self.config.parallel.cp

    @cached_property
    def meeting_parts(self) -> int:
        """Parts of the sequence whose tokens meet over cp one after the other."""
        return self.tiles if self.sweeps else 1

    @cached_property
    def tp(self) -> Group:
        return Group(self.config.parallel.tp, 1)

    @cached_property
    def q(self) -> float:
        return self.config.model.num_attention_heads * self.config.model.head_dim / self.tp.size

    @cached_property
    def kv(self) -> float:
        """Width of k, which is also that of v."""
        return self.config.model.kv_heads * self.config.model.head_dim / self.tp.size

    @cached_property
    def qkv(self) -> float:
        return self.q + 2 * self.kv

    @cached_property
    def ffn(self) -> float:
        return self.config.model.ffn_size / self.tp.size

    @cached_property
    def fc1(self) -> float:
        return self.ffn * (2 if self.config.model.gated else 1)

    # Pieces of forward.

    def product(self, n: float, k: float) -> float:
        """Seconds of the product of all tokens with one matrix, tile by tile."""
        return self.tiles * self.kernels.matmul_s(self.tokens / self.tiles, n, k)

    @property
    def adds_in_products(self) -> bool:
        """Whether the product of a weight gradient adds to the main gradient. On CPUs autograd's hook does it for
        layers that do not run under a swap plan."""
        return self.kernels.adds_in_products and (self.swaps or self.kernels.hardware.device == "cuda")

    def weight_product(self, n: float, k: float) -> float:
        """Seconds of a weight gradient, which is summed over all tokens, tile by tile."""
        of_tile = self.kernels.adding_matmul_s if self.adds_in_products else self.kernels.matmul_s
        return self.tiles * of_tile(n, k, self.tokens / self.tiles)

    def weight_sum(self, n: float, k: float) -> float:
        """Seconds to add a weight gradient to the main gradient, if the product does not."""
        return 0.0 if self.adds_in_products else self.tiles * self.kernels.sum_s(n, k)

    def hidden_s(self, passes: float, num_kernels: int = 1) -> float:
        """Passes over [n, h]."""
        num_bytes = passes * self.tokens / self.tp.size * self.config.model.hidden_size * self.kernels.narrow
        return self.kernels.memory_s(num_bytes, num_kernels * self.tiles)

    def inner_s(self, passes_of_fc1: float, passes_of_ffn: float) -> float:
        """Passes over [t, fc1] and [t, ffn]."""
        num_bytes = self.tokens * (passes_of_fc1 * self.fc1 + passes_of_ffn * self.ffn) * self.kernels.narrow
        return self.kernels.memory_s(num_bytes, self.tiles)

    def gather_s(self) -> float:
        """All-gather or reduce-scatter of [t, h] over tp."""
        num_bytes = self.tokens / self.tiles * self.config.model.hidden_size * self.kernels.narrow
        return self.tiles * self.kernels.gather_s(num_bytes, self.tp)

    def rope_s(self) -> float:
        if self.config.model.position_embedding_type != "rope":
            return 0.0
        passes = 4 if self.config.model.qk_layernorm else 2
        num_bytes = passes * self.tokens * (self.q + self.kv) * self.kernels.narrow
        return self.kernels.memory_s(num_bytes, passes * self.tiles)

    def activation_s(self) -> float:
        return self.inner_s(1, 1)

    def activation_backward_s(self) -> float:
        return self.inner_s(2, 1)

    # The layer.

    @cached_property
    def qkv_forward(self) -> Cost:
        hidden = self.config.model.hidden_size
        return Cost(
            matmul=self.product(self.qkv, hidden),
            elementwise=self.hidden_s(2) + self.rope_s(),
            tensor=self.gather_s(),
        )

    @cached_property
    def residual_forward(self) -> Cost:
        hidden = self.config.model.hidden_size
        return Cost(matmul=self.product(hidden, self.q), elementwise=self.hidden_s(3), tensor=self.gather_s())

    @cached_property
    def fc1_forward(self) -> Cost:
        return Cost(matmul=self.product(self.fc1, self.config.model.hidden_size))

    @cached_property
    def forward(self) -> Cost:
        rest = Cost(
            matmul=self.product(self.config.model.hidden_size, self.ffn),
            elementwise=self.hidden_s(5, 2) + self.activation_s(),  # norm, and the sum at the end
            tensor=2 * self.gather_s(),
        )
        attention = attention_cost(self, backward=False)
        return self.qkv_forward + attention + self.residual_forward + self.fc1_forward + rest

    @cached_property
    def backward_work(self) -> Cost:
        """Backward without messages over tp: attention, two products for each matrix, norms, RoPE, activation."""
        hidden = self.config.model.hidden_size
        elementwise = self.hidden_s(3 * 2 + 3 * 2, 4) + self.rope_s() + self.activation_backward_s()
        work = attention_cost(self, backward=True) + Cost(elementwise=elementwise)
        for width in (self.qkv, self.q, self.fc1, self.ffn):
            work += Cost(
                matmul=self.product(width, hidden) + self.weight_product(hidden, width),
                elementwise=self.weight_sum(hidden, width),
            )
        return work

    def left_s(self, *beside_s: float) -> float:
        """Seconds of a gather or scatter of [t, h] that do not overlap with work of `beside_s`."""
        return max(0.0, self.gather_s() - sum(beside_s))

    @cached_property
    def plain_backward(self) -> Cost:
        """In a column-parallel matrix the gather overlaps with the product of the input gradient, and the scatter with
        that of the weight gradient."""
        hidden, rows_s = self.config.model.hidden_size, 2 * self.gather_s()
        columns_s = sum(2 * self.left_s(self.product(width, hidden)) for width in (self.qkv, self.fc1))
        return self.backward_work + Cost(tensor=rows_s + columns_s)

    @cached_property
    def swapped_backward(self) -> Cost:
        """Backward under a swap plan if everything was moved. Norms, heads and activation are recomputed in any case,
        while messages run."""
        hidden = self.config.model.hidden_size
        norm_s, activation_s, heads_s = self.hidden_s(2), self.activation_s(), self.rope_s()
        fc1_s, qkv_s = self.product(self.fc1, hidden), self.product(self.qkv, hidden)
        tensor = [
            self.left_s(norm_s, activation_s),  # the output's gradient
            self._fc1_inputs_left_s,
            self.left_s(fc1_s, self.weight_sum(self.fc1, hidden)),  # scattered
            self.gather_s(),  # the gradient at attention's projection, with nothing to overlap
            self.left_s(heads_s, qkv_s),  # qkv's inputs
            self.left_s(qkv_s, self.weight_sum(self.qkv, hidden)),  # scattered
        ]
        replays = Cost(elementwise=2 * norm_s + activation_s + heads_s, tensor=sum(tensor))
        return self.backward_work + replays

    @cached_property
    def _fc1_inputs_left_s(self) -> float:
        """Seconds of the gather of fc1's inputs that do not overlap. It is waited for after both products of fc2, and
        after the product of fc1 that does not need these inputs."""
        hidden = self.config.model.hidden_size
        return self.left_s(2 * self.product(self.ffn, hidden), self.product(self.fc1, hidden))

    @cached_property
    def fc1_again(self) -> Cost:
        """The recomputation of fc1, which waits for its inputs; the gather of the output's gradient overlaps with
        it.
        """
        instead_s = self.left_s(self.fc1_forward.matmul, self.activation_s()) + self.gather_s()
        hidden_s = self.left_s(self.hidden_s(2), self.activation_s()) + self._fc1_inputs_left_s
        return self.fc1_forward + Cost(tensor=instead_s - hidden_s)


def swept_cost(model: LayerModel, forward: Cost, backward: Cost, recompute: dict[str, Cost]) -> LayerCost:
    """Each layer's input is copied to its slot; that of a layer that recomputes attention leaves by another, and comes
    back by it.
    """
    cp, meets = Group(model.config.parallel.cp, model.tp.size), model.config.parallel.cp_comm_type
    gathered_from = cp.size if meets == "all_gather" else 1
    met = 2 * model.kv * model.tokens * gathered_from
    swept = SweptAttention(model.kernels, model.tiles, model.q * model.tokens, met, gathered_from)
    again = recompute["qkv"] + attention_cost(model, backward=False) + swept.forward
    again += Cost(elementwise=model.hidden_s(4, 2))
    if gathered_from > 1:
        again += gathered_keys(model, cp) * -1  # its backward finds the keys and values that it has gathered
    share = model.config.memory.recompute_attention_layers / layers_per_chunk(model.config)
    forward += swept.forward + Cost(elementwise=model.hidden_s(2))
    return LayerCost(forward, backward + swept.backward, recompute, again * share)


def attention_cost(model: LayerModel, backward: bool) -> Cost:
    """Causal attention of one rank: zigzag gives each cp rank the same share of the triangle."""
    config, kernels = model.config, model.kernels
    shape, parallel = config.model, config.parallel
    seq_length, batch = config.data.seq_length, config.training.micro_batch_size
    flops = 2.0 * seq_length * seq_length * batch * model.q / parallel.cp * (2 if backward else 1)
    seconds = kernels.attention_s(flops, shape.head_dim, backward)
    if parallel.cp == 1:
        return Cost(attention=seconds)
    a2a_size = resolved_a2a_size(config)
    ring = Group(parallel.cp // a2a_size, parallel.tp * a2a_size)
    cost = Cost(attention=seconds)
    if a2a_size > 1:
        cost += _head_exchange(model, Group(a2a_size, parallel.tp), backward)
    if ring.size == 1:
        return cost
    if parallel.cp_comm_type == "all_gather":
        return cost + _gathered(model, ring, backward)
    return cost + _ring(model, ring, seconds / ring.size, backward)


def _head_exchange(model: LayerModel, group: Group, backward: bool) -> Cost:
    """q, k, v there and the output back; in backward also the output, its gradient and theirs."""
    kernels = model.kernels
    parts = model.meeting_parts
    there = 3 * model.q if backward else model.q
    # A sweep has exchanged keys and values in its forward, and keeps them.
    there += 0 if backward and model.sweeps else 2 * model.kv
    back = model.q + 2 * model.kv if backward else model.q
    sizes = [model.tokens * width * kernels.narrow for width in (there, back)]
    copies = sum(kernels.memory_s(4 * size, 4 * parts) for size in sizes)
    context = sum(parts * kernels.all_to_all_s(size / parts, group) for size in sizes)
    return Cost(elementwise=copies, context=context)


def _gathered(model: LayerModel, group: Group, backward: bool) -> Cost:
    """Keys and values of all ranks; their gradients come back in fp32."""
    kernels, parts = model.kernels, model.meeting_parts
    elements = model.tokens * 2 * model.kv * group.size
    cost = gathered_keys(model, group)
    sums = kernels.memory_s(SUM_PASSES * model.tokens * model.q * kernels.wide, _RING_KERNELS * parts)
    if backward:
        scattered_s = parts * kernels.gather_s(elements / parts * kernels.wide, group)
        sums += kernels.memory_s(SUM_PASSES * elements * kernels.wide, 4 * parts)
        cost += Cost(context=scattered_s)
    return cost + Cost(elementwise=sums)


def gathered_keys(model: LayerModel, group: Group) -> Cost:
    """Keys and values of all ranks of a group, put in order."""
    kernels, parts = model.kernels, model.meeting_parts
    num_bytes = model.tokens * 2 * model.kv * group.size * kernels.narrow
    context = parts * kernels.gather_s(num_bytes / parts, group)
    return Cost(elementwise=kernels.memory_s(4 * num_bytes, 4 * parts), context=context)


def _ring(model: LayerModel, group: Group, step_s: float, backward: bool) -> Cost:
    """Each step sends keys and values on, in backward their fp32 gradients too, while its blocks are computed."""
    kernels = model.kernels
    kv = model.tokens * 2 * model.kv
    message_s = kernels.message_s(kv * (kernels.narrow + (kernels.wide if backward else 0)), group)
    # In all but the first step half of the scores are left out: three quarters of the queries are met on average.
    sums = SUM_PASSES * model.tokens * model.q * kernels.wide * (0.25 + 0.75 * group.size)
    if backward:
        sums += SUM_PASSES * kv * kernels.wide * group.size
    exposed_s = (group.size - 1) * max(0.0, message_s - step_s)
    if backward:
        exposed_s += kernels.message_s(kv * kernels.wide, group)  # the last hop home hides under nothing
    return Cost(elementwise=kernels.memory_s(sums, _RING_KERNELS * group.size), context=exposed_s)
