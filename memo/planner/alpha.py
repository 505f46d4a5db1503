"""The share of a layer's activations that moves to host memory: the paper's alpha, and a share for each group.

Source: MEMO, section 4.1, equations 1-3. `solve_paper` is that program to the letter, with a real share. `solve` also
takes account of both directions of the link, device memory, the host records of a pipeline stage, a share for each
group by the recomputation that it saves, and the grid of tiles; on this grid its answer is optimal.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from math import gcd
from typing import NamedTuple

from memo.errors import DiskError, HostMemoryError, PlanError
from memo.planner.problem import Limit, SwapGroup, SwapProblem
from memo.planner.solution import SwapSolution, predict, stay
from memo.spec.disk import RecordKind, least_host_bytes
from memo.spec.slots import whole_tiles
from memo.units import format_bytes

Bundle = tuple[SwapGroup, ...]
"""Groups that move the same number of tiles."""

_CLEARLY_MORE = 1 + 1e-9
"""The gains of equally good solutions differ by rounding; the solution that takes less memory is then kept."""


class PaperAlpha(NamedTuple):
    """The solution of the paper's program: a real share, not rounded, and the equation that limits it."""

    alpha: float
    limit: Limit


def solve_paper(
    always_bytes: float,
    other_bytes: float,
    layer_s: float,
    bytes_per_s: float,
    num_layers: int,
    host_bytes: float,
) -> PaperAlpha:
    """Equations 1-3: the largest alpha in [0, 1] with

        (always + alpha other) / B <= T_layer    and    (n - 2) (always + alpha other) <= M_CPU.

    Args:
        always_bytes: S_input + S_attn of one layer on one rank.
        other_bytes: S_others.
        layer_s: T_layer, forward.
        bytes_per_s: B.
        host_bytes: M_CPU for this rank.

    Raises:
        PlanError, HostMemoryError: not even alpha = 0 meets equation 2, or 3.
    """
    records = max(0, num_layers - 2)  # the last two layers never move
    hideable_bytes = layer_s * bytes_per_s
    if always_bytes > hideable_bytes:
        raise PlanError(
            f"{Limit.OFFLOAD}: even at alpha = 0 a layer moves {format_bytes(always_bytes)}, but only "
            f"{format_bytes(hideable_bytes)} ({bytes_per_s:.3g} bytes/s x {layer_s:.3g} s) pass during its forward: "
            "use a longer sequence, or a faster link"
        )
    if records * always_bytes > host_bytes:
        raise _no_host_memory(records, always_bytes, host_bytes)
    bounds = {
        Limit.EVERYTHING: 1.0,
        Limit.OFFLOAD: (hideable_bytes - always_bytes) / other_bytes,
    }
    if records:
        bounds[Limit.HOST] = (host_bytes / records - always_bytes) / other_bytes
    limit = min(bounds, key=bounds.__getitem__)
    return PaperAlpha(bounds[limit], limit)


def solve(problem: SwapProblem) -> SwapSolution:
    """The tiles to move: those that save most recomputation (policy auto), or the largest single share (paper).

    No limit is broken, with one exception: tensors that always move do so even where the link does not hide their
    copies, and hidden_share says how much of the time is hidden. Where all activations fit in device memory, nothing
    moves. `alphas` are the tiles as shares.

    Raises:
        HostMemoryError, DiskError: tensors that always move fit neither in host memory nor on the disk.
        PlanError: the buffers do not fit in device memory.
    """
    if problem.fits_resident:
        return stay(problem)
    _require_memory(problem)
    bundles = bundles_of(problem)
    tiles = problem.uniform(0)
    if not problem.violated(tiles):
        tiles = _Search(problem, bundles).best
    shares = {name: count / problem.tiles for name, count in tiles.items()}
    return predict(problem, tiles, shares, _limit(problem, bundles, tiles))


def solve_at(problem: SwapProblem, alpha: float) -> SwapSolution:
    """One given alpha for every group, rounded down to tiles, and lowered only where memory is short.

    Raises as `solve` does.
    """
    _require_memory(problem)
    shares = {group.name: float(alpha) for group in problem.groups}
    asked = count = whole_tiles(alpha, problem.tiles)
    while count and {Limit.HOST, Limit.DISK, Limit.DEVICE}.intersection(problem.violated(problem.uniform(count))):
        count -= 1
    # Limits of memory come first.
    limit = Limit.REQUEST if count == asked else problem.violated(problem.uniform(count + 1))[0]
    return predict(problem, problem.uniform(count), shares, limit)


