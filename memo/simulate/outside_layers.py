"""The costs of a step outside of its layers: embedding, loss, data parallelism and AdamW.

Follows `memo.parallel.tensor`, `memo.parallel.loss`, `memo.parallel.data` and `memo.train.optimizer`.
"""

import math
from typing import NamedTuple

from memo.config import RunConfig
from memo.config.derived import rank_tokens, vocab_rows_per_rank
from memo.config.grid import AXES, RankGrid, rank_grid
from memo.simulate.composed import loss_passes, norm_passes, passes_s
from memo.simulate.cost import NOTHING, Cost
from memo.simulate.kernels import Group, Kernels
from memo.spec.lora import is_trained
from memo.spec.moments import update_bytes, update_kernels
from memo.spec.parameters import layer_parameters, shape_of_run, stage_parameters
from memo.spec.placement import placement_of


class EndCost(NamedTuple):
    """The cost of the embedding, or of the loss, for one microbatch."""

    forward: Cost
    backward: Cost


class UpdateCost(NamedTuple):
    """Seconds of the work that follows the backwards of a stage.

    Attributes:
        bucket_s: reduce-scatter of the gradients of one layer.
        rest_s: reduce-scatter of the gradients of embedding and head.
        replicas_s: sum over tp of the reduced gradients of weights that every tp rank holds whole.
        overlaps: whether a bucket is reduced while backward goes on with the layers below (--overlap-grad-reduce).
        optimizer_s: norm of the gradients, AdamW and the cast of the weights, for what the device updates.
        gather_s: all-gather of the new weights that the device has updated, and of embedding and head.
    """

    bucket_s: float
    rest_s: float
    replicas_s: float
    overlaps: bool
    optimizer_s: float
    gather_s: float

    def exposed_s(self, num_layers: int, backward_s: float) -> float:
        """Seconds of reduction left after the last backward, which runs `num_layers` layers of `backward_s` each."""
        layers_s, last_s = num_layers * self.bucket_s, self.rest_s + self.replicas_s
        if not self.overlaps:
            return layers_s + last_s
        # Buckets queue: either the last one starts when its layer is done, or the queue never empties.
        return last_s + max(self.bucket_s, layers_s - (num_layers - 1) * backward_s)


def embedding_cost(config: RunConfig, kernels: Kernels) -> EndCost:
    """Return the cost of the embedding: look-up and scatter over tp.

    On every device backward makes a dense gradient of the table and adds it to the main gradient: rows are scattered,
    so no product could add them."""
    tokens = rank_tokens(config)
    tp = Group(config.parallel.tp, 1)
    hidden_bytes = tokens * config.model.hidden_size * kernels.narrow
    scatter_s = kernels.gather_s(hidden_bytes, tp)
    forward = Cost(elementwise=kernels.memory_s(2 * hidden_bytes, 2), tensor=scatter_s)
    if not is_trained(config.model, "embedding.weight"):
        return EndCost(forward, NOTHING)
    sum_s = kernels.sum_s(_head_rows(config), config.model.hidden_size)
    return EndCost(forward, forward + Cost(elementwise=sum_s))


def loss_cost(config: RunConfig, kernels: Kernels, again: bool = False) -> EndCost:
    """Return the cost of final norm and loss in chunks, all of which is in backward.

    With `again`, the losses have a forward of their own, and backward makes norm and logits of each chunk again."""
    tokens, hidden, rows = rank_tokens(config), config.model.hidden_size, _head_rows(config)
    tp = Group(config.parallel.tp, 1)
    chunk = min(config.training.loss_chunk_size, tokens)
    count = math.ceil(tokens / chunk)
    logits = chunk * rows
    chunk_bytes = chunk * hidden * kernels.narrow
    product_s = kernels.matmul_s(chunk, rows, hidden)
    gather_s = kernels.gather_s(chunk_bytes, tp)
    loss_s = [passes_s(kernels, passes, logits * kernels.narrow) for passes in loss_passes(config, kernels)]
    adds = kernels.adds_in_products
    weight_s = kernels.adding_matmul_s(rows, hidden, chunk) if adds else kernels.matmul_s(rows, hidden, chunk)
    sum_s = 0.0 if adds else kernels.sum_s(rows, hidden)
    if not is_trained(config.model, shape_of_run(config).head_weights[0].name):
        weight_s = sum_s = 0.0
    # The gradient of the norm's input is copied over the input.
    once, back = norm_passes(config, kernels)
    norm_s = [passes_s(kernels, passes, chunk_bytes / tp.size) for passes in (once, back + 2)]
    logits_cost = Cost(matmul=product_s, elementwise=norm_s[0], tensor=gather_s)
    losses = Cost(elementwise=loss_s[0], tensor=2 * kernels.all_reduce_s(chunk * kernels.wide, tp))
    gradients = Cost(
        matmul=product_s + weight_s,
        elementwise=loss_s[1] + sum_s + norm_s[1],
        tensor=gather_s,
    )
    if again:
        return EndCost((logits_cost + losses) * count, (logits_cost + gradients) * count)
    return EndCost(NOTHING, (logits_cost + losses + gradients) * count)


