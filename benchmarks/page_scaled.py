"""Tables and the picture of the scaled node."""

import statistics
from operator import eq
from pathlib import Path

import rows
from page_tables import Cell, Row, Table, number, text
from scaled_steps import IDEALS, LEAST_MEMORY_WAYS, PLANNED_WAYS, SCALED_WAYS

PICTURE = Path(__file__).parents[1] / "docs" / "images" / "scaled_node.svg"
FILE = "scaled_node"

LEAD = """A node in small: one CPU core is the GPU, and copies to host memory are held to a rate at which a layer's
FLOPs and its activations stand to each other as on a node of A800s. What hides behind compute depends on these
proportions and on the sequence's length over the hidden size, 16 to 256 for 64K to 1M tokens with a hidden size of
4,096. The same program, plans and copies as on a GPU; real steps, real time. The ideal keeps everything on the device,
without a limit; all others are asked to fit in half of that, and one that asks for more is stopped as on a full GPU:
oom. Its layers are whole, and memo's are computed tile by tile, which a CPU likes at some lengths and not at others:
ideal-on-tiles has memo's layers, and a link without limit.

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
    return "-" if found is None or row["way"] == "ideal" else f"{found[0]:.3f} to {found[1]:.3f}"


def in_order(lines: list[Row]) -> list[Row]:
    return sorted(lines, key=lambda row: (-row["hidden_size"], row["length_over_hidden"]))


def of_length(lines: list[Row]) -> list[Row]:
    """Of each model and length: memo's speed over each other way, as the median over turns."""
    found: dict[tuple[int, int], dict[str, list[float]]] = {}
    for row in in_order(lines):
        found.setdefault((row["hidden_size"], row["length_over_hidden"]), {})[row["way"]] = row["steps_s"]
    return [
        {
            "hidden_size": hidden,
            "length_over_hidden": over,
            **{
                way: statistics.median(there / here for there, here in zip(steps_s, of["memo"], strict=True))
                for way, steps_s in of.items()
            },
        }
        for (hidden, over), of in found.items()
        if "memo" in of
    ]


def of_one_node(lines: list[Row]) -> list[Row]:
    """Of each length: every way's share of the ideal's speed, or how it ends."""
    found: dict[tuple[int, int], Row] = {}
    for row in in_order(lines):
        named = {name: row[name] for name in ("hidden_size", "length_over_hidden", "device_bytes", "host_limit_bytes")}
        cell = f"{row['share_of_ideal']:.3f}" if row["mark"] is None else row["mark"]
        found.setdefault((row["hidden_size"], row["length_over_hidden"]), named)[row["way"]] = cell
    return list(found.values())


def errors(lines: list[Row]) -> list[Row]:
    """Of each way: the largest error of what was foreseen, over all lengths."""
    found = []
    for way in dict.fromkeys(row["way"] for row in lines):
        own = [row for row in lines if row["way"] == way]
        step = [row["foreseen"]["step_s"] / row["step_s"] - 1 for row in own]
        told = [row for row in own if row["foreseen"]["device_peak_bytes"] is not None]
        marks = [row["mark"] is None for row in told]
        fits = [row["foreseen"]["device_peak_bytes"] <= row["device_bytes"] for row in told]
        memory = [row["foreseen"]["device_peak_bytes"] / row["device_peak_bytes"] - 1 for row in told]
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
                "memory": max(memory, key=abs) if memory else None,
                "hidden": 100 * max(shares, key=abs) if shares else None,
                "marks": f"{sum(map(eq, marks, fits))} of {len(told)}" if told else None,
            }
        )
    return found


_WAYS = [way for way in (*SCALED_WAYS, *PLANNED_WAYS) if way != "memo"]


def _half(row: Row) -> bool:
    """Whether the limit is half of what the ideal takes."""
    return not row["one_node"]


TABLES = [
    Table(
        FILE,
        "Every way at every length",
        {
            "h": number("hidden_size", "d"),
            "s / h": number("length_over_hidden", "d"),
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
        },
        where=_half,
        of=in_order,
    ),
    Table(
        FILE,
        "memo's speed over each other way",
        {
            "h": number("hidden_size", "d"),
            "s / h": number("length_over_hidden", "d"),
            **{way: number(way, ".3f") for way in _WAYS},
        },
        where=_half,
        of=of_length,
    ),
    Table(
        FILE,
        "One node for all lengths: share of the ideal's speed",
        {
            "h": number("hidden_size", "d"),
            "s / h": number("length_over_hidden", "d"),
            "device MiB": mib("device_bytes"),
            "host MiB": mib("host_limit_bytes"),
            **{way: text(way) for way in (*_WAYS, "memo", *LEAST_MEMORY_WAYS) if way not in IDEALS},
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
    """Share of the ideal's speed against length; ways that do not fit in half of its memory are dashed."""
    lines = [row for row in rows.read(FILE) if _half(row)]
    if not lines:
        return None
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7.5, 4.6))
    colors: dict[str, str] = {}
    for hidden in sorted({row["hidden_size"] for row in lines}, reverse=True):
        for way in dict.fromkeys(row["way"] for row in lines):
            own = [row for row in in_order(lines) if (row["way"], row["hidden_size"]) == (way, hidden)]
            if way == "ideal" or way in PLANNED_WAYS or not own:
                continue
            fits = way in IDEALS or all(row["mark"] is None for row in own)
            (drawn,) = axes.plot(
                [row["length_over_hidden"] for row in own],
                [100 * row["share_of_ideal"] for row in own],
                marker="s" if colors.get(way) else "o",
                color=colors.get(way),
                linewidth=2.5 if way == "memo" else 1.2,
                linestyle=":" if way in IDEALS else "-" if fits else "--",
                label=None if colors.get(way) else way + ("" if fits else " (does not fit)"),
            )
            colors[way] = drawn.get_color()
    over = sorted({row["length_over_hidden"] for row in lines})
    axes.set(xscale="log", xticks=over, xticklabels=[f"{count}\n{4 * count}K" for count in over])
    axes.minorticks_off()
    axes.set_xlabel("tokens over hidden size, and tokens where that is 4,096")
    axes.set_ylabel("speed, % of the ideal without a limit")
    sizes = sorted({row["hidden_size"] for row in lines}, reverse=True)
    marks = f"hidden size {sizes[0]}" + "".join(f", squares {size}" for size in sizes[1:])
    axes.set_title(f"Measured on the scaled node (CPU), in half of the ideal's memory; {marks}", fontsize=10)
    axes.axhline(100, color="0.6", linewidth=0.8)
    axes.grid(axis="y", color="0.9")
    axes.legend(fontsize=8, ncols=3, loc="upper center", bbox_to_anchor=(0.5, -0.26))
    figure.tight_layout()
    with pyplot.rc_context({"svg.hashsalt": "memo"}):  # the same picture of the same rows, byte by byte
        figure.savefig(PICTURE, metadata={"Date": None})
    pyplot.close(figure)
    return PICTURE
