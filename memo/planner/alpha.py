"""How much of a layer's activations moves to host memory: the paper's alpha, and a share for each group.

Source: MEMO, section 4.1, equations 1-3. `solve_paper` is that program to the letter. `solve` adds what it
lacks: both directions of the link, device memory, the host records of a pipeline stage, a share for each group
by the recompute time that it saves, and the grid of tiles. Shares are solved in the reals, then rounded down.
"""

from dataclasses import dataclass
from itertools import product

from memo.errors import HostMemoryError, PlanError
from memo.planner.linear import Row, maximize
from memo.planner.problem import Limit, SwapGroup, SwapProblem, SwapSolution, predict, stay
from memo.spec.slots import whole_tiles
from memo.units import format_bytes

Bundle = tuple[SwapGroup, ...]
"""Groups that share one variable of the program."""

_GRID_TOLERANCE = 1e-9
"""In tiles: solvers return 0.4999999999 for 1/2. A count that is rounded up too far is lowered again."""

_CLEARLY_MORE = 1 + 1e-9
"""The gains of equally good programs differ by rounding; then the program that takes less memory is kept."""


@dataclass(frozen=True)
class PaperAlpha:
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
    rows = {
        Limit.OFFLOAD: Row((other_bytes,), hideable_bytes - always_bytes),
        Limit.HOST: Row((records * other_bytes,), host_bytes - records * always_bytes),
    }
    alphas = maximize([1.0], list(rows.values()))
    assert alphas is not None, "both bounds were found to be at least 0"
    if alphas[0] >= 1.0 - _GRID_TOLERANCE:
        return PaperAlpha(alphas[0], Limit.EVERYTHING)
    return PaperAlpha(alphas[0], _tightest(rows, alphas))


def solve(problem: SwapProblem) -> SwapSolution:
    """The tiles to move: those that save most recomputation (policy auto), or one largest share (paper).

    No limit is broken, with one exception: where the link does not even hide what always moves, that moves
    all the same, and hidden_share says how far it hides. Where all activations fit in device memory, nothing
    moves.

    Raises:
        HostMemoryError: what always moves does not fit in host memory.
        PlanError: the buffers do not fit in device memory.
    """
    if problem.fits_resident:
        return stay(problem)
    _require_memory(problem)
    bundles = _bundles(problem)
    shares, limit = _best_shares(problem, bundles)
    tiles = _lowered(problem, bundles, _floor(problem, shares), set(Limit))
    if problem.policy == "auto":
        tiles = _filled(problem, bundles, tiles)
    return predict(problem, tiles, shares, limit)


def solve_at(problem: SwapProblem, alpha: float) -> SwapSolution:
    """One given alpha for every group, rounded down to tiles, and lowered only where memory is short.

    Raises as `solve` does, and PlanError for an alpha outside [0, 1].
    """
    if not 0 <= alpha <= 1:
        raise PlanError(f"--offload-alpha is {alpha}, but it is a share and must be in [0, 1]: give 0 to 1")
    _require_memory(problem)
    shares = {group.name: float(alpha) for group in problem.groups}
    asked = _floor(problem, shares)
    tiles = _lowered(problem, [problem.groups], asked, {Limit.HOST, Limit.DEVICE})
    limit = Limit.REQUEST
    if tiles != asked:
        one_more = {name: count + 1 for name, count in tiles.items()}
        limit = problem.violated(one_more)[0]  # memory comes first
    return predict(problem, tiles, shares, limit)


def _require_memory(problem: SwapProblem) -> None:
    nothing = problem.uniform(0)
    broken = problem.violated(nothing)
    if Limit.HOST in broken:
        raise _no_host_memory(problem.num_records, problem.always_bytes, problem.host_bytes)
    if Limit.DEVICE in broken:
        raise PlanError(
            f"{Limit.DEVICE}: the rounding buffers need {format_bytes(problem.buffer_bytes(nothing))} even at "
            f"alpha = 0, available are {format_bytes(problem.device_bytes)}: use a smaller --seq-length, or more "
            "--tp or --cp"
        )


def _no_host_memory(num_records: int, always_bytes: float, host_bytes: float) -> HostMemoryError:
    return HostMemoryError(
        f"{Limit.HOST}: even at alpha = 0 a rank keeps {num_records} records x {format_bytes(always_bytes)} = "
        f"{format_bytes(num_records * always_bytes)} there, available are {format_bytes(host_bytes)}: raise "
        "--offload-host-memory-gb, use a smaller --seq-length or more --tp, --cp or --pp, or --offload-alpha off"
    )


def _bundles(problem: SwapProblem) -> list[Bundle]:
    if problem.policy == "paper":
        return [problem.groups]
    return [(group,) for group in problem.groups if group.recompute_s > 0]


