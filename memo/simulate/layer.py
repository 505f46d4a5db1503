"""The cost of one layer on one rank: plain, recomputed, or under a swap plan.

memo.simulate.tile_clock times the steps of memo.program.walk on one tile; all tiles cost alike. The cost of attention
comes from memo.simulate.attention; swept layers add the cost of memo.simulate.sweep.

Other frameworks run plain layers under autograd, whose backward recomputes nothing, not even norms and activation
functions.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import replace

from memo.config import RunConfig
from memo.config.derived import resident_tiles, resolved_offload_tiles, stays_under_autograd
from memo.program.kinds import Kind
from memo.program.walk import Step
from memo.simulate.attention import attention_cost, gathered_keys
from memo.simulate.cost import NOTHING, Cost, LayerCost
from memo.simulate.framework import MEMO, Framework
from memo.simulate.host import with_host
from memo.simulate.kernels import Group, Kernels
from memo.simulate.layer_shape import LayerShape
from memo.simulate.sweep import SweptAttention
from memo.simulate.tile_clock import TileClock
from memo.spec.quantized import CHUNK, KERNELS, passed_bytes
from memo.spec.shapes import shape_of
from memo.spec.skeleton import moves_in_part, skeletal_tensors
from memo.spec.slots import NEEDS_FULL_ROOM, resident
from memo.spec.stack import layers_with_attention_again, runs_of_kinds, stack_of
from memo.spec.sweep import key_value_layout

Kept = frozenset[str]
"""Values of a tile that a slot holds between forward and backward."""


def plain_layer(config: RunConfig, kernels: Kernels, framework: Framework = MEMO) -> LayerCost:
    """Return the cost of a layer whose activations stay on the device, under --recompute-granularity."""
    tiles = resident_tiles(config)
    return _of_stack(config, lambda run: _plain(run, tiles, kernels, framework))


def swapped_layer(config: RunConfig, kernels: Kernels, framework: Framework = MEMO) -> LayerCost:
    """Return the cost of a layer under a swap plan, in tiles; its `recompute` is by group."""
    tiles = resolved_offload_tiles(config)
    return _of_stack(config, lambda run: _swapped(run, tiles, kernels, framework))


def _of_stack(config: RunConfig, cost_of: Callable[[RunConfig], LayerCost]) -> LayerCost:
    """Return the average over all layers, given the cost of a layer of each kind."""
    costs = {run.model: cost_of(run) for run in runs_of_kinds(config)}
    stack, again = stack_of(config.model), layers_with_attention_again(config)
    if len(costs) == 1:
        (only,) = costs.values()
        return replace(only, attention_again=only.attention_again * (len(again) / len(stack)))
    shares = [(cost, stack.count(kind) / len(stack)) for kind, cost in costs.items()]
    return replace(
        costs[stack[0]],
        recompute={
            group: sum((cost.recompute[group] * share for cost, share in shares), NOTHING)
            for group in costs[stack[0]].recompute
        },
        forward=sum((cost.forward * share for cost, share in shares), NOTHING),
        backward=sum((cost.backward * share for cost, share in shares), NOTHING),
        attention_again=sum((costs[stack[layer]].attention_again * (1 / len(stack)) for layer in again), NOTHING),
        by_layer=tuple(
            (costs[kind] if layer in again else replace(costs[kind], attention_again=NOTHING)).computed_s
            for layer, kind in enumerate(stack)
        ),
    )


def _plain(config: RunConfig, tiles: int, kernels: Kernels, framework: Framework) -> LayerCost:
    under_autograd = framework.under_autograd or stays_under_autograd(config)
    found = _under_autograd(config, kernels) if under_autograd else _resident(config, tiles, kernels)
    found = _decoding(found, config, kernels)
    return with_host(found, config, kernels, tiles, swaps=False) if framework.host_starts_kernels else found


def _swapped(config: RunConfig, tiles: int, kernels: Kernels, framework: Framework) -> LayerCost:
    shape = LayerShape(config, kernels, tiles, config.memory.sweeps)
    groups = _groups(config)
    everything = frozenset[str]().union(*groups.values())
    found = LayerCost(_forward(shape, everything), _backward(shape, everything), _recompute(shape, groups, everything))
    inputs = Cost(elementwise=shape.hidden_s(2))  # to the slot
    if shape.sweeps:
        found = _swept(shape, replace(found, forward=found.forward + inputs))
    else:
        found = replace(found, forward=found.forward + inputs + _copied_outputs(shape))
    found = _decoding(found, config, kernels)
    return with_host(found, config, kernels, tiles, swaps=True) if framework.host_starts_kernels else found


def _decoding(layer: LayerCost, config: RunConfig, kernels: Kernels) -> LayerCost:
    """Add the decoding of the layer's quantized weights before each pass (memo.executor.coded_weights)."""
    quantize, weights = config.model.quantize, shape_of(config.model, "", 0).layer_weights
    numel = sum(weight.local_numel(config.parallel.tp) for weight in weights if weight.coded)
    if not numel:
        return layer
    num_bytes = passed_bytes(quantize, numel, kernels.narrow)
    made = Cost(elementwise=kernels.memory_s(num_bytes, KERNELS * math.ceil(numel / CHUNK)))
    return replace(layer, forward=layer.forward + made, backward=layer.backward + made)


