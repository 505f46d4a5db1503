"""BENCHMARKS.md from the rows that were measured, and from nothing else.

    python benchmarks/report.py

Every table stands under the commands, device, versions and day of its rows. Where a size was not measured, the page
says so.
"""

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import rows
from scales import SCALES, Scale

from memo.units import GIB

PAGE = Path(__file__).parents[1] / "BENCHMARKS.md"
Row = dict[str, Any]
Cell = Callable[[Row], str]

HEAD = """# Benchmarks

Written by `make benchmark` from benchmarks/results/; nothing here was not measured. Both sides of every ratio ran in
one run of one script, each row in a fresh process. A step time is the middle of the measured steps, after a warm-up.

- MFU by two conventions: causal counts the half of the attention's scores that the mask leaves, full counts all.
  Neither counts what is computed again.
- GPU GiB: the peak in use by torch's allocator, and reserved by it, in the measured steps. A CPU has no such counter.
- Host GiB: activations in host memory, whoever moved them, and the peak of the whole process.
- Rows with a world (`tp=8`) are one rank of that job alone: its true shapes and memory, and collectives not executed.
"""

LEADS = {
    "full": "Full size, on CUDA.",
    "smoke": "Smoke size, on a CPU: tiny models that prove that the scripts run. No figure here says how fast or how "
    "far memo trains, and none is to be compared with a GPU's. MFU refers to the matrix product that each process "
    "timed when it started, which on a busy machine is any number.",
}


def gib(name: str) -> Cell:
    def cell(row: Row) -> str:
        if row.get(name) is None:
            return "-"
        value = row[name] / GIB
        return f"{value:.2f}" if value >= 0.1 or value == 0 else f"{value:.2g}"

    return cell


def number(name: str, form: str) -> Cell:
    return lambda row: "-" if row.get(name) is None else format(row[name], form)


def thousandth(name: str) -> Cell:
    return lambda row: "-" if row.get(name) is None else f"{1e3 * row[name]:.3f}"


def text(name: str) -> Cell:
    return lambda row: "-" if row.get(name) is None else str(row[name])


def both_ways(company: str) -> Cell:
    """Rates of both directions in some company."""

    def cell(row: Row) -> str:
        found = [row.get(f"{direction}_{company}_gb_per_s") for direction in ("offload", "prefetch")]
        return "-" if None in found else " / ".join(f"{rate:.1f}" for rate in found)

    return cell


def moved(row: Row) -> str:
    """Shares of the tokens that move, by group of tensors; `stays` where the plan found that nothing need move."""
    if row.get("moves") is None:
        return "-"
    if not row["moves"]:
        return "stays" if row.get("forecast") else "-"
    return ", ".join(f"{name} {share:.3g}" for name, share in row["forecast"]["shares"].items())


def status(row: Row) -> str:
    message = row.get("message")
    shown = row.get("status", "-") + (f": {message}" if message else "")
    return shown.replace("|", "/").replace("\n", " ")[:160]


_RUN: dict[str, Cell] = {
    "s": number("seq_length", ",d"),
    "way": text("way"),
    "status": status,
    "step, s": number("step_p50_s", ".3f"),
    "quickest - slowest": lambda row: (
        f"{row['step_p0_s']:.3f} - {row['step_p100_s']:.3f}" if "step_p0_s" in row else "-"
    ),
    "tokens/s": number("tgs", ",.0f"),
}
_MFU: dict[str, Cell] = {
    "MFU causal, %": number("mfu_causal_percent", ".1f"),
    "MFU full, %": number("mfu_full_percent", ".1f"),
}
_MEMORY: dict[str, Cell] = {
    "GPU GiB": gib("allocated_peak_bytes"),
    "reserved": gib("reserved_peak_bytes"),
    "host GiB, activations": gib("host_records_bytes"),
    "host GiB, process": gib("host_peak_bytes"),
}