def _best_shares(problem: SwapProblem, bundles: list[Bundle]) -> tuple[dict[str, float], Limit]:
    """Real shares of all groups, and the limit that binds.

    Memory that a group takes as soon as any of it moves is not linear in its share. So there is one linear program for
    each choice of the groups that may move. As a rule only qkv has such memory, which makes two programs.
    """
    worth_moving = {group.name for bundle in bundles for group in bundle}
    full = {group.name: problem.tiles if group.name in worth_moving else 0 for group in problem.groups}
    if not problem.violated(full):
        shares = {name: count / problem.tiles for name, count in full.items()}
        return shares, Limit.EVERYTHING if problem.num_moves else Limit.NO_MOVES
    best = {group.name: 0.0 for group in problem.groups}
    broken = problem.violated(problem.uniform(0))
    if broken:  # memory suffices, so the link is too slow to hide what always moves
        return best, broken[0]
    best_gain, limit = -1.0, Limit.DEVICE
    for choice in product(*((False, True) if _entry_bytes(bundle) else (True,) for bundle in bundles)):
        chosen = [bundle for bundle, is_chosen in zip(bundles, choice, strict=True) if is_chosen]
        rows = _rows(problem, chosen, sum(_entry_bytes(bundle) for bundle in chosen))
        values = maximize(_gains(problem, chosen), list(rows.values()))
        if values is not None and _total(problem, chosen, values) > best_gain * _CLEARLY_MORE:
            best_gain, limit = _total(problem, chosen, values), _tightest(rows, values)
            best = dict.fromkeys(best, 0.0) | _by_group(chosen, values)
    if any(_entry_bytes(bundle) for bundle in bundles):
        values = maximize(_gains(problem, bundles), list(_rows(problem, bundles, entry_bytes=0).values()))
        if values is not None and _total(problem, bundles, values) > best_gain * _CLEARLY_MORE:
            limit = Limit.DEVICE
    return best, limit


def _rows(problem: SwapProblem, bundles: list[Bundle], entry_bytes: int) -> dict[Limit, Row]:
    """Every limit as a row over the shares of these bundles; all other groups stay at 0."""
    num_bytes = [float(sum(group.num_bytes for group in bundle)) for bundle in bundles]
    buffer_bytes = [float(sum(group.buffer_bytes for group in bundle)) for bundle in bundles]
    recompute_s = [sum(group.recompute_s for group in bundle) for bundle in bundles]
    free_bytes = problem.device_bytes - problem.fixed_buffer_bytes - entry_bytes
    rows = {Limit.DEVICE: Row(tuple(buffer_bytes), free_bytes)}
    offload, prefetch = problem.offload.under_compute_bytes_per_s, problem.prefetch.under_compute_bytes_per_s
    if not (problem.num_moves and offload and prefetch):  # no copies: what moves over no link was settled before
        return rows
    records = problem.num_records
    rows[Limit.HOST] = Row(
        tuple(records * size for size in num_bytes), problem.host_bytes - records * problem.always_bytes
    )
    # What always moves may fill its time but for the tolerance of `violated`: hence no bound below 0.
    forward_s = max(0.0, problem.forward_s - problem.always_bytes / offload)
    rows[Limit.OFFLOAD] = Row(tuple(size / offload for size in num_bytes), forward_s)
    # Moving more fills the link and shortens the backward that hides it.
    longest_s = problem.backward_s + problem.recompute_s(problem.uniform(0))
    rows[Limit.PREFETCH] = Row(
        tuple(size / prefetch + rebuild for size, rebuild in zip(num_bytes, recompute_s, strict=True)),
        max(0.0, longest_s - problem.always_bytes / prefetch),
    )
    return rows


def _tightest(rows: dict[Limit, Row], values: list[float]) -> Limit:
    """The limit with the least slack, relative to its bound."""

    def slack(limit: Limit) -> float:
        row = rows[limit]
        used = sum(c * value for c, value in zip(row.coefficients, values, strict=True))
        return (row.bound - used) / row.bound if row.bound > 0 else 0.0

    return min((limit for limit in rows if any(rows[limit].coefficients)), key=slack, default=Limit.DEVICE)


def _entry_bytes(bundle: Bundle) -> int:
    return sum(group.entry_bytes for group in bundle)


def _gains(problem: SwapProblem, bundles: list[Bundle]) -> list[float]:
    """Seconds of recomputation saved at share 1; under the paper's policy 1, because it maximises alpha itself."""
    return [1.0 if problem.policy == "paper" else sum(group.recompute_s for group in bundle) for bundle in bundles]


def _total(problem: SwapProblem, bundles: list[Bundle], values: list[float]) -> float:
    return sum(gain * value for gain, value in zip(_gains(problem, bundles), values, strict=True))


def _by_group(bundles: list[Bundle], values: list[float]) -> dict[str, float]:
    return {group.name: value for bundle, value in zip(bundles, values, strict=True) for group in bundle}


def _floor(problem: SwapProblem, shares: dict[str, float]) -> dict[str, int]:
    return {name: whole_tiles(share, problem.tiles) for name, share in shares.items()}


def _lowered(problem: SwapProblem, bundles: list[Bundle], tiles: dict[str, int], limits: set[Limit]) -> dict[str, int]:
    """Take tiles away until none of `limits` is violated.

    The bundle that saves least recomputation per byte loses its tiles first; of equal bundles, the one listed first.
    All groups of a bundle keep the same number of tiles.
    """
    tiles = dict(tiles)
    for bundle in sorted(bundles, key=lambda bundle: _worth(bundle[0])):
        while tiles[bundle[0].name] > 0 and limits.intersection(problem.violated(tiles)):
            for group in bundle:
                tiles[group.name] -= 1
    return tiles


def _filled(problem: SwapProblem, bundles: list[Bundle], tiles: dict[str, int]) -> dict[str, int]:
    """Add tiles, one at a time, for what rounding down has left unused.

    Each goes to the group that saves most recomputation per byte among those for which no limit is violated.
    """
    names = [bundle[0].name for bundle in sorted(bundles, key=lambda bundle: _worth(bundle[0]), reverse=True)]
    while True:
        more = ({**tiles, name: tiles[name] + 1} for name in names if tiles[name] < problem.tiles)
        fitting = next((candidate for candidate in more if not problem.violated(candidate)), None)
        if fitting is None:
            return tiles
        tiles = fitting


def _worth(group: SwapGroup) -> float:
    """Seconds of recomputation saved per byte that moves."""
    return group.recompute_s / max(1, group.num_bytes)
