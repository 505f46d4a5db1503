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

LEAD = """The scaled node is a small model of a GPU node. One CPU core stands for the GPU. Copies to host memory are
slowed down to the proportion of compute and link on a node of A800s (29 TFLOP/s of peak for each GB/s of link) or of
H100s (40). The share of the copies that overlaps with compute depends only on this proportion, and on the length of the
sequence divided by the hidden size. So runs of 2,048 to 16,384 tokens with hidden sizes of 128 and 64 stand for 64K to
1M tokens with a hidden size of 4,096. Program, plans and copies are those of a run on a GPU; steps and times are real.
The last section has times of some of these ways on an H200.

A way is a method to fit activations into memory. All ways compute layers by the same operations on the same 8 tiles of
tokens. They differ only in the activations that they keep, move and recompute (benchmarks/rivals.py):

- ideal: keeps everything on the device, without a limit of memory. Each other way has half of the memory that the ideal
  takes. A way that needs more is marked oom; its time is then measured without a limit.
- full-recompute: keeps the input of each layer, and computes the layer again up to its last product, as
  torch.utils.checkpoint does.
- layer-input-offload: full-recompute with the inputs in host memory. Copies overlap with compute in both directions,
  and each input is prefetched a layer ahead.
- alst: layer-input-offload with a tiled MLP, which is computed three times, as in DeepSpeed's Arctic Long Sequence
  Training.
- full-swap: moves all activations.
- memo-paper: moves the share of all activations that the rule of MEMO's paper allows.
- memo: follows memo's plan.

whole-layers is a second reference without tiles: torch's layers under autograd, which keeps everything. A small layer
on tiles costs a CPU more calls of short kernels, so whole layers are faster at the shortest lengths.

The ways take turns: one step of each way is one turn. Every figure is a median over turns, and ratios compare steps of
the same turn. The quartiles of a ratio tell how much turns differ."""


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
    """Return the tokens of the node's model, in units of 1,024 or of 1,024 squared."""
    thousands = row["length_over_hidden"] * NODE_HIDDEN // 1024
    return f"{thousands // 1024}M" if thousands % 1024 == 0 else f"{thousands}K"


def of_length(lines: list[Row]) -> list[Row]:
    """Return memo's speed over each other way, as the median over turns, for each node, model and length."""
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
    """Return the speed of MEMO's paper over full recomputation with planned memory (table 4); None without a figure."""
    with PAPER.open(encoding="utf-8") as file:
        mfu: dict[str, Any] = {
            line["method"]: line["mfu_percent"] for line in csv.DictReader(file) if line["seq_k"] == str(thousands)
        }
    found = [mfu.get(method) for method in ("memo", "full_recompute+plan")]
    return float(found[0]) / float(found[1]) if all(found) else None


def of_one_node(lines: list[Row]) -> list[Row]:
    """Return for each length every way's share of the ideal's speed, or the mark of a way that does not fit."""
    found: dict[tuple[int, int], Row] = {}
    names = ("seq_length", "hidden_size", "length_over_hidden", "device_bytes", "host_limit_bytes")
    for row in in_order(lines):
        named = {name: row[name] for name in names}
        cell = f"{row['share_of_ideal']:.3f}" if row["mark"] is None else row["mark"]
        found.setdefault((row["hidden_size"], row["length_over_hidden"]), named)[row["way"]] = cell
    return list(found.values())


def errors(lines: list[Row]) -> list[Row]:
    """Return for each way the largest errors of the foreseen values over all lengths."""
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
    """Return whether the limit is half of the ideal's memory."""
    return not row["one_node"]


def _half_of_node(row: Row) -> bool:
    return _half(row) and row["node"] == NODE.name


def _half_of_others(row: Row) -> bool:
    return _half(row) and row["node"] != NODE.name


_OVER_OTHERS = {
    **_LENGTH,
    "over full-recompute": number("full-recompute", ".3f"),
    "quartiles": lambda row: "{:.3f} to {:.3f}".format(*row["quartiles"]),
    "over full recompute in MEMO's paper": number("paper", ".2f"),
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
    "in half of the ideal's memory": lambda row: "-" if row["way"] in IDEALS else row["mark"] or "fits",
    "host MiB": mib("host_bytes"),
    "copies hidden": number("hidden_share", ".3f"),
    "step foreseen, s": foreseen("step_s", ".3f"),
    "copies hidden, foreseen": foreseen("hidden_share", ".3f"),
}

TABLES = [
    Table(
        FILE,
        "memo's speed over each other way",
        _OVER_OTHERS,
        where=_half_of_node,
        of=of_length,
        text="The column of MEMO's paper is from its table 4: the speed of MEMO over full recomputation with planned "
        "memory, for the 7B model on 8 A800s at the length that the row stands for. 1M tokens do not fit there.",
    ),
    Table(FILE, "Every way at every length", _EVERY_WAY, where=_half_of_node, of=in_order),
    Table(
        FILE,
        "With an H100's link: memo's speed over each other way",
        {head: cell for head, cell in _OVER_OTHERS.items() if "MEMO's paper" not in head},
        where=_half_of_others,
        of=of_length,
        text="An H100 has 40 TFLOP/s for each GB/s of link, and an A800 has 29, so fewer copies overlap with compute.",
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
        text="The limits of device and host memory are in the proportion of 80 GB to an eighth of 2 TB. memo runs "
        "whole layers. If they do not fit, memo-swept replaces them: layers swept along the sequence, with alpha 0.",
    ),
    Table(
        FILE,
        "Largest errors of the foreseen values over all lengths",
        {
            "way": text("way"),
            "runs": number("rows", "d"),
            "error of the step time": number("step", "+.1%"),
            "step times within 5 %": number("within", "d"),
            "error of device bytes": number("memory", "+.3%"),
            "error of the hidden share, points": number("hidden", "+.1f"),
            "oom foreseen rightly": text("marks"),
        },
        where=_half,
        of=errors,
        text="The foreseen values are those of the tables above: step time, device memory, and the share of the copies "
        "that is hidden behind compute.",
    ),
]


def draw() -> Path | None:
    """Draw the share of the ideal's speed by length, with quartiles of two ways; dashed ways do not always fit."""
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
    with pyplot.rc_context({"svg.hashsalt": "memo"}):  # equal rows give equal bytes
        figure.savefig(PICTURE, metadata={"Date": None}, bbox_inches="tight")
    pyplot.close(figure)
    return PICTURE