def update_cost(
    config: RunConfig, kernels: Kernels, world_size: int, stage: int, order: tuple[str, ...] = AXES
) -> UpdateCost:
    """Return the cost of reducing fp32 gradients to shards over dp x cp, of the update, and of gathering the weights
    that stay whole."""
    parallel = config.parallel
    grid = rank_grid(config.parallel, world_size, order)
    group = Group.along(grid, "cp", "dp")
    per_layer = layer_parameters(config.model, trained=True).of_rank(parallel.tp)
    rest = stage_parameters(config, stage) - config.model.num_layers // parallel.pp * per_layer
    placement = placement_of(config, world_size)
    # Embedding and head are always gathered after the update; layers that the CPU updates are gathered one by one.
    here = (placement.layers - placement.optimizer) * per_layer
    updated, gathered = 0 if placement.ends_on_host else here + rest, rest + (0 if placement.shards_weights else here)
    num_kernels = 7 + update_kernels(config.training, kernels.wide, updated // group.size)
    adam = updated / group.size * (update_bytes(config.training, kernels.wide) + 3 * kernels.wide + kernels.narrow)
    return UpdateCost(
        bucket_s=kernels.gather_s(per_layer * kernels.wide, group),
        rest_s=kernels.gather_s(rest * kernels.wide, group) + _tied_s(config, kernels, grid, stage),
        replicas_s=_replicas_s(config, kernels, world_size),
        overlaps=parallel.overlap_grad_reduce,
        optimizer_s=kernels.memory_s(adam, num_kernels) + 3 * kernels.all_reduce_s(8, Group(world_size, 1)),
        gather_s=kernels.gather_s(gathered * kernels.narrow, group),
    )


def _replicas_s(config: RunConfig, kernels: Kernels, world_size: int) -> float:
    """Return the seconds of summing over tp the gradients of norms, and of biases that are added after the sum over tp.

    One message has all gradients that stay on the device; each layer whose gradients leave it has its own."""
    parallel, placement = config.parallel, placement_of(config, world_size)
    shards, tp = parallel.dp(world_size) * parallel.cp, Group(parallel.tp, 1)
    layer_bytes = layer_parameters(config.model, trained=True).replicated / shards * kernels.wide * tp.size
    leaving = placement.num_driven
    rest_s = kernels.gather_s((placement.layers - leaving) * layer_bytes, tp)
    return leaving * kernels.gather_s(layer_bytes, tp) + rest_s


def _tied_s(config: RunConfig, kernels: Kernels, grid: RankGrid, stage: int) -> float:
    """Return the seconds of summing a tied embedding's gradients over first and last stage, shard by shard."""
    parallel = config.parallel
    if not is_trained(config.model, "embedding.weight") or parallel.pp == 1:
        return 0.0
    if config.model.untie_embeddings_and_output_weights or stage not in (0, parallel.pp - 1):
        return 0.0
    num_bytes = _head_rows(config) * config.model.hidden_size * kernels.wide / (grid.dp * grid.cp)
    return kernels.all_reduce_s(num_bytes, Group(2, grid.pp * grid.stride("pp") // 2))


def _head_rows(config: RunConfig) -> int:
    return vocab_rows_per_rank(config.model.vocabulary, config.parallel.tp)