def _require_memory(problem: SwapProblem) -> None:
    nothing = problem.uniform(0)
    broken, least_bytes = problem.violated(nothing), problem.moved_bytes(nothing)
    if Limit.HOST in broken:
        if problem.disk is not None:
            raise no_staging(problem.host_bytes, problem.hidden.total_bytes, problem.record_kinds(least_bytes))
        *beside, others = problem.record_kinds(least_bytes)
        left_bytes = problem.host_bytes - sum(kind.total_bytes for kind in (*beside, problem.hidden))
        raise _no_host_memory(others.number, others.num_bytes, max(0, left_bytes), problem.sections > 1)
    if Limit.DISK in broken:
        split, disk = problem.split(least_bytes), problem.disk
        assert split is not None and disk is not None
        raise DiskError(
            f"{Limit.DISK}: even at alpha = 0 a rank keeps {format_bytes(split.disk_bytes)} on the disk of "
            f"--offload-nvme-path beside {format_bytes(split.host_bytes)} in host memory, available there are "
            f"{format_bytes(disk.num_bytes)}: free some, raise --offload-nvme-gib, use a smaller --seq-length or more "
            "--tp, --cp or --pp, or --offload-alpha off"
        )
    if Limit.DEVICE in broken:
        raise PlanError(
            f"{Limit.DEVICE}: the rounding buffers need {format_bytes(problem.buffer_bytes(nothing))} even at "
            f"alpha = 0, available are {format_bytes(problem.device_bytes)}: use more --offload-tiles than "
            f"{problem.tiles}, a smaller --seq-length, or more --tp or --cp"
        )


def _no_host_memory(num_records: int, always_bytes: float, host_bytes: float, sweeps: bool = False) -> HostMemoryError:
    again = " or a larger --recompute-attention-layers," if sweeps else ""
    return HostMemoryError(
        f"{Limit.HOST}: even at alpha = 0 a rank keeps {num_records} records x {format_bytes(always_bytes)} = "
        f"{format_bytes(num_records * always_bytes)} there, available are {format_bytes(host_bytes)}: raise "
        f"--offload-host-memory-gib,{again} use a smaller --seq-length or more --tp, --cp or --pp, or --offload-alpha "
        "off"
    )


def no_staging(host_bytes: float, hidden_bytes: int, kinds: Sequence[RecordKind]) -> HostMemoryError:
    """The error of host memory that does not even hold the hidden states, which never go to a disk, and the staging
    buffers through which all other records go."""
    hidden = f"the hidden states, {format_bytes(hidden_bytes)}, which never go to a disk, and " if hidden_bytes else ""
    without = ", leave out --offload-hidden-states," if hidden_bytes else ","
    return HostMemoryError(
        f"{Limit.HOST}: {format_bytes(host_bytes)} of this rank do not hold {hidden}the staging buffers, "
        f"{format_bytes(least_host_bytes(kinds))}, through which records go to --offload-nvme-path: raise "
        f"--offload-host-memory-gib{without} or have smaller records with --offload-granularity tile and more "
        "--offload-tiles"
    )


def bundles_of(problem: SwapProblem) -> list[Bundle]:
    """The bundles that get one number of tiles each, in order of the recomputation that a byte saves, the most first.

    Under the paper's policy all groups are one bundle. Otherwise each group is a bundle, and a group that costs nothing
    to recompute never moves.
    """
    if problem.policy == "paper":
        return [problem.groups]
    bundles = [(group,) for group in problem.groups if group.recompute_s > 0]
    return sorted(bundles, key=lambda bundle: bundle[0].recompute_s / max(1, bundle[0].num_bytes), reverse=True)


def _limit(problem: SwapProblem, bundles: list[Bundle], tiles: dict[str, int]) -> Limit:
    """The limit that prevents one more tile of the most valuable bundle among those that do not move in full.

    Of several limits it is the one that would be exceeded furthest.
    """
    partial = [bundle for bundle in bundles if tiles[bundle[0].name] < problem.tiles]
    if not partial:
        return Limit.EVERYTHING if problem.num_moves else Limit.NO_MOVES
    more = _with(tiles, partial[0], tiles[partial[0][0].name] + 1)
    broken = problem.violated(tiles) or problem.violated(more)
    return max(broken, key=lambda limit: problem.use(limit, more))


_Taken = tuple[int, int, float]
"""Taken by some tiles: bytes of buffers, bytes of a copy, seconds of recomputation."""


