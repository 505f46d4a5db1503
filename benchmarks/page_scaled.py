"""Tables and the picture of the scaled node."""

import csv
import statistics
from operator import eq
from pathlib import Path
from typing import Any

import rows
from page_tables import Cell, Row, Table, number, text
from scaled_node import NODE, NODE_HIDDEN
from scaled_steps import IDEALS, LEAST_MEMORY_WAYS, SCALED_WAYS

PICTURE = Path(__file__).parents[1] / "docs" / "images" / "scaled_node.svg"
FILE = "scaled_node"
PAPER = Path(__file__).parents[1] / "tests" / "golden" / "memo_table4_ablation.csv"

LEAD = """A node in small: one CPU core is the GPU, and copies to host memory are held to a rate at which a layer's
FLOPs and its activations stand to each other as on a node of A800s (29 TFLOP/s of peak for each GB/s of link), or of
H100s (40). What hides behind compute depends on these proportions and on the sequence's length over the hidden size:
2,048 to 16,384 tokens are run, with hidden sizes of 128 and 64, and stand for 64K to 1M tokens with a hidden size of
4,096. The same program, plans and copies as on a GPU; real steps, real time. What an H200 took of some of these ways is
in the last section.

All ways compute layers by the same operations on the same 8 tiles of tokens, and differ only in what they keep, move
and compute again (benchmarks/rivals.py):

- ideal: keeps everything on the device, without a limit. All others are asked to fit in half of what it takes, and one
  that asks for more is stopped as on a full GPU: oom. Its time is then that of a run without a limit.
- full-recompute: keeps the input of each layer, and computes the layer again up to its last product, as
  torch.utils.checkpoint does.
- layer-input-offload: the same, with the inputs in host memory. Copies overlap with compute in both directions, and
  inputs come back a layer ahead.
- alst: the same, with a tiled MLP, which is computed three times; DeepSpeed's Arctic Long Sequence Training.
- full-swap: moves everything. memo-paper: moves the share of everything that MEMO's rule allows. memo: memo's plan.

whole-layers is a second reference that is not on tiles: torch's layers under autograd, which keeps everything. A small
layer on tiles costs a CPU more calls of short kernels, so whole layers are faster at the shortest lengths.

All ways take turns, a step each, and every figure is a median over turns; ratios are of steps within one turn. The
quartiles of a share tell how far turns differ."""


def mib(name: str) -> Cell:
    return lambda row: "-" if row.get(name) is None else f"{row[name] / 2**20:.1f}"


def foreseen(name: str, form: str) -> Cell:
    def cell(row: Row) -> str:
        found = row["foreseen"].get(name)
        return "-" if found is None else format(found, form)

    return cell


def quartiles(row: Row) -> str:
    found = row["share_of_ideal_quartiles"]
    return "-" if row["way"] == "ideal" else f"{found[0]:.3f} to {found[1]:.3f}"


def in_order(lines: list[Row]) -> list[Row]:
    ways = [*SCALED_WAYS, *LEAST_MEMORY_WAYS]
    return sorted(
        lines, key=lambda row: (row["node"], row["length_over_hidden"], -row["hidden_size"], ways.index(row["way"]))
    )


def stands_for(row: Row) -> str:
    """Tokens of the node's model, in units of 1,024 or of 1,024 squared."""
    thousands = row["length_over_hidden"] * NODE_HIDDEN // 1024
    return f"{thousands // 1024}M" if thousands % 1024 == 0 else f"{thousands}K"


