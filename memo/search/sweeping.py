"""Ways to sweep layers along the sequence: in which tiles, in how many layers attention is recomputed, and where hidden
states are."""

from collections.abc import Iterator
from dataclasses import replace

from memo.config.derived import sequence_step
from memo.config.memory import OffloadAlpha
from memo.config.parallel import SWEPT_CP_COMM_TYPES
from memo.estimate.calibration import FITS_SHARE, USABLE_SHARE
from memo.estimate.host_memory import node_budget_bytes
from memo.estimate.own_memory import own_bounds
from memo.estimate.rank_memory import node_host_bytes
from memo.search.candidates import SLOT_TILES, SWEPT_TOKENS, Layout, Strategy, config_of
from memo.search.question import Question
from memo.spec.placement import StatePlacement
from memo.spec.slots import Moved


def sweeps(question: Question, layout: Layout, alpha: OffloadAlpha = "auto") -> Iterator[Strategy]:
    """Layers swept in tiles of about SWEPT_TOKENS on a rank; none in rings, or where there are not two slots of them.

    Where host memory may not hold the activations, also with attention recomputed: in as few layers as make
    activations fit alone, in as few as make them fit beside all states, and in all layers. Where GPU memory does not
    hold hidden states, the same with these in host memory. Megatron-LM's account does not know layers that are swept.
    """
    if (layout.cp > 1 and layout.cp_comm_type not in SWEPT_CP_COMM_TYPES) or question.program != "memo":
        return
    slots = range(question.seq_len // (layout.cp * SLOT_TILES * SWEPT_TOKENS), 1, -1)
    step = sequence_step(layout.tp, layout.cp) * SLOT_TILES
    sections = next((count for count in slots if question.seq_len % (step * count) == 0), 0)
    if not sections:
        return
    whole = Strategy(alpha, tiles=SLOT_TILES * sections)
    yield from _with_attention_again(question, layout, whole)
    if layout.pp == 1 and not _fits_on_gpus(question, layout, whole):
        yield from _with_attention_again(question, layout, replace(whole, hidden_on_host=True))


def _with_attention_again(question: Question, layout: Layout, whole: Strategy) -> Iterator[Strategy]:
    yield whole
    per_stage = question.model.sizes.num_layers // layout.pp
    everything = StatePlacement(per_stage, per_stage, per_stage, per_stage)
    beside_all = _fewest_again(question, layout, replace(whole, placement=everything))
    if beside_all:
        fewest = {_fewest_again(question, layout, whole), beside_all, per_stage // layout.vpp}
        yield from (replace(whole, again=again) for again in sorted(fewest - {0}))


def _fits_on_gpus(question: Question, layout: Layout, strategy: Strategy) -> bool:
    """Whether GPU memory may hold what a strategy takes at least, its states included."""
    bounds = own_bounds(config_of(question, layout, strategy), question.gpus, moved={})
    return (
        max(bound.least.total for bound in bounds.values()) <= FITS_SHARE * USABLE_SHARE * question.capacity.gpu_bytes
    )


def _fewest_again(question: Question, layout: Layout, strategy: Strategy) -> int:
    """The fewest layers of a chunk that must recompute attention for a node's host memory; all, if that is too few."""
    budget_bytes = node_budget_bytes(question.capacity.host_bytes, None)
    disk_bytes = question.hardware.nvme_budget_bytes
    moved: Moved = {} if isinstance(strategy.alpha, str) else strategy.alpha
    low, high = 0, question.model.sizes.num_layers // (layout.pp * layout.vpp)
    while low < high:
        middle = (low + high) // 2
        config = config_of(question, layout, replace(strategy, again=middle))
        if node_host_bytes(config, question.gpus, question.hardware.gpus_per_node, moved, disk_bytes) <= budget_bytes:
            high = middle
        else:
            low = middle + 1
    return low
