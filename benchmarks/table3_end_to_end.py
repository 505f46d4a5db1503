"""Step times of every way by sequence length, on one rank of a larger job (MEMO, table 3).

    python benchmarks/table3_end_to_end.py

Ratios compare ways at the same length. The ideal is `none`, which keeps everything on the device and recomputes
nothing. At lengths at which it does not fit its time is extrapolated by t = a s + b s^2, fitted with least relative
squares to the lengths at which it fits. Collectives are not executed, so times are those of compute and copies.
"""

from typing import Any

import numpy as np
from measure import case_of, measured
from rows import Journal
from scales import arguments

WAYS = ("none", "full-recompute", "layer-input-offload", "full-swap-plan", "memo")
METHOD = "t = a s + b s^2, least relative squares, lengths where everything fits"


def fit_ideal(lengths: list[int], steps_s: list[float]) -> tuple[float, float] | None:
    """Return (a, b) of t = a s + b s^2, both at least 0; None for fewer than two lengths."""
    if len(lengths) < 2:
        return None
    s, t = np.array(lengths, dtype=float), np.array(steps_s)
    columns = np.stack([s / t, s * s / t], axis=1)
    scale = columns.max(axis=0)
    a, b = np.linalg.lstsq(columns / scale, np.ones(len(s)), rcond=None)[0] / scale
    if a < 0 or b < 0:  # one term explains it better alone
        kept = 0 if b < 0 else 1
        only = float(columns[:, kept].sum() / (columns[:, kept] ** 2).sum())
        return (only, 0.0) if kept == 0 else (0.0, only)
    return float(a), float(b)


def ratios(rows: list[dict[str, Any]], row: dict[str, Any]) -> dict[str, Any]:
    """Return the speed of one row over that of further rows of its length: above 1 if this row is faster."""
    if row["status"] != "ok":
        return {}
    times = {r["way"]: r["step_p50_s"] for r in rows if r["seq_length"] == row["seq_length"] and r["status"] == "ok"}
    fitting = [r for r in rows if r["way"] == "none" and r["status"] == "ok"]
    found: dict[str, Any] = {
        f"speed_over_{way}": times[way] / row["step_p50_s"] for way in WAYS if way in times and way != "none"
    }
    fit = fit_ideal([r["seq_length"] for r in fitting], [r["step_p50_s"] for r in fitting])
    s = row["seq_length"]
    ideal_s = times.get("none", None if fit is None else fit[0] * s + fit[1] * s * s)
    if ideal_s is not None:
        how = "measured" if "none" in times else f"extrapolated from {[r['seq_length'] for r in fitting]}: {METHOD}"
        found |= {"ideal_s": ideal_s, "share_of_ideal_speed": ideal_s / row["step_p50_s"], "ideal_is": how}
    return found


def main() -> None:
    args = arguments(__doc__)
    journal = Journal(f"{args.scale.name}/table3_end_to_end")
    for seq_length in args.scale.lengths:
        for way in WAYS:
            journal.add(measured(args, case_of(args, way, args.scale.rank, seq_length, world=args.scale.world)))
        for row in journal.rows:
            journal.amend(row, **ratios(journal.rows, row))


if __name__ == "__main__":
    main()