class _Search:
    """Finds the best tiles by branch and bound: fewer tiles of a bundle are tried only while they may still win.

    A limit that some tiles break is also broken by more tiles. So the last bundle takes as many tiles as fit, and no
    count above that is tried. The resources of each count of a bundle are tabled, as a search asks for them thousands
    of times.
    """

    def __init__(self, problem: SwapProblem, bundles: list[Bundle]) -> None:
        self._problem, self._bundles, self._nothing = problem, bundles, problem.uniform(0)
        # The paper's policy maximises alpha itself, even where it saves nothing.
        is_paper = problem.policy == "paper"
        self._gains = [1.0 if is_paper else sum(group.recompute_s for group in bundle) for bundle in bundles]
        self._rests = [sum(self._gains[depth + 1 :]) * problem.tiles for depth in range(len(bundles))]
        nothing = self._nothing
        least = problem.buffer_bytes(nothing), problem.moved_bytes(nothing), problem.recompute_s(nothing)
        of_counts = range(problem.tiles + 1)
        self._more = [[self._added(bundle, count) for count in of_counts] for bundle in bundles]
        moved, step = least[1], gcd(*(added[1] for table in self._more for added in table)) or 1
        # The most bytes of one copy that break no limit of host memory, disk and the link of the forward; tiles add a
        # multiple of `step`.
        most = last_that_holds(
            sum(table[-1][1] for table in self._more) // step,
            lambda count: not problem.violated_by_copies(moved + count * step),
        )
        self._most_moved_bytes = moved + most * step
        self._best: tuple[int, ...] = (0,) * len(bundles)
        self._best_gain, self._best_bytes = 0.0, least[:2]
        self._try((), least, 0.0)

    @property
    def best(self) -> dict[str, int]:
        tiles = self._nothing
        for bundle, count in zip(self._bundles, self._best, strict=True):
            tiles = _with(tiles, bundle, count)
        return tiles

    def _added(self, bundle: Bundle, count: int) -> _Taken:
        """The resources that `count` tiles of a bundle take more than none of them."""
        tiles = self._problem.tiles
        buffers = sum(group.added_buffer_bytes(count, tiles) for group in bundle)
        moved = sum(group.moved_bytes(count, tiles) for group in bundle)
        return buffers, moved, -sum(group.recompute_s * count / tiles for group in bundle)

    def _try(self, counts: tuple[int, ...], taken: _Taken, gain: float, fitting: int | None = None) -> int:
        """Try the bundles behind `counts`. Return the most tiles of the first of them that fit beside `counts`.

        Args:
            taken: the resources that `counts` take.
            gain: seconds that `counts` save, times the number of tiles.
            fitting: a number of tiles that is known to fit, beside more of another bundle; None: not known.
        """
        depth = len(counts)
        if depth == len(self._bundles):
            is_as_good = gain * _CLEARLY_MORE >= self._best_gain
            if gain > self._best_gain * _CLEARLY_MORE or (is_as_good and taken[:2] < self._best_bytes):
                self._best, self._best_gain, self._best_bytes = counts, gain, taken[:2]
            return 0
        table, of_next = self._more[depth], None
        most = self._most(table, taken, fitting)
        for count in range(most, -1, -1):
            reached = gain + self._gains[depth] * count
            if (reached + self._rests[depth]) * _CLEARLY_MORE < self._best_gain:
                break
            of_next = self._try((*counts, count), _plus(taken, table[count]), reached, of_next)
        return most

    def _most(self, table: list[_Taken], taken: _Taken, fitting: int | None) -> int:
        """The most tiles of a bundle that break no limit beside `taken`, which breaks none."""
        if fitting is None:
            return last_that_holds(len(table) - 1, lambda count: self._fits(taken, table[count]))
        while fitting < len(table) - 1 and self._fits(taken, table[fitting + 1]):  # as a rule only a few more do
            fitting += 1
        return fitting

    def _fits(self, taken: _Taken, more: _Taken) -> bool:
        buffers, moved, recompute_s = _plus(taken, more)
        if moved > self._most_moved_bytes or buffers > self._problem.device_bytes:
            return False
        return not self._problem.violated_in_backward(moved, recompute_s)


def _plus(one: _Taken, other: _Taken) -> _Taken:
    return one[0] + other[0], one[1] + other[1], one[2] + other[2]


def last_that_holds(most: int, holds: Callable[[int], bool]) -> int:
    """The largest number up to `most` that holds, if 0 holds and no number holds above one that does not."""
    return most if holds(most) else bisect_left(range(1, most), True, key=lambda number: not holds(number))


def _with(tiles: dict[str, int], bundle: Bundle, count: int) -> dict[str, int]:
    """`tiles`, but `count` of each group of `bundle`."""
    return {**tiles, **{group.name: count for group in bundle}}
