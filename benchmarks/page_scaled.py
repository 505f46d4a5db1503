"""Tables and the picture of the scaled node."""

from pathlib import Path

import rows
from page_tables import Cell, Row, Table, number, text

PICTURE = Path(__file__).parents[1] / "docs" / "images" / "scaled_node.svg"
FILE = "scaled_node"

LEAD = """A node in small: one CPU core is the GPU, and copies to host memory are held to a rate at which a layer's
FLOPs and its activations stand to each other as on a node of A800s. What hides behind compute depends on these
proportions and on the sequence's length over the hidden size, 16 to 256 for 64K to 1M tokens with a hidden size of
4,096. The same program, plans and copies as on a GPU; real steps, real time. The ideal keeps everything on the device,
without a limit; all others are asked to fit in half of that. Its layers are whole, and memo's are computed tile by
tile, which a CPU's cache likes: so memo can be the quicker one here, without any promise for a GPU."""


def mib(name: str) -> Cell:
    return lambda row: "-" if row.get(name) is None else f"{row[name] / 2**20:.1f}"


def foreseen(name: str, form: str) -> Cell:
    def cell(row: Row) -> str:
        found = row["foreseen"].get(name)
        return "-" if found is None else format(found, form)

    return cell


def in_order(lines: list[Row]) -> list[Row]:
    return sorted(lines, key=lambda row: (-row["hidden_size"], row["length_over_hidden"]))


def of_length(lines: list[Row]) -> list[Row]:
    """Of each model and length: memo's speed over each other way."""
    found: dict[tuple[int, int], dict[str, float]] = {}
    for row in in_order(lines):
        found.setdefault((row["hidden_size"], row["length_over_hidden"]), {})[row["way"]] = row["step_s"]
    return [
        {"hidden_size": hidden, "length_over_hidden": over, **{way: own_s / of["memo"] for way, own_s in of.items()}}
        for (hidden, over), of in found.items()
        if "memo" in of
    ]


def errors(lines: list[Row]) -> list[Row]:
    """Of each way: the largest error of what was foreseen, over all lengths."""
    found = []
    for way in dict.fromkeys(row["way"] for row in lines):
        own = [row for row in lines if row["way"] == way]
        step = [row["foreseen"]["step_s"] / row["step_s"] - 1 for row in own]
        told = [row for row in own if row["foreseen"]["device_peak_bytes"] is not None]
        memory = [row["foreseen"]["device_peak_bytes"] / row["device_peak_bytes"] - 1 for row in told]
        shares = [
            row["foreseen"]["hidden_share"] - row["hidden_share"] for row in own if row["hidden_share"] is not None
        ]
        found.append(
            {
                "way": way,
                "rows": len(own),
                "step": max(step, key=abs),
                "within": sum(abs(error) <= 0.05 for error in step),
                "memory": max(memory, key=abs) if memory else None,
                "hidden": 100 * max(shares, key=abs) if shares else None,
                "marks": f"{sum(row['foreseen']['fits'] == row['fits'] for row in told)} of {len(told)}"
                if told
                else None,
            }
        )
    return found


_WAYS = ("ideal", "full-recompute", "selective-recompute", "layer-input-offload", "full-swap", "memo-paper")

TABLES = [
    Table(
        FILE,
        "Every way at every length",
        {
            "h": number("hidden_size", "d"),
            "s / h": number("length_over_hidden", "d"),
            "way": text("way"),
            "quickest step, s": number("step_s", ".3f"),
            "median step over it": number("median_over_quickest", ".3f"),
            "share of the ideal's speed": number("share_of_ideal", ".3f"),
            "device MiB": mib("device_peak_bytes"),
            "fits half": lambda row: "-" if row["way"] == "ideal" else "yes" if row["fits"] else "oom",
            "host MiB": mib("host_bytes"),
            "copies hidden": number("hidden_share", ".3f"),
            "step foreseen, s": foreseen("step_s", ".3f"),
            "hidden, foreseen": foreseen("hidden_share", ".3f"),
        },
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
        of=of_length,
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
        of=errors,
    ),
]


def draw() -> Path | None:
    """Share of the ideal's speed against length; ways that do not fit in half of its memory are dashed."""
    lines = rows.read(FILE)
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
            if way == "ideal" or not own:
                continue
            fits = all(row["fits"] for row in own)
            (drawn,) = axes.plot(
                [row["length_over_hidden"] for row in own],
                [100 * row["share_of_ideal"] for row in own],
                marker="s" if colors.get(way) else "o",
                color=colors.get(way),
                linewidth=2.5 if way == "memo" else 1.2,
                linestyle="-" if fits else "--",
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
