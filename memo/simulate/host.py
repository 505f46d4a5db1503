"""The time in which the host starts the kernels of one layer; the device waits if its kernels take less than that.

The table has the kernels of a layer of Qwen3 and one microbatch, in T tiles, counted on the emulated GPU
(tests/emulated_gpu/test_kernels_of_a_layer.py):

    kernels of T tiles              forward    backward    again
    without a swap plan             9 + 19 T   25 + 39 T       19 T   of full recomputation, and those of experts
    under a swap plan              17 + 15 T   27 + 37 T
    swept                           9 + 38 T   17 + 75 T

    more, of E experts                  24 T   (38 + 2 E) T
    more, of those with biases     (30 + E) T  (79 + 5 E) T
    more, of shared experts              5 T         11 T
    more, of a router by sigmoid         6 T         14 T
    more, which chooses in groups        6 T

    more, with norms around        10 + 20 T   31 + 47 T       24 T
    by 1 + weight, of Gemma 3

    more, of multi-latent attention
    in the place of norms of heads  17 T - 12   38 T - 32
    more, of a gate on attention         5 T         16 T   by estimate
    more, of a gated delta net      those of memo.simulate.delta
    more, of LoRA beside a matrix
    of P parts                      (2 + P) T    (5 + 2 P) T   and one where P > 1
    beside those of E experts      (2 + 2 P) T   (5 + P + (1 + P) E) T
    less, of a frozen matrix                          T        of experts E T

Gemma's line, that of latents and the lines of sigmoid divide a counted sum among the passes by estimate.

Known error: on a GPU one Triton kernel does the work of several torch kernels counted here, and other families have
a few kernels less. The kernels of a ring, of the loss and of a custom layer are not counted. Megatron-LM's are not
known, and its prediction has no time of the host.
"""

from dataclasses import replace

from memo.config import ModelConfig, RunConfig
from memo.simulate.cost import Cost, LayerCost
from memo.simulate.delta import kernels_of_delta
from memo.simulate.kernels import Kernels
from memo.spec.lora import trains_all
from memo.spec.shapes import layer_matrices


def kernels_of_layer(config: RunConfig, tiles: int, swaps: bool) -> tuple[int, int]:
    """Return the kernels of forward and of backward, for one layer and microbatch; `swaps`: under a swap plan."""
    forward, backward = of_experts = tuple(count * tiles for count in _of_experts(config.model))
    trained_forward, trained_backward = _of_trained(config.model)
    forward, backward = forward + trained_forward * tiles, backward + trained_backward * tiles
    if config.model.attention_output_gate:
        forward, backward = forward + 5 * tiles, backward + 16 * tiles
    if config.model.multi_latent_attention:
        forward, backward = forward + 17 * tiles - 12, backward + 38 * tiles - 32
    if config.model.is_linear:
        forward, backward = (n + kernels_of_delta(config, back) for n, back in ((forward, False), (backward, True)))
    is_gemma = config.model.norm_placement == "around" and config.model.apply_layernorm_1p
    if is_gemma:
        forward, backward = forward + 10 + 20 * tiles, backward + 31 + 47 * tiles
    if not swaps:
        recomputes = config.memory.recompute_granularity == "full"
        again = (43 if is_gemma else 19) * tiles + of_experts[0] if recomputes else 0
        return forward + 9 + 19 * tiles, backward + 25 + 39 * tiles + again
    if config.memory.sweeps:
        return forward + 9 + 38 * tiles, backward + 17 + 75 * tiles
    return forward + 17 + 15 * tiles, backward + 27 + 37 * tiles


def _of_trained(model: ModelConfig) -> tuple[int, int]:
    """Return how many more kernels forward and backward of a tile have than in a model that is trained whole.

    Backward may have less: the number is negative then."""
    if trains_all(model):
        return 0, 0
    forward, backward, matrices = 0, 0, layer_matrices(model)
    for module, weight in matrices.items():
        a, experts = matrices.get(f"{module}.adapter.a"), weight.experts
        backward -= max(1, experts) * weight.frozen
        if a is None:
            continue
        parts = a.rows // (model.lora_rank * max(1, experts))
        forward += 2 + parts * (2 if experts else 1)
        backward += 5 + 2 * parts + (parts > 1)
        if experts:
            backward += (1 + parts) * (experts - 1) + 1
    return forward, backward


def _of_experts(model: ModelConfig) -> tuple[int, int]:
    """Return how many more kernels forward and backward of a tile have than with one MLP.

    The weight gradient of each expert is a product of its own, and so is each product that adds a bias."""
    experts = model.num_experts
    if not experts:
        return 0, 0
    forward, backward = (30 + experts, 79 + 5 * experts) if model.add_bias_linear else (24, 38 + 2 * experts)
    if model.moe_router_score_function == "sigmoid":
        forward, backward = forward + (12 if model.moe_router_num_groups > 1 else 6), backward + 14
    return (forward + 5, backward + 11) if model.shared_ffn_size else (forward, backward)


def with_host(layer: LayerCost, config: RunConfig, kernels: Kernels, tiles: int, swaps: bool) -> LayerCost:
    """Return the layer with each pass lengthened to the time in which the host starts its kernels."""
    host_s = 0.0 if config.model.custom_layer else kernels.hardware.efficiency.host_kernel_s
    forward, backward = kernels_of_layer(config, tiles, swaps)
    return replace(
        layer,
        forward=layer.forward + Cost(host=max(0.0, forward * host_s - layer.forward.total_s)),
        backward=layer.backward + Cost(host=max(0.0, backward * host_s - layer.backward.total_s)),
    )