def _under_autograd(config: RunConfig, kernels: Kernels) -> LayerCost:
    shape = LayerShape(config, kernels, under_autograd=True)
    made, attention = _forward(shape, frozenset()), attention_cost(shape, backward=False)
    again = {"none": NOTHING, "selective": attention, "full": made}[config.memory.recompute_granularity]
    kept = frozenset(name for each in (*shape.kind.before, *shape.kind.after) for name in each.makes)
    return LayerCost(made, _backward(shape, kept) + again)


def _resident(config: RunConfig, tiles: int, kernels: Kernels) -> LayerCost:
    """Return the cost of a layer that memo.executor.resident runs."""
    shape = LayerShape(config, kernels, tiles)
    of = resident(config, config.model)
    kept = frozenset(of.layout.places)
    again = _on_tiles(shape, Kind.qkv_again, kept) if NEEDS_FULL_ROOM in of.dropped else NOTHING
    if "attention_out" in of.dropped:
        again += _attention(shape, backward=False)
    return LayerCost(_forward(shape, kept), again + _backward(shape, kept))


def _swept(shape: LayerShape, whole: LayerCost) -> LayerCost:
    """Return the cost of a swept layer.

    `attention_again` is the second forward of a layer that recomputes attention: it offloads the layer's input once
    more and fetches it."""
    config, cp = shape.config, Group(shape.config.parallel.cp, shape.tp.size)
    if shape.kind.is_linear:  # linear attention does the same work tile by tile as at once
        again = (
            whole.recompute[NEEDS_FULL_ROOM] + _attention(shape, backward=False) + Cost(elementwise=shape.hidden_s(4))
        )
        return replace(whole, attention_again=again)
    gathered_from = cp.size if config.parallel.cp_comm_type == "all_gather" else 1
    q, kv = shape.q * shape.tokens, 2 * shape.kv * shape.tokens * gathered_from
    swept = SweptAttention(shape.kernels, shape.tiles, q, kv, gathered_from, shape.window is None)
    forward, backward = (each + _slides(shape, back) for each, back in ((swept.forward, False), (swept.backward, True)))
    again = whole.recompute[NEEDS_FULL_ROOM] + _attention(shape, backward=False) + forward
    again += Cost(elementwise=shape.hidden_s(4))
    if gathered_from > 1 and not key_value_layout(config).slides:
        again += gathered_keys(shape, cp) * -1  # backward uses the keys and values that this forward gathered
    return LayerCost(whole.forward + forward, whole.backward + backward, whole.recompute, attention_again=again)


