"""The gain of each part of MEMO: recomputation, planned memory, swapping, and both shares solved (MEMO, table 4).

python benchmarks/table4_ablation.py
"""

from measure import case_of, measured
from rows import Journal
from scales import arguments

WAYS = ("full-recompute", "full-recompute-plan", "full-swap-plan", "memo")


def main() -> None:
    args = arguments(__doc__)
    journal = Journal(f"{args.scale.name}/table4_ablation")
    for way in WAYS:
        case = case_of(args, way, args.scale.rank, args.scale.ablation_length, world=args.scale.world)
        row = journal.add(measured(args, case))
        first = journal.rows[0]
        if row["status"] == first["status"] == "ok":
            journal.amend(row, **{f"speed_over_{WAYS[0]}": first["step_p50_s"] / row["step_p50_s"]})


if __name__ == "__main__":
    main()
