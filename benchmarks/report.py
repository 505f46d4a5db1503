"""BENCHMARKS.md from the rows that were measured, and from nothing else; and the figures of other pages.

    python benchmarks/report.py

Its sections are classes of evidence. Every table stands under the commands, device, versions and day of its rows. Rows
of smoke size, which prove that scripts run, are not on the page. The figures of the README and the guide come from the
same rows (page_figures.py).
"""

import argparse
from pathlib import Path

import page_figures
import page_scaled
from page_foreseen import FORESEEN
from page_gpu import ON_GPU
from page_measured import EMULATED, ON_CPU
from page_tables import Table

PAGE = Path(__file__).parents[1] / "BENCHMARKS.md"

HEAD = """# Benchmarks

Written by benchmarks/report.py from benchmarks/results/; nothing here was not run. Each section is one class of
evidence, and no figure of one stands for another:

- [measured on the scaled node](#measured-on-the-scaled-node): program, steps, times and memory are real; in place of a
  GPU is a CPU core with a slow link, in a GPU's proportions
- [measured on a CPU](#measured-on-a-cpu): program, bytes, bits and files are real; no time there tells of a GPU's
- [on the emulated GPU](#on-the-emulated-gpu): the CUDA program and the allocators are real, at full size; times are
  modelled
- [foreseen](#foreseen): arithmetic on a configuration
- [measured on a GPU](#measured-on-a-gpu)
"""

_GPU_LEAD = """Full size, on CUDA, by `make gpu`.

- MFU by two conventions: causal counts the half of the attention's scores that the mask leaves, full counts all.
  Neither counts what is computed again.
- GPU GiB: the peak in use by torch's allocator, and reserved by it, in the measured steps.
- Host GiB: activations in host memory, whoever moved them, and the peak of the whole process.
- Rows with a world (`tp=8`) are one rank of that job alone: its true shapes and memory, collectives not executed."""

SECTIONS: dict[str, tuple[str, list[Table]]] = {
    # title: (what a reader should know, tables)
    "Measured on the scaled node": (page_scaled.LEAD, page_scaled.TABLES),
    "Measured on a CPU": ("Small models, real ranks over gloo.", ON_CPU),
    "On the emulated GPU": (
        "memo's CUDA program and a CUDA build of torch on libraries that stand in for the driver "
        "(csrc/emulated_gpu/README.md): every allocation, stream and event is real, at full size.",
        EMULATED,
    ),
    "Foreseen": ("By memo.simulate and the account of memory, without running anything.", FORESEEN),
    "Measured on a GPU": (_GPU_LEAD, ON_GPU),
}


def page() -> str:
    """The whole of BENCHMARKS.md."""
    return "\n".join([HEAD, *(_section(title, *found) for title, found in SECTIONS.items())])


def write() -> list[Path]:
    """Write BENCHMARKS.md, its picture, and the figures of the other pages; the pages that were written."""
    page_scaled.draw()
    PAGE.write_text(page(), encoding="utf-8")
    return [PAGE, *page_figures.write()]


def _section(title: str, lead: str, tables: list[Table]) -> str:
    shown = {table.title: table.render() for table in tables}
    missing = [name for name, found in shown.items() if not found]
    parts = [f"## {title}", lead]
    if title == "Measured on the scaled node" and shown["Every way at every length"]:
        parts.append("![Share of the ideal's speed by length](docs/images/scaled_node.svg)")
    if missing:
        parts.append("Not measured." if len(missing) == len(tables) else f"Not measured: {', '.join(missing)}.")
    parts += [found for found in shown.values() if found]
    return "\n\n".join(parts) + "\n"


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    for path in write():
        print(f"wrote {path}")


if __name__ == "__main__":
    main()
