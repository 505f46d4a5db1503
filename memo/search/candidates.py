"""The candidates of a search: layouts that memo can run, and strategies for their activations and states.

    layout     tp x cp (how attention exchanges) x pp (x chunks: interleaved) x micro-batch; dp is the rest, with ZeRO-1
    strategy   keep | recompute selective | recompute full | swap at alpha: auto, or a share of all groups
    states     whole on the device | ZeRO-2, ZeRO-3 | of some layers in host memory          (memo.search.states)

ZeRO-1 is no choice: memo always shards the optimizer over dp x cp.
"""

import re
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple, get_args

from memo.config import RunConfig
from memo.config.check_layout import check_batch, check_layout
from memo.config.derived import DEFAULT_TILES, resolved_a2a_size, sequence_step
from memo.config.memory import OffloadAlpha, RecomputeGranularity
from memo.config.parallel import AccumulationOrder, CpCommType, DataParallelSharding
from memo.config.require import divisors_of
from memo.errors import ConfigError
from memo.search.question import Question
from memo.spec.custom_layer import check_split
from memo.spec.parameters import check_patterns_of
from memo.spec.placement import StatePlacement, with_placement
from memo.spec.sweep import WHOLE, Sweep, with_sweep

MOST_CHUNKS = 8
"""Most chunks of a stage: more chunks only add messages and activations in flight."""


Grid = tuple[int, int, int]
"""tp, cp and pp."""


class Layout(NamedTuple):
    """How the model and a microbatch are spread over the GPUs."""

    tp: int = 1
    cp: int = 1
    pp: int = 1
    vpp: int = 1
    mbs: int = 1
    cp_comm_type: CpCommType = "p2p"

    @property
    def ranks(self) -> int:
        return self.tp * self.cp * self.pp

    @property
    def grid(self) -> Grid:
        return self.tp, self.cp, self.pp

    def __str__(self) -> str:
        """Return the text that `parse_layout` reads."""
        chunks = f" vpp{self.vpp}" if self.vpp > 1 else ""
        exchange = f" {self.cp_comm_type}" if self.cp > 1 else ""
        return f"tp{self.tp} cp{self.cp} pp{self.pp}{chunks} mbs{self.mbs}{exchange}"


class Strategy(NamedTuple):
    """Places of a layer's activations between forward and backward, and of its states.

    Attributes:
        sweep: how layers are swept; only if activations move.
        order: order of microbatches and layers; breadth first is tried if states stream.
        placement: placement of states; None if all states are whole on the device.
    """

    alpha: OffloadAlpha = "off"
    recompute: RecomputeGranularity = "none"
    sweep: Sweep = WHOLE
    order: AccumulationOrder = "depth_first"
    sharding: DataParallelSharding = "optim"
    placement: StatePlacement | None = None

    @property
    def swaps(self) -> bool:
        return self.alpha != "off"

    def __str__(self) -> str:
        if self.swaps:
            activations = f"alpha {self.alpha}" if isinstance(self.alpha, str) else f"alpha {self.alpha:g}"
            activations += f", {self.sweep}" if self.sweep.tiles else ""
        else:
            activations = "keep" if self.recompute == "none" else f"recompute {self.recompute}"
        order = ["breadth first"] if self.order == "breadth_first" else []
        return ", ".join([activations, *order, *self._states()])

    def _states(self) -> Iterator[str]:
        """Yield the sharding, such as `ZeRO-3`, and the layers with states in host memory, such as `host 18+18+16/32`.

        The four numbers count optimizers, gradients, weights, and all layers.
        """
        if self.sharding != "optim":
            yield "ZeRO-2" if self.sharding == "optim_grads" else "ZeRO-3"
        at = self.placement
        if at is not None and at.optimizer:
            yield f"host {at.optimizer}+{at.gradients}+{at.weights}/{at.layers}"


KEEP = Strategy()
SHARDINGS: tuple[DataParallelSharding, ...] = get_args(DataParallelSharding)
SELECTIVE = Strategy(recompute="selective")
FULL = Strategy(recompute="full")
AUTO = Strategy("auto")
GRID = tuple(Strategy(share) for share in (0.0, 0.25, 0.5, 0.75, 1.0))


def config_of(question: Question, layout: Layout, strategy: Strategy = KEEP) -> RunConfig:
    """Return the run, not yet checked; it is made once, as a search asks for it at each of its steps."""
    made, key = question.runs, (layout, strategy)
    found = made.get(key)
    if found is not None:
        return found
    if strategy not in made:
        made[strategy] = _under(question, strategy)
    config = made[strategy]
    spread = Strategy(sharding=strategy.sharding, order=strategy.order)
    if strategy != spread:  # the two runs differ in their memory fields alone
        found = replace(config_of(question, layout, spread), memory=config.memory)
    else:
        parallel = replace(
            config.parallel,
            tensor_model_parallel_size=layout.tp,
            context_parallel_size=layout.cp,
            cp_comm_type=layout.cp_comm_type,
            pipeline_model_parallel_size=layout.pp,
            num_virtual_stages_per_pipeline_rank=layout.vpp,
        )
        training = replace(config.training, micro_batch_size=layout.mbs)
        found = replace(config, parallel=parallel, training=training)
    made[key] = found
    return found


