"""Lower bounds of the seconds of a candidate's step: cheap, and never above the simulated time.

    stage 0       | embedding F0 | ................................ | B embedding | update
    last stage         fill  | F0 loss B0 | F1 loss B1 | ...   | drain
                             |<-- microbatches x (layers, loss) -->|

Fill and drain are one chunk of layers and one message for each stage before the last. With one stage the bound equals
the simulated time, except for copies that do not hide. The bound leaves out: copies that do not hide, recomputation as
long as the swap plan is not known, gradients that are reduced late, and every wait between stages.
"""

from functools import cache

from memo.estimate.attention_rates import with_attention_of
from memo.search.candidates import AUTO, KEEP, Grid, Layout, Strategy, config_of, num_microbatches
from memo.search.question import Question
from memo.search.swap_choice import SwapChoice
from memo.simulate.cost import LayerCost
from memo.simulate.kernels import Kernels
from memo.simulate.layer import plain_layer, swapped_layer
from memo.simulate.model import stage_message_s
from memo.simulate.outside_layers import embedding_cost, loss_cost, update_cost

_ENDLESS_S = 1e9
"""A backward so long that every reduction hides under it."""
_ROUNDING = 1e-9
"""Tolerance: the simulation adds the same numbers in another order."""


class Bounds:
    """Bounds for one question; costs that candidates share are computed once."""

    def __init__(self, question: Question) -> None:
        self.question, self.kernels = question, Kernels(with_attention_of(question.hardware, question.base), "bf16")
        self._ends, self._update_s = cache(self._time_ends), cache(self._time_update)
        self._layers: dict[object, LayerCost] = {}

    def least_s(self, layout: Layout, strategy: Strategy, swap: SwapChoice | None = None) -> float:
        """Return the least seconds of a step; `swap`, the choice of alpha auto, adds recomputation and copies."""
        layer_s, link_s = (None, 0.0) if swap is None else (swap.layer_s, swap.link_s)
        least_s = max(self._pipeline_s(layout, strategy, layer_s), link_s) + self._update_s(layout.grid)
        return (1.0 - _ROUNDING) * least_s

    def least_placed_s(self, layout: Layout, strategy: Strategy, layer_s: float | None = None) -> float:
        """Return the least seconds of a step if states may be anywhere: the pipeline alone.

        Under alpha auto all activations may stay on the device. For swept layers this case is left out: with all
        activations on the device, whole layers are a candidate of their own.

        `layer_s`: seconds of forward and backward of an average layer, if it is known what moves.
        """
        least_s = self._pipeline_s(layout, strategy, layer_s)
        if layer_s is None and strategy == AUTO._replace(order=strategy.order, sharding=strategy.sharding):
            least_s = min(least_s, self._pipeline_s(layout, KEEP))
        return (1.0 - _ROUNDING) * least_s

    def _pipeline_s(self, layout: Layout, strategy: Strategy, layer_s: float | None = None) -> float:
        """Return the seconds from the first forward to the last backward."""
        question = self.question
        microbatches = num_microbatches(question, layout)
        # The recomputation of a swap plan counts only if the plan is known.
        layer_s = sum(self.layer(layout, strategy).computed_s) if layer_s is None else layer_s
        stage_s = layer_s * question.model.sizes.num_layers / layout.pp
        embedding_s, loss_s, messages_s = self._ends(layout.grid, layout.mbs)
        if layout.pp == 1:
            return microbatches * (stage_s + loss_s + embedding_s)
        hop_s = stage_s / layout.vpp + messages_s
        return microbatches * (stage_s + loss_s) + (layout.pp - 1) * hop_s + embedding_s

    def layer(self, layout: Layout, strategy: Strategy) -> LayerCost:
        kind, sweep = "swap" if strategy.swaps else strategy.recompute, strategy.sweep
        chunks = layout.pp * layout.vpp if sweep.recompute_attention_layers else 0  # they say which layers recompute it
        is_auto = strategy.alpha == "auto"  # it decides the number of tiles
        key = (layout.tp, layout.cp, layout.cp_comm_type, layout.mbs, kind, is_auto, sweep, chunks)
        if key not in self._layers:
            config = config_of(self.question, layout, strategy)
            self._layers[key] = (swapped_layer if strategy.swaps else plain_layer)(config, self.kernels)
        return self._layers[key]

    def _time_ends(self, grid: Grid, mbs: int) -> tuple[float, float, float]:
        """Return the seconds of embedding, loss, and a message to the next stage and back, for one microbatch."""
        config = config_of(self.question, Layout(*grid, mbs=mbs))
        embedding, loss = embedding_cost(config, self.kernels), loss_cost(config, self.kernels)
        message_s = stage_message_s(config, self.kernels, self.question.gpus)
        return (
            (embedding.forward + embedding.backward).total_s,
            (loss.forward + loss.backward).total_s,
            2 * message_s,
        )

    def _time_update(self, grid: Grid) -> float:
        """Return the seconds of exposed reduction, optimizer and new weights, on the slower end of the pipeline."""
        config, pp = config_of(self.question, Layout(*grid)), grid[2]
        layers = config.model.num_layers // pp
        ends = (update_cost(config, self.kernels, self.question.gpus, stage) for stage in {0, pp - 1})
        return max(end.exposed_s(layers, _ENDLESS_S) + end.optimizer_s + end.gather_s for end in ends)
