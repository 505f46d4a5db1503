"""Measures the share of the copies that overlaps with compute in a step (MEMO, figures 1b, 7 and 11).

    python benchmarks/overlap.py

Steps run at every length with several alphas. A row has the seconds of layers, of copies, and of compute that waits for
copies, with the values that the plan expects. On a CPU the copies run in the thread that computes, so nothing is ever
hidden. benchmarks/copies.py measures the rates of the link.
"""

from measure import case_of, measured
from rows import Journal
from scales import arguments


def main() -> None:
    args = arguments(__doc__)
    journal = Journal(f"{args.scale.name}/overlap")
    for seq_length in args.scale.lengths:
        for alpha in args.scale.alphas:
            flags_of = {"offload_alpha": alpha, "offload_policy": "paper"}
            case = case_of(args, "memo", args.scale.rank, seq_length, world=args.scale.world, flags=flags_of)
            journal.add({**measured(args, case), "alpha": alpha})


if __name__ == "__main__":
    main()
