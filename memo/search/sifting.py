"""Which candidates fit: memory of every strategy of every layout, or what another one's memory says of it.

    micro-batch    1        2        4        8
    is too large                     no ----->

Memory grows with the micro-batch, so what surely does not fit with one does not with any larger one. Stages of several
chunks hold more than those of one.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cache
from itertools import chain

from memo.config.derived import SWEPT_TOKENS
from memo.estimate.verdict import Verdict
from memo.search.candidates import (
    AUTO,
    FULL,
    GRID,
    KEEP,
    SELECTIVE,
    Layout,
    Strategy,
    can_tile,
    grids,
    layouts_of,
)
from memo.search.question import Question
from memo.search.sizing import Sized, size
from memo.search.sweeping import sweeps

STRATEGIES = (KEEP, SELECTIVE, FULL, AUTO)
"""That are tried on every layout."""


class Reason(StrEnum):
    """Why a layout is refused."""

    LAYOUT = "cannot be laid out"
    GPU = "out of GPU memory"
    HOST = "out of host memory"
    UNSURE = "unsure whether it fits"


@dataclass(frozen=True)
class Refusal:
    """A layout that no strategy makes fit.

    Attributes:
        tell: gives `text`; it sizes every strategy, which takes long, so it is asked only for what is shown.
    """

    layout: Layout
    reason: Reason
    tell: Callable[[], str] = field(repr=False, compare=False)

    @property
    def text(self) -> str:
        """Why, of the strategy that needs least."""
        return self.tell()

    def and_also(self, tell: Callable[[], str]) -> "Refusal":
        """The same with another text behind its own."""
        return replace(self, tell=lambda: f"{self.text}; {tell()}")


@dataclass
class Sifted:
    """All candidates by their memory.

    Attributes:
        oversized: layouts of which nothing fits, with stages of one chunk.
        num_candidates: layouts x strategies that were judged.
    """

    fits: list[tuple[Layout, Strategy]] = field(default_factory=list)
    unsure: list[tuple[Layout, Strategy]] = field(default_factory=list)
    refused: list[Refusal] = field(default_factory=list)
    oversized: list[Layout] = field(default_factory=list)
    num_candidates: int = 0


def sift(question: Question, *, with_shares: bool = False) -> Sifted:
    """Judge all layouts that memo can run under all strategies; `with_shares`: also under given alphas."""
    sifted = Sifted()
    strategies = (*STRATEGIES, *GRID) if with_shares else STRATEGIES
    for grid, why in grids(question):
        if why:
            sifted.refused.append(Refusal(grid, Reason.LAYOUT, why.__str__))
            sifted.num_candidates += 1
            continue
        too_large = _TooLarge()
        for layout in layouts_of(question, grid):
            ways = strategies if can_tile(question, layout) else STRATEGIES
            _place(question, layout, ways, sifted, too_large)
    return sifted


class _TooLarge:
    """What surely does not fit on one grid, so that what needs more is not counted."""

    def __init__(self) -> None:
        self._smallest: dict[tuple[str, Strategy, int], tuple[int, Sized]] = {}  # micro-batch that does not fit
        self._refusals: dict[tuple[str, int], Refusal] = {}  # of all strategies, for the smallest such micro-batch

    def add(self, layout: Layout, strategy: Strategy, sized: Sized) -> None:
        self._smallest.setdefault((layout.cp_comm_type, strategy, layout.vpp), (layout.mbs, sized))

    def below(self, layout: Layout, strategy: Strategy) -> Sized | None:
        """What needs no more than a candidate and does not fit; where the GPU is too small for one such, that one."""
        known = (self._smallest.get((layout.cp_comm_type, strategy, chunks)) for chunks in {1, layout.vpp})
        found = [entry[1] for entry in known if entry is not None and entry[0] <= layout.mbs]
        return min(found, key=lambda sized: sized.verdict != Verdict.OOM, default=None)

    def refuse(self, refused: Refusal) -> None:
        """No strategy fits, not even perhaps."""
        self._refusals.setdefault((refused.layout.cp_comm_type, refused.layout.vpp), refused)

    def refusal(self, layout: Layout, chunks: int) -> Refusal | None:
        """Of a layout that needs no more than this one, in stages of so many chunks."""
        known = self._refusals.get((layout.cp_comm_type, chunks))
        return replace(known, layout=layout) if known is not None and known.layout.mbs <= layout.mbs else None


def _place(
    question: Question, layout: Layout, ways: tuple[Strategy, ...], sifted: Sifted, too_large: _TooLarge
) -> None:
    """Put the strategies of a layout where they belong.

    Where keeping everything fits, nothing else can be faster; other strategies are for what leaves no room then.
    """
    refused = too_large.refusal(layout, layout.vpp)
    if refused is not None:
        sifted.oversized += [layout] if layout.vpp == 1 else []
        sifted.refused.append(refused)
        sifted.num_candidates += 1
        return
    tried: dict[Strategy, Sized] = {}
    known: dict[Strategy, Sized] = {}
    for strategy in chain(ways, sweeps(question, layout, sizes=SWEPT_TOKENS[::-1])):
        # Layers that are swept move more bytes, in smaller kernels: they are for what does not fit otherwise.
        if strategy.tiles and any(
            sized.verdict == Verdict.FITS and not _alike(way, strategy) for way, sized in tried.items()
        ):
            break
        # Larger tiles take more memory.
        smaller = [way for way, sized in tried.items() if sized.verdict != Verdict.FITS]
        if any(_alike(way, strategy) for way in chain(known, smaller)):
            continue
        below = too_large.below(layout, strategy)
        if below is not None:
            known[strategy] = below
            continue
        sized = tried[strategy] = size(question, layout, strategy)
        if sized.verdict in (Verdict.OOM, Verdict.OOHM):
            too_large.add(layout, strategy, sized)
        if strategy == KEEP and sized.verdict == Verdict.FITS and not sized.is_tight:
            break
    sifted.num_candidates += len(tried) + len(known)
    fitting = [(layout, strategy) for strategy, sized in tried.items() if sized.verdict == Verdict.FITS]
    unsure = [(layout, strategy) for strategy, sized in tried.items() if sized.verdict == Verdict.UNSURE]
    sifted.fits += fitting
    sifted.unsure += unsure
    if fitting:
        return
    sifted.oversized += [layout] if layout.vpp == 1 else []
    refused = None if tried else too_large.refusal(layout, 1)
    if refused is None or refused.reason != Reason.GPU:  # with more chunks, GPU memory may be scarcer than the host's
        refused = _refusal(question, layout, tried, known)
    sifted.refused.append(refused)
    if not unsure:
        too_large.refuse(refused)


def _alike(one: Strategy, other: Strategy) -> bool:
    """Whether both sweep layers in the same way but for the size of tiles, and either may be faster: smaller ones leave
    room for activations that are recomputed otherwise.
    """
    return one.tiles > 0 and replace(one, tiles=other.tiles) == other


def _refusal(question: Question, layout: Layout, tried: dict[Strategy, Sized], known: dict[Strategy, Sized]) -> Refusal:
    """`known`: what is too large as something is that needs no more, which is given; one of these may need least."""

    @cache
    def least() -> Sized:
        found = list(tried.values())
        for strategy, below in known.items():
            if below.is_exact or all(below.gpu_excess < sized.excess for sized in found):
                found.append(size(question, layout, strategy))
        return min(found, key=lambda sized: sized.excess)

    reasons = {Verdict.OOM: Reason.GPU, Verdict.OOHM: Reason.HOST, Verdict.UNSURE: Reason.UNSURE}
    verdicts = {sized.verdict for sized in chain(tried.values(), known.values())}
    verdict = Verdict.OOM if verdicts == {Verdict.OOM} else least().verdict
    return Refusal(layout, reasons[verdict], lambda: least().shortage(question))
