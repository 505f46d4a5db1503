"""What one layer costs on one rank: plain, recomputed, or under a swap plan.

The pieces of memo's own layer are those of memo.simulate.layer_model, which says what is assumed; of a custom layer
those of memo.simulate.custom_layer.
"""

from memo.config import RunConfig
from memo.config.derived import resolved_offload_tiles
from memo.simulate.cost import Cost
from memo.simulate.custom_layer import custom_cost
from memo.simulate.framework import MEMO, Framework
from memo.simulate.host import with_host
from memo.simulate.kernels import Kernels
from memo.simulate.layer_model import LayerCost, LayerModel, attention_cost, swept_cost


def plain_layer(config: RunConfig, kernels: Kernels, framework: Framework = MEMO) -> LayerCost:
    """A layer whose activations stay on the device, under --recompute-granularity."""
    found = _plain(LayerModel(config, kernels))
    return with_host(found, config, kernels, swaps=False) if framework.host_starts_kernels else found


def swapped_layer(config: RunConfig, kernels: Kernels, framework: Framework = MEMO) -> LayerCost:
    """A layer under a swap plan, in tiles; `recompute` by group."""
    found = _swapped(LayerModel(config, kernels, resolved_offload_tiles(config), config.memory.sweeps, swaps=True))
    return with_host(found, config, kernels, swaps=True) if framework.host_starts_kernels else found


def _plain(model: LayerModel) -> LayerCost:
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
    config, kernels = model.config, model.kernels
    if config.model.custom_layer:
        return custom_cost(model)
    recompute = {"qkv": model.qkv_forward, "residual": model.residual_forward, "fc1": model.fc1_again}
    if config.memory.offload_policy == "paper":
        recompute |= {"norm": Cost(), "activation": Cost()}  # replayed even where they were moved
    if config.memory.sweeps:
        return swept_cost(model, model.forward, model.swapped_backward, recompute)
    copies_s = model.hidden_s(4, 2) + kernels.memory_s(2 * model.tokens * model.q * kernels.narrow)
    return LayerCost(model.forward + Cost(elementwise=copies_s), model.swapped_backward, recompute)