def of_length(lines: list[Row]) -> list[Row]:
    """Of each node, model and length: memo's speed over each other way, as the median over turns."""
    found: dict[tuple[str, int, int], dict[str, Row]] = {}
    for row in in_order(lines):
        found.setdefault((row["node"], row["hidden_size"], row["length_over_hidden"]), {})[row["way"]] = row
    return [
        {
            **{name: of["memo"][name] for name in ("node", "hidden_size", "length_over_hidden", "seq_length")},
            **{way: statistics.median(_over(row, of["memo"])) for way, row in of.items()},
            "quartiles": statistics.quantiles(_over(of["full-recompute"], of["memo"]), n=4)[::2],
            "paper": papers_ratio(of["memo"]["length_over_hidden"] * NODE_HIDDEN // 1024),
        }
        for of in found.values()
        if {"memo", "full-recompute"} <= of.keys()
    ]


def _over(other: Row, memo: Row) -> list[float]:
    return [there / here for there, here in zip(other["steps_s"], memo["steps_s"], strict=True)]


def papers_ratio(thousands: int) -> float | None:
    """MEMO's speed over full recomputation with planned memory, of its table 4; None where that has no figure."""
    with PAPER.open(encoding="utf-8") as file:
        mfu: dict[str, Any] = {
            line["method"]: line["mfu_percent"] for line in csv.DictReader(file) if line["seq_k"] == str(thousands)
        }
    found = [mfu.get(method) for method in ("memo", "full_recompute+plan")]
    return float(found[0]) / float(found[1]) if all(found) else None


def of_one_node(lines: list[Row]) -> list[Row]:
    """Of each length: every way's share of the ideal's speed, or how it ends."""
    found: dict[tuple[int, int], Row] = {}
    names = ("seq_length", "hidden_size", "length_over_hidden", "device_bytes", "host_limit_bytes")
    for row in in_order(lines):
        named = {name: row[name] for name in names}
        cell = f"{row['share_of_ideal']:.3f}" if row["mark"] is None else row["mark"]
        found.setdefault((row["hidden_size"], row["length_over_hidden"]), named)[row["way"]] = cell
    return list(found.values())


def errors(lines: list[Row]) -> list[Row]:
    """Of each way: the largest error of what was foreseen, over all lengths."""
    found = []
    for way in dict.fromkeys(row["way"] for row in lines):
        own = [row for row in lines if row["way"] == way]
        bounded = [row for row in own if way not in IDEALS]
        step = [row["foreseen"]["step_s"] / row["step_s"] - 1 for row in own]
        marks = [row["mark"] is None for row in bounded]
        fits = [row["foreseen"]["device_peak_bytes"] <= row["device_bytes"] for row in bounded]
        memory = [row["foreseen"]["device_peak_bytes"] / row["device_peak_bytes"] - 1 for row in own]
        shares = [
            row["foreseen"]["hidden_share"] - row["hidden_share"]
            for row in own
            if None not in (row["hidden_share"], row["foreseen"]["hidden_share"])
        ]
        found.append(
            {
                "way": way,
                "rows": len(own),
                "step": max(step, key=abs),
                "within": sum(abs(error) <= 0.05 for error in step),
                "memory": max(memory, key=abs),
                "hidden": 100 * max(shares, key=abs) if shares else None,
                "marks": f"{sum(map(eq, marks, fits))} of {len(bounded)}" if bounded else None,
            }
        )
    return found


_LENGTH = {
    "tokens run": number("seq_length", ",d"),
    "hidden size": number("hidden_size", "d"),
    "stands for": stands_for,
}


def _half(row: Row) -> bool:
    """Whether the limit is half of what the ideal takes."""
    return not row["one_node"]


def _half_of_node(row: Row) -> bool:
    return _half(row) and row["node"] == NODE.name


def _half_of_others(row: Row) -> bool:
    return _half(row) and row["node"] != NODE.name


_OVER_OTHERS = {
    **_LENGTH,
    "over full-recompute": number("full-recompute", ".3f"),
    "quartiles": lambda row: "{:.3f} to {:.3f}".format(*row["quartiles"]),
    "MEMO's own": number("paper", ".2f"),
    **{f"over {way}": number(way, ".3f") for way in SCALED_WAYS if way not in ("memo", "full-recompute")},
}
_EVERY_WAY = {
    **_LENGTH,
    "way": text("way"),
    "turns": lambda row: str(len(row["steps_s"])),
    "step, s": number("step_s", ".3f"),
    "share of the ideal's speed": number("share_of_ideal", ".3f"),
    "quartiles": quartiles,
    "device MiB": mib("device_peak_bytes"),
    "in half": lambda row: "-" if row["way"] in IDEALS else row["mark"] or "fits",
    "host MiB": mib("host_bytes"),
    "copies hidden": number("hidden_share", ".3f"),
    "step foreseen, s": foreseen("step_s", ".3f"),
    "hidden, foreseen": foreseen("hidden_share", ".3f"),
}

TABLES = [
    Table(
        FILE,
        "memo's speed over each other way",
        _OVER_OTHERS,
        where=_half_of_node,
        of=of_length,
        text="MEMO's own: what its paper measured on 8 A800s at the length that a row stands for, its speed over full "
        "recomputation with planned memory (7B, table 4; 1M tokens do not fit there).",
    ),
    Table(FILE, "Every way at every length", _EVERY_WAY, where=_half_of_node, of=in_order),
    Table(
        FILE,
        "With an H100's link: memo's speed over each other way",
        {head: cell for head, cell in _OVER_OTHERS.items() if head != "MEMO's own"},
        where=_half_of_others,
        of=of_length,
        text="40 TFLOP/s for each GB/s, where an A800 has 29: less hides.",
    ),
    Table(FILE, "With an H100's link: every way", _EVERY_WAY, where=_half_of_others, of=in_order),
    Table(
        FILE,
        "One node for all lengths: share of the ideal's speed",
        {
            **_LENGTH,
            "device MiB": mib("device_bytes"),
            "host MiB": mib("host_limit_bytes"),
            **{way: text(way) for way in (*SCALED_WAYS, *LEAST_MEMORY_WAYS) if way not in IDEALS},
        },
        where=lambda row: row["one_node"],
        of=of_one_node,
        text="Device and host memory stand to each other as 80 GB to an eighth of 2 TB. memo keeps layers whole, and "
        "memo-swept is what takes its place where they do not fit: layers swept along the sequence, alpha 0.",
    ),
    Table(
        FILE,
        "What was foreseen, at worst over all lengths",
        {
            "way": text("way"),
            "rows": number("rows", "d"),
            "step": number("step", "+.1%"),
            "steps within 5 %": number("within", "d"),
            "device bytes": number("memory", "+.3%"),
            "hidden share, points": number("hidden", "+.1f"),
            "oom marks right": text("marks"),
        },
        where=_half,
        of=errors,
    ),
]


def draw() -> Path | None:
    """Share of the ideal's speed by length, with quartiles of two ways; a way that does not always fit is dashed."""
    lines = in_order([row for row in rows.read(FILE) if _half_of_node(row)])
    if not lines:
        return None
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8.0, 4.8))
    for way in SCALED_WAYS:
        own = [row for row in lines if row["way"] == way]
        if way == "ideal" or not own:
            continue
        missing = [stands_for(row) for row in own if row["mark"] is not None]
        lengths_missing = f" at {', '.join(missing)}" if len(missing) < len(own) else ""
        at = [row["length_over_hidden"] for row in own]
        (line,) = axes.plot(
            at,
            [100 * row["share_of_ideal"] for row in own],
            marker="o",
            markersize=4,
            linewidth=2.5 if way == "memo" else 1.2,
            linestyle=":" if way in IDEALS else "--" if missing else "-",
            label=way + (f" (does not fit{lengths_missing})" if missing else ""),
        )
        if way in ("memo", "full-recompute"):
            between = zip(*(row["share_of_ideal_quartiles"] for row in own), strict=True)
            low, high = ([100 * share for share in edge] for edge in between)
            axes.fill_between(at, low, high, color=line.get_color(), alpha=0.15, linewidth=0)
    lengths = {row["length_over_hidden"]: row for row in lines}
    axes.set(xscale="log", xticks=list(lengths))
    axes.set_xticklabels(
        [f"{stands_for(row)}\n{row['seq_length']:,} x {row['hidden_size']}" for row in lengths.values()]
    )
    axes.minorticks_off()
    axes.set_xlabel("length in proportion to a hidden size of 4,096; below: tokens x hidden size that were run")
    axes.set_ylabel("speed, % of keeping everything")
    axes.set_title(
        "Measured on the scaled node (CPU), an A800's link, in half of the ideal's memory; bands: quartiles",
        fontsize=10,
    )
    axes.axhline(100, color="0.6", linewidth=0.8)
    axes.grid(axis="y", color="0.9")
    axes.legend(fontsize=8, ncols=2, loc="upper center", bbox_to_anchor=(0.5, -0.19))
    with pyplot.rc_context({"svg.hashsalt": "memo"}):  # the same picture of the same rows, byte by byte
        figure.savefig(PICTURE, metadata={"Date": None}, bbox_inches="tight")
    pyplot.close(figure)
    return PICTURE
