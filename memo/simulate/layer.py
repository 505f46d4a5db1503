"""What one layer costs on one rank: plain, recomputed, or under a swap plan.

Other frameworks run plain layers under autograd, whose backward recomputes nothing, not even norms and activations.

The pieces of memo's own layer are those of memo.simulate.layer_model, which says what is assumed; of a custom layer
those of memo.simulate.custom_layer.
"""

from dataclasses import replace

from memo.config import RunConfig
from memo.config.derived import resident_tiles, resolved_offload_tiles, stays_under_autograd
from memo.simulate.cost import Cost
from memo.simulate.custom_layer import custom_cost
from memo.simulate.framework import MEMO, Framework
from memo.simulate.host import with_host
from memo.simulate.kernels import Kernels
from memo.simulate.layer_model import LayerCost, LayerModel, attention_cost, swept_cost


def plain_layer(config: RunConfig, kernels: Kernels, framework: Framework = MEMO) -> LayerCost:
    """A layer whose activations stay on the device, under --recompute-granularity."""
    found = _under_autograd(LayerModel(config, kernels)) if framework.under_autograd else _resident(config, kernels)
    return with_host(found, config, kernels, swaps=False) if framework.host_starts_kernels else found


def swapped_layer(config: RunConfig, kernels: Kernels, framework: Framework = MEMO) -> LayerCost:
    """A layer under a swap plan, in tiles; `recompute` by group."""
    found = _swapped(LayerModel(config, kernels, resolved_offload_tiles(config), config.memory.sweeps, swaps=True))
    return with_host(found, config, kernels, swaps=True) if framework.host_starts_kernels else found


def _resident(config: RunConfig, kernels: Kernels) -> LayerCost:
    """As memo.executor.resident runs it, unless it stays under autograd."""
    granularity = config.memory.recompute_granularity
    if stays_under_autograd(config):
        return _under_autograd(LayerModel(config, kernels))
    model = LayerModel(config, kernels, resident_tiles(config), swaps=True)
    found = _on_tiles(model)
    attention, everything = attention_cost(model, backward=False), sum(found.recompute.values(), Cost())
    if granularity == "full":
        return LayerCost(found.forward, found.backward + attention + everything)
    again = attention if granularity == "selective" else Cost()
    return LayerCost(found.forward + Cost(elementwise=model.hidden_s(2)), found.backward + again)


def _under_autograd(model: LayerModel) -> LayerCost:
    config = model.config
    if config.model.custom_layer:
        return custom_cost(model, config.memory.recompute_granularity)
    backward = model.plain_backward
    if config.memory.recompute_granularity == "full":
        backward += model.forward
    elif config.memory.recompute_granularity == "selective":
        backward += attention_cost(model, backward=False)
    return LayerCost(model.forward, backward)


def _swapped(model: LayerModel) -> LayerCost:
    found = _on_tiles(model)
    if model.config.model.custom_layer:
        return found
    if model.config.memory.sweeps:
        return swept_cost(model, found.forward, found.backward, found.recompute)
    copies_s = model.hidden_s(4, 2) + model.kernels.memory_s(2 * model.tokens * model.q * model.kernels.narrow)
    return replace(found, forward=found.forward + Cost(elementwise=copies_s))


def _on_tiles(model: LayerModel) -> LayerCost:
    """Without copies to slots."""
    if model.config.model.custom_layer:
        return custom_cost(model)
    recompute = {"qkv": model.qkv_forward, "residual": model.residual_forward, "fc1": model.fc1_again}
    if model.config.memory.offload_policy == "paper":
        recompute |= {"norm": Cost(), "activation": Cost()}  # replayed even where they were moved
    return LayerCost(model.forward, model.swapped_backward, recompute)
