"""The cost of attention on one rank, with the messages in which context-parallel ranks exchange keys, values and heads.

Follows `memo.parallel.context`: the messages of a ring step overlap with the attention of that step; no other message
overlaps with compute. Known error: packed documents are counted as one causal document.
"""

from memo.config.derived import resolved_a2a_size, resolved_attention
from memo.simulate.cost import NOTHING, Cost
from memo.simulate.delta import delta_cost
from memo.simulate.kernels import Group
from memo.simulate.layer_shape import LayerShape
from memo.simulate.squares import squares_s
from memo.simulate.sweep import SUM_PASSES
from memo.spec.window import attended_pairs, ring_steps

_RING_KERNELS = 8
"""Kernels of one ring step besides attention: those of two blocks, of their sums, and of the exchange of keys and
values."""


def attention_cost(shape: LayerShape, backward: bool) -> Cost:
    """Return the cost of causal attention on one rank; zigzag gives each cp rank the same share of the triangle."""
    config, kernels = shape.config, shape.kernels
    parallel = config.parallel
    if shape.kind.is_linear:
        exchange = _head_exchange(shape, Group(parallel.cp, parallel.tp), backward) if parallel.cp > 1 else NOTHING
        return delta_cost(shape, backward) + exchange
    seq_length, batch = config.data.seq_length, config.training.micro_batch_size
    pairs = 0.5 * seq_length * seq_length if shape.window is None else attended_pairs(seq_length, shape.window)
    if resolved_attention(config) == "torch":
        seconds = squares_s(shape, pairs / parallel.cp, backward)
    else:
        flops = 4.0 * pairs * batch * shape.q / parallel.cp * (2 if backward else 1)
        seconds = kernels.attention_s(flops, config.model.head_dim, backward)
    cost = Cost(attention=seconds)
    if shape.window is not None:
        cost += _strips(shape, backward)
    if config.model.attention_sinks:
        cost += _sinks(shape, backward)
    if parallel.cp == 1:
        return cost
    a2a_size = resolved_a2a_size(config.model, config.parallel)
    ring = Group(parallel.cp // a2a_size, parallel.tp * a2a_size)
    if a2a_size > 1:
        cost += _head_exchange(shape, Group(a2a_size, parallel.tp), backward)
    if ring.size == 1:
        return cost
    if parallel.cp_comm_type == "all_gather":
        return cost + _gathered(shape, ring, backward)
    return cost + _ring(shape, ring, seconds, backward)


def _strips(shape: LayerShape, backward: bool) -> Cost:
    """Return the elementwise work beside the kernels of a sliding window (memo.spec.window).

    Inputs and outputs of flipped triangles are copied in reverse order. The sums of both triangles are zeroed, added to
    twice, and cast."""
    kernels, q, kv = shape.kernels, shape.q, 2 * shape.kv
    flipped, summed = (4 * q + 2 * kv, q + kv) if backward else (2 * q + kv, q)
    passes = 2 * SUM_PASSES + 2 + kernels.narrow / kernels.wide
    num_bytes = 2 * flipped * kernels.narrow + passes * summed * kernels.wide
    return Cost(elementwise=kernels.memory_s(shape.tokens * num_bytes, 16 * shape.attention_parts))


def _sinks(shape: LayerShape, backward: bool) -> Cost:
    """Return the cost of attention sinks (memo.attention.sinks).

    The forward scales attention's output in place. The backward multiplies the output with its gradient in the wide
    dtype and adds up the products."""
    kernels = shape.kernels
    passes = 2 * kernels.narrow + (4 * kernels.wide if backward else 0)
    return Cost(elementwise=kernels.memory_s(shape.tokens * shape.q * passes, 6 * shape.attention_parts))


def _head_exchange(shape: LayerShape, group: Group, backward: bool) -> Cost:
    """Return the cost of exchanging heads: q, k and v go to the other ranks, and the output comes back.

    In backward the output and its gradient go as well, and the gradients of q, k and v come back."""
    kernels = shape.kernels
    parts = shape.attention_parts
    there = 3 * shape.q if backward else shape.q
    # A swept layer keeps the keys and values that its forward has exchanged.
    there += 0 if backward and shape.sweeps else 2 * shape.kv
    back = shape.q + 2 * shape.kv if backward else shape.q
    sizes = [shape.tokens * width * kernels.narrow for width in (there, back)]
    copies = sum(kernels.memory_s(4 * size, 4 * parts) for size in sizes)
    context = sum(parts * kernels.all_to_all_s(size / parts, group) for size in sizes)
    return Cost(elementwise=copies, context=context)


def _gathered(shape: LayerShape, group: Group, backward: bool) -> Cost:
    """Return the cost of gathering the keys and values of all ranks; their gradients are reduce-scattered in fp32."""
    kernels, parts = shape.kernels, shape.attention_parts
    elements = shape.tokens * 2 * shape.kv * group.size
    cost = gathered_keys(shape, group)
    sums = kernels.memory_s(SUM_PASSES * shape.tokens * shape.q * kernels.wide, _RING_KERNELS * parts)
    if backward:
        scattered_s = parts * kernels.gather_s(elements / parts * kernels.wide, group)
        sums += kernels.memory_s(SUM_PASSES * elements * kernels.wide, 4 * parts)
        cost += Cost(context=scattered_s)
    return cost + Cost(elementwise=sums)


def gathered_keys(shape: LayerShape, group: Group) -> Cost:
    """Return the cost of gathering the keys and values of all ranks of a group, and of putting them in order."""
    kernels, parts = shape.kernels, shape.attention_parts
    num_bytes = shape.tokens * 2 * shape.kv * group.size * kernels.narrow
    context = parts * kernels.gather_s(num_bytes / parts, group)
    return Cost(elementwise=kernels.memory_s(4 * num_bytes, 4 * parts), context=context)


def _ring(shape: LayerShape, group: Group, seconds: float, backward: bool) -> Cost:
    """Return the cost of a ring: each step sends keys and values on while it computes its blocks.

    In backward it also sends their fp32 gradients. Known error: under a window some messages skip ranks, but they
    count here as messages between neighbours.
    """
    kernels, config = shape.kernels, shape.config
    steps = len(ring_steps(config.data.seq_length, group.size, shape.window))
    kv = shape.tokens * 2 * shape.kv
    message_s = kernels.message_s(kv * (kernels.narrow + (kernels.wide if backward else 0)), group)
    # Every step but the first leaves out half of the scores; on average three quarters of the queries take part in it.
    merged = 0.25 + 0.75 * group.size if shape.window is None else 0.0
    sums = SUM_PASSES * shape.tokens * shape.q * kernels.wide * merged
    if backward:
        sums += SUM_PASSES * kv * kernels.wide * steps
    exposed_s = (steps - 1) * max(0.0, message_s - seconds / steps)
    if backward:
        exposed_s += kernels.message_s(kv * kernels.wide, group)  # nothing overlaps with the last hop home
    return Cost(elementwise=kernels.memory_s(sums, _RING_KERNELS * steps), context=exposed_s)