def _under(question: Question, strategy: Strategy) -> RunConfig:
    """Return the run of a strategy without a layout."""
    base = question.base
    config = replace(
        base,
        parallel=replace(
            base.parallel,
            data_parallel_sharding_strategy=strategy.sharding,
            gradient_accumulation_order=strategy.order,
        ),
        memory=replace(
            base.memory,
            offload_alpha=strategy.alpha,
            recompute_granularity=strategy.recompute,
            offload_nvme_path=question.nvme_path if strategy.swaps and question.hardware.nvme_gib else None,
        ),
    )
    config = with_sweep(config, strategy.sweep)
    return config if strategy.placement is None else with_placement(config, strategy.placement)


def grids(question: Question) -> Iterator[tuple[Layout, str]]:
    """Yield each tp, cp and pp whose product divides the GPUs, and why memo cannot run it (empty if it can)."""
    for tp in divisors_of(question.gpus):
        for cp in divisors_of(question.gpus // tp):
            for pp in divisors_of(question.gpus // (tp * cp)):
                layout = Layout(tp, cp, pp)
                yield layout, refusal(question, layout)


def refusal(question: Question, layout: Layout) -> str:
    """Return why memo cannot run a layout, whatever its memory; empty if it can."""
    config = config_of(question, layout)
    try:
        check_layout(config, question.gpus)
        check_batch(config, question.gpus)
        check_split(config.model, layout.tp)
        check_patterns_of(config.model, config.data.seq_length)
    except ConfigError as error:
        return str(error)
    return ""


def layouts_of(question: Question, grid: Layout) -> Iterator[Layout]:
    """Yield all layouts of a grid; a layout that needs less memory comes before a similar one that needs more."""
    for pipeline in pipelines(question, grid):
        for batch in batches(question, pipeline):
            yield from exchanges(question, batch)


def pipelines(question: Question, grid: Layout) -> Iterator[Layout]:
    """Yield a grid with one chunk per stage, then with several."""
    yield grid
    if grid.pp > 1:
        per_stage = question.model.sizes.num_layers // grid.pp
        yield from (grid._replace(vpp=chunks) for chunks in divisors_of(per_stage) if 1 < chunks <= MOST_CHUNKS)


def batches(question: Question, pipeline: Layout) -> Iterator[Layout]:
    """Yield micro-batches of 1, 2, 4, ... sequences that divide the sequences of one model copy, smallest first."""
    sequences = num_microbatches(question, pipeline._replace(mbs=1))
    size = 1
    while size <= sequences and sequences % size == 0:
        if pipeline.vpp == 1 or sequences // size % pipeline.pp == 0:
            yield pipeline._replace(mbs=size)
        size *= 2


def num_microbatches(question: Question, layout: Layout) -> int:
    """Return the number of microbatches of one copy of the model in a step."""
    return question.global_batch_size // (question.gpus // layout.ranks * layout.mbs)


def exchanges(question: Question, layout: Layout) -> list[Layout]:
    """Return the layout with each exchange of attention under cp that differs for these heads in time or memory."""
    if layout.cp == 1:
        return [layout]
    heads, groups = question.model.sizes.num_attention_heads // layout.tp, question.model.sizes.kv_parts // layout.tp
    kinds: list[CpCommType] = ["p2p", "all_gather"]
    mixed = layout._replace(cp_comm_type="a2a+p2p")
    if heads % layout.cp == 0 and groups % layout.cp == 0:
        kinds.append("a2a")
    elif resolved_a2a_size(question.model.sizes, config_of(question, mixed).parallel) > 1:
        kinds.append("a2a+p2p")
    return [layout._replace(cp_comm_type=kind) for kind in kinds]


def can_tile(question: Question, layout: Layout) -> bool:
    """Return whether the tiles of a given alpha divide the sequence; auto takes fewer tiles if they do not."""
    return question.seq_len % (sequence_step(layout.tp, layout.cp) * DEFAULT_TILES) == 0


def parse_layout(text: str) -> Layout:
    """Parse `tp4 cp2 pp1 mbs1 a2a`, also with commas and equals signs; missing sizes are 1. Raises ConfigError."""
    sizes: dict[str, int] = {}
    exchange: CpCommType = "p2p"
    for word in text.replace(",", " ").split():
        found = re.fullmatch(r"(tp|cp|pp|vpp|mbs)=?([1-9]\d{0,8})", word)
        if found:
            sizes[found[1]] = int(found[2])
        elif word in get_args(CpCommType):
            exchange = word  # type: ignore[assignment]  # one of them
        else:
            raise ConfigError(
                f"--explain '{text}': '{word}' is no part of a layout: write it as the table does, such as "
                "'tp4 cp2 pp1 mbs1 p2p'"
            )
    return Layout(**sizes, cp_comm_type=exchange)
