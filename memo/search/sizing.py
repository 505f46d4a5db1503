"""Memory of a candidate, and the verdict on it."""

from collections.abc import Mapping
from typing import NamedTuple

from memo.estimate.host_memory import HOST_FITS_SHARE
from memo.estimate.node_memory import node_bytes
from memo.estimate.program.embedding_and_loss import batch_bytes
from memo.estimate.program.sizes import layer_sizes
from memo.estimate.rank_memory import RankMemory, components
from memo.estimate.verdict import Verdict, judge
from memo.search.candidates import Layout, Strategy, config_of, num_microbatches
from memo.search.question import Question
from memo.spec.slots import Moved
from memo.spec.stack import runs_of_kinds
from memo.units import GIB


class Sized(NamedTuple):
    """A candidate's memory.

    Attributes:
        memory: bytes of the worst rank.
        host_bytes: host memory of one node: states, and records as far as they surely fit beside these; the remaining
            records are on its disk.
        disk_bytes: disk of one node.
        gpu_excess, host_excess: bytes needed, divided by the bytes that surely fit.
        room_bytes: bytes of the GPU that are free up to the bytes that surely fit; negative if these are exceeded.
        is_tight: whether it fits, but would not if the memory that torch does not see were somewhat larger.
        is_exact: False if the memory is copied from a candidate that needs no more and does not fit either.
    """

    memory: RankMemory
    host_bytes: int
    verdict: Verdict
    gpu_excess: float
    host_excess: float
    room_bytes: float
    is_tight: bool
    disk_bytes: int = 0
    is_exact: bool = True

    @property
    def told(self) -> str:
        """The verdict for people."""
        return f"{self.verdict}, tight" if self.is_tight else str(self.verdict)

    @property
    def excess(self) -> float:
        return max(self.gpu_excess, self.host_excess)

    def shortage(self, question: Question) -> str:
        """Return a text: which memory is short, by how much, and its largest parts."""
        is_host = self.verdict == Verdict.UNSURE and self.host_excess > self.gpu_excess
        if is_host or self.verdict == Verdict.OOHM:
            sure_gib = HOST_FITS_SHARE * question.host_memory_gib
            share = f"{HOST_FITS_SHARE:.0%} of a node's {question.host_memory_gib:,.0f}"
            disk = f" beside {self.disk_bytes / GIB:,.1f} GiB of NVMe" if self.disk_bytes else ""
            needed = f"{self.host_bytes / GIB:,.1f} GiB needed{disk}"
            return f"host memory: {needed}, {sure_gib:,.1f} GiB sure to fit ({share})"
        parts = {name: size for name, size in components(self.memory).items() if name != "host"}
        largest = sorted(parts, key=lambda name: parts[name], reverse=True)[:2]
        shown = ", ".join(f"{name} {parts[name] / GIB:,.1f}" for name in largest)
        sure_gib = question.capacity.sure_gpu_bytes / GIB
        least = "" if self.is_exact else "at least "
        return f"GPU memory: {least}{self.memory.total / GIB:,.2f} GiB needed, {sure_gib:.2f} GiB sure to fit ({shown})"


def may_fit(question: Question, layout: Layout) -> bool:
    """Return whether a layout may fit under any strategy, judged by a part of its memory that is cheap to count.

    This part is the batch of a step on the device, and the input of each layer for one microbatch in any memory.
    """
    config, limits = config_of(question, layout), question.limits
    sizes = layer_sizes(runs_of_kinds(config)[0], 1)
    batch = num_microbatches(question, layout) * batch_bytes(sizes)
    inputs = config.model.num_layers // layout.pp * sizes.between_layers
    beside = (limits.host_bytes + (limits.disk_bytes if question.hardware.nvme_gib else 0)) / limits.local_ranks
    return batch <= limits.device_bytes and batch + inputs <= limits.device_bytes + beside


def size(question: Question, layout: Layout, strategy: Strategy, moved: Mapping[str, int] | None = None) -> Sized:
    """Return the memory of a layout under a strategy; `moved`: tiles by group, for alpha auto, none by default."""
    config = config_of(question, layout, strategy)
    what: Moved | None = None
    if strategy.swaps:
        what = (moved or {}) if isinstance(strategy.alpha, str) else strategy.alpha
    capacity = question.capacity
    host, disk = node_bytes(config, question.gpus, question.hardware, what, capacity.host_bytes)
    memory = question.account.worst(config, what)
    unseen = question.account.unseen(config, memory)
    verdict = judge(memory.total, host, capacity, unseen)
    return Sized(
        memory,
        host,
        verdict,
        gpu_excess=memory.total / capacity.sure_gpu_bytes,
        host_excess=host / max(1, capacity.sure_host_bytes),
        room_bytes=capacity.sure_gpu_bytes - memory.total,
        is_tight=verdict == Verdict.FITS and capacity.is_tight(memory.total, unseen),
        disk_bytes=disk,
    )
