"""Write BENCHMARKS.md, and the figures of other pages, from the recorded rows alone.

    python benchmarks/report.py

The sections of the page are classes of evidence. Above every table stand the commands, the device, the versions and the
day of its rows. Rows of smoke size, which prove that scripts run, are not on the page. The figures of the README and
the guide come from the same rows (page_figures.py).
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

benchmarks/report.py writes this page from the rows in benchmarks/results/: every figure comes from a run of a script.
Each section is one class of evidence, and a figure of one class does not replace a figure of another class:

- [measured on the scaled node](#measured-on-the-scaled-node): program, steps, times and memory are real; a CPU core
  with a slow link replaces the GPU, in a GPU's proportions
- [measured on a CPU](#measured-on-a-cpu): program, bytes, bits and files are real; times say nothing about a GPU
- [on the emulated GPU](#on-the-emulated-gpu): the CUDA program and the allocators are real, at full size; times are
  modelled
- [foreseen](#foreseen): predicted from a configuration, without a run
- [measured on a GPU](#measured-on-a-gpu): program, times and memory are real, at full size

In the tables "tokens" is the length of a sequence, and 1K and 1M are 1,024 and 1,048,576 tokens.
"""

_GPU_LEAD = """Full size, on CUDA, by `make gpu`.

- MFU has two conventions: causal counts the half of the attention's scores that the mask leaves, full counts all
  scores. Neither counts recomputation.
- GPU GiB: peak in use by torch's allocator in the measured steps; reserved: peak that the allocator reserved.
- Host GiB: activations in host memory, and the peak of the whole process.
- Runs of "one rank of 8" or "one rank of tp=8" are a single rank of such a job: shapes and memory are those of the job,
  and collectives are not executed."""

SECTIONS: dict[str, tuple[str, list[Table]]] = {
    # title: (introduction, tables)
    "Measured on the scaled node": (page_scaled.LEAD, page_scaled.TABLES),
    "Measured on a CPU": ("Small models on a CPU; ranks are real and communicate over gloo.", ON_CPU),
    "On the emulated GPU": (
        "memo's CUDA program and a CUDA build of torch run on libraries that replace the driver "
        "(csrc/emulated_gpu/README.md). Every allocation, stream and event is real, at full size.",
        EMULATED,
    ),
    "Foreseen": ("memo.simulate and the account of memory predict these figures; nothing is run.", FORESEEN),
    "Measured on a GPU": (_GPU_LEAD, ON_GPU),
}


def page() -> str:
    """Return the text of BENCHMARKS.md."""
    return "\n".join([HEAD, *(_section(title, *found) for title, found in SECTIONS.items())])


def write() -> list[Path]:
    """Write BENCHMARKS.md, its picture, and the figures of the other pages; return the pages that were written."""
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
        parts.append("Not measured yet." if len(missing) == len(tables) else _not_measured(missing))
    parts += [found for found in shown.values() if found]
    return "\n\n".join(parts) + "\n"


def _not_measured(titles: list[str]) -> str:
    return "\n".join(["Tables that are not measured yet:", "", *(f"- {title}" for title in titles)])


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    for path in write():
        print(f"wrote {path}")


if __name__ == "__main__":
    main()