def _slides(shape: LayerShape, backward: bool) -> Cost:
    """Return the copies within a device that holds the keys and values of a few sections (memo.executor.key_values)."""
    layout, kernels = key_value_layout(shape.config), shape.kernels
    if not layout.slides:
        return NOTHING
    width = kernels.narrow + (kernels.wide if backward else 0)  # wide: sums of gradients
    num_bytes = 2 * (layout.slid_elements * width + layout.part_bytes)  # the part is copied to a slot, or from it
    return Cost(elementwise=kernels.memory_s(layout.sections * num_bytes, 2 * layout.sections * layout.held))


# Passes over all tiles.


def _forward(shape: LayerShape, kept: Kept) -> Cost:
    made = _on_tiles(shape, Kind.output, kept)
    return _on_tiles(shape, Kind.qkv, kept) + _attention(shape, backward=False) + made


def _attention(shape: LayerShape, backward: bool) -> Cost:
    cost = attention_cost(shape, backward)
    if not shape.kind.norms_heads or (backward and shape.under_autograd):
        return cost
    clock = TileClock(shape)  # the slot keeps queries and keys before their norms
    clock.norm_heads()
    clock.rotate()
    return clock.cost * shape.tiles + cost


def _backward(shape: LayerShape, kept: Kept) -> Cost:
    """Return the cost of a backward that finds queries, keys, values and attention's output on the device."""
    cost = _on_tiles(shape, Kind.after_backward, kept) + _attention(shape, backward=True)
    cost += _on_tiles(shape, Kind.before_backward, kept)
    if shape.tiles > 1 and not shape.sweeps:
        cost += _copied_outputs(shape)  # attention takes the gradients of all tiles as one tensor
    return cost


def _copied_outputs(shape: LayerShape) -> Cost:
    """Return the cost of copying attention's output, or its gradient."""
    num_bytes = 2 * shape.tokens * shape.q * shape.kernels.narrow
    return Cost(elementwise=shape.kernels.memory_s(num_bytes, shape.tiles))


def _on_tiles(shape: LayerShape, part: Callable[[Kind, Kept], Iterable[Step]], kept: Kept) -> Cost:
    """Return the cost of a part on all tiles. Layouts with the same tile share the cost of one tile."""
    costs = shape.kernels.tile_costs
    config = shape.config
    key = part, kept, config.model, config.hardware.kernels, shape.tp.size, shape.tile_tokens, shape.under_autograd
    cost = costs.get(key)
    if cost is None:
        clock = TileClock(shape, kept)
        clock.run(part(shape.kind, kept))
        cost = costs[key] = clock.cost
    return cost * shape.tiles


def _groups(config: RunConfig) -> dict[str, Kept]:
    """Return the values that may move in part, by group."""
    groups: dict[str, Kept] = {}
    for tensor in skeletal_tensors(config.model):
        if moves_in_part(tensor, config.memory.offload_policy):
            groups[tensor.group] = groups.get(tensor.group, frozenset()) | {tensor.name}
    return groups


def _recompute(shape: LayerShape, groups: dict[str, Kept], everything: Kept) -> dict[str, Cost]:
    """Return for each group the cost that it adds to backward if neither it nor any group before it moved.

    So the sum over all groups is exact. The sum over some groups is not: messages overlap with the recomputation of
    other groups.
    """
    kept, found = everything, dict[str, Cost]()
    before = _token_wise_backward(shape, kept)
    for name, values in groups.items():
        kept -= values
        if name == NEEDS_FULL_ROOM:
            found[name] = _on_tiles(shape, Kind.qkv_again, kept)
        else:
            after = _token_wise_backward(shape, kept)
            found[name], before = after + before * -1, after
    return found


def _token_wise_backward(shape: LayerShape, kept: Kept) -> Cost:
    return _on_tiles(shape, Kind.before_backward, kept) + _on_tiles(shape, Kind.after_backward, kept)