TABLES: dict[str, tuple[str, dict[str, Cell]]] = {
    # file: (title, columns)
    "table3_end_to_end": (
        "End to end: one rank, by sequence length",
        {
            **_RUN,
            **_MFU,
            **_MEMORY,
            "moved": moved,
            "hidden": number("hidden_share", ".3f"),
            "of the ideal's speed": number("share_of_ideal_speed", ".3f"),
            "ideal": text("ideal_is"),
            "over full recompute": number("speed_over_full-recompute", ".2f"),
            "over layer-input offload": number("speed_over_layer-input-offload", ".2f"),
        },
    ),
    "table4_ablation": (
        "Ablation",
        {**_RUN, **_MFU, **_MEMORY, "moved": moved, "over full recompute": number("speed_over_full-recompute", ".2f")},
    ),
    "copies": (
        "Copies of one layer's record, GB/s: offload / prefetch",
        {
            "s": _RUN["s"],
            "alpha": number("alpha", "g"),
            "record, GiB": gib("record_bytes"),
            "status": status,
            "alone": both_ways("alone"),
            "both at once": both_ways("alone_both"),
            "under compute": both_ways("compute"),
            "both under compute": both_ways("compute_both"),
            "compute takes": number("compute_slowed_by_both", ".2f"),
        },
    ),
    "overlap": (
        "Overlap of copies and compute",
        {
            **{name: _RUN[name] for name in ("s", "way", "status", "step, s")},
            "alpha": number("alpha", "g"),
            "layers, s": number("layers_s", ".4f"),
            "copies, s": number("copies_s", ".4f"),
            "waiting, s": number("copy_wait_s", ".4f"),
            "hidden": number("hidden_share", ".3f"),
            "foreseen": lambda row: f"{row['forecast']['hidden_share']:.3f}" if row.get("forecast") else "-",
        },
    ),
    "reach": (
        "Reach: the longest sequence of a whole model",
        {"model": text("model"), "row": text("kind"), **_RUN, **_MEMORY},
    ),
    "allocator": (
        "Allocators",
        {
            "allocator": text("allocator"),
            **{name: _RUN[name] for name in ("s", "status", "step, s")},
            **_MEMORY,
            "reserved / in use": number("reserved_over_allocated", ".3f"),
            "device mallocs a step": number("device_mallocs_per_step", "g"),
            "arena": gib("planned_arena_bytes"),
            "planned peak": gib("planned_peak_bytes"),
            "fallbacks": text("fallbacks"),
        },
    ),
    "peers": (
        "Peers: whole model, one device",
        {**_RUN, **_MEMORY, "memo's speed over it": number("memo_speed_over_it", ".2f")},
    ),
    "kernels": (
        "Kernels: memo's on Triton, and how many times as long the others take",
        {
            "operation": text("op"),
            "on": text("shape"),
            "status": status,
            "forward, ms": thousandth("forward_s"),
            "GB/s": number("forward_gb_per_s", ",.0f"),
            "backward, ms": thousandth("backward_s"),
            "GB/s, backward": number("backward_gb_per_s", ",.0f"),
            **{
                f"{label}, {part}": number(f"{part}_over_{name}", ".2f")
                for name, label in (("torch", "torch"), ("compile", "torch.compile"), ("liger", "Liger"))
                for part in ("forward", "both")
            },
        },
    ),
    "offload_states": (
        "States in host memory: whole model, one device",
        {
            "model": text("model"),
            "row": text("kind"),
            **_RUN,
            **_MEMORY,
            "copies of states, s": number("state_copies_s", ".3f"),
            "waiting for them, s": number("state_wait_s", ".3f"),
            "CPU update, s": number("host_update_s", ".3f"),
            "memo's speed over it": number("memo_speed_over_it", ".2f"),
        },
    ),
    "convergence": (
        "Losses with and without swapping",
        {
            "run": text("run"),
            "dtype": text("dtype"),
            "s": number("seq_length", ",d"),
            "steps": lambda row: str(len(row["losses"])),
            "last loss": lambda row: f"{row['losses'][-1]:.6f}",
            "largest difference among alphas": number("max_difference_among_alphas", "g"),
            "from the plain model": number("max_difference_from_plain", "g"),
        },
    ),
}


def page() -> str:
    """The whole of BENCHMARKS.md."""
    parts = [HEAD]
    for scale in (SCALES["full"], SCALES["smoke"]):
        parts.append(f"## {scale.name.capitalize()}\n\n{_section(scale)}")
    return "\n".join(parts)


def write() -> Path:
    PAGE.write_text(page(), encoding="utf-8")
    return PAGE


def _section(scale: Scale) -> str:
    found = {name: rows.read(f"{scale.name}/{name}") for name in TABLES}
    missing = [name for name, lines in found.items() if not lines]
    parts = [LEADS[scale.name]]
    if missing:
        what = "Not measured." if len(missing) == len(TABLES) else f"Not measured: {', '.join(missing)}."
        parts.append(what)
    parts += [_table(name, lines) for name, lines in found.items() if lines]
    return "\n\n".join(parts) + "\n"


def _table(name: str, lines: Sequence[Row]) -> str:
    """Columns in which every cell is empty are left out."""
    title, columns = TABLES[name]
    cells = {head: [cell(line) for line in lines] for head, cell in columns.items()}
    shown = {head: column for head, column in cells.items() if any(cell != "-" for cell in column)}
    body = [f"| {' | '.join(shown)} |", "|---" * len(shown) + "|"]
    body += [f"| {' | '.join(column[at] for column in shown.values())} |" for at in range(len(lines))]
    return f"### {title}\n\n{_origin(lines)}\n\n" + "\n".join(body)


def _origin(lines: Sequence[Row]) -> str:
    """What was run, on what, when."""
    facts = {name: sorted({str(line[name]) for line in lines if line.get(name) is not None}) for name in _FACTS}
    told = "; ".join(f"{label} {', '.join(facts[name])}" for name, label in _FACTS.items() if facts[name])
    clocks = [line["clocks_after_steps"]["sm_clock_mhz"] for line in lines if line.get("clocks_after_steps")]
    seen = f"; SM clock after the steps {min(clocks)} to {max(clocks)} MHz" if clocks else ""
    commands = sorted({line["command"] for line in lines})
    return "\n".join(f"`{command}`" for command in commands) + f"\n{told}{seen}"


_FACTS = {
    "model": "model",
    "layers": "layers",
    "simulated_world": "one rank of",
    "device": "on",
    "driver": "driver",
    "torch": "torch",
    "cuda": "CUDA",
    "python": "Python",
    "commit": "commit",
    "date": "on",
}
"""Labels of what rows share."""


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    print(f"wrote {write()}")


if __name__ == "__main__":
    main()
