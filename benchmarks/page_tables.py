"""Tables of BENCHMARKS.md: cells from the fields of rows, and under each title the commands, device and day."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import rows

from memo.units import GIB

Row = dict[str, Any]
Cell = Callable[[Row], str]


@dataclass(frozen=True)
class Table:
    """A table of the rows of results/FILE.jsonl.

    Attributes:
        file: name of the file without its ending.
        columns: cells by heading. Columns in which every cell is empty are left out.
        where: returns whether a row belongs to the table.
        of: makes the rows that are shown from those of the file; default: shows each row.
        text: introduction above the table.
    """

    file: str
    title: str
    columns: dict[str, Cell]
    where: Callable[[Row], bool] = lambda row: True
    of: Callable[[list[Row]], list[Row]] = lambda lines: lines
    text: str = ""

    def render(self) -> str:
        """Return the table as Markdown; empty if nothing was measured."""
        lines = [row for row in rows.read(self.file) if self.where(row)]
        if not lines:
            return ""
        shown = self.of(lines)
        cells = {head: [cell(row) for row in shown] for head, cell in self.columns.items()}
        kept = {head: column for head, column in cells.items() if any(cell != "-" for cell in column)}
        body = [f"| {' | '.join(kept)} |", "|---" * len(kept) + "|"]
        body += [f"| {' | '.join(column[at] for column in kept.values())} |" for at in range(len(shown))]
        parts = [f"### {self.title}", self.text, _origin(lines), "\n".join(body)]
        return "\n\n".join(part for part in parts if part)


def markdown(heads: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """Return a table for a page that people write, whose figures benchmarks/page_figures.py inserts."""
    return "\n".join(f"| {' | '.join(line)} |" for line in (heads, ("---",) * len(heads), *lines))


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
    """Return a cell with the rates of both directions while `company` runs beside the copies."""

    def cell(row: Row) -> str:
        found = [row.get(f"{direction}_{company}_gb_per_s") for direction in ("offload", "prefetch")]
        return "-" if None in found else " / ".join(f"{rate:.1f}" for rate in found)

    return cell


def moved(row: Row) -> str:
    """Return the shares of the tokens that move, by group of tensors; `stays` if the plan moves nothing."""
    if row.get("moves") is None:
        return "-"
    if not row["moves"]:
        return "stays" if row.get("forecast") else "-"
    return ", ".join(f"{name} {share:.3g}" for name, share in row["forecast"]["shares"].items())


def status(row: Row) -> str:
    message = row.get("message")
    shown = row.get("status", "-") + (f": {message}" if message else "")
    return shown.replace("|", "/").replace("\n", " ")[:160]


def _origin(lines: Sequence[Row]) -> str:
    """Return the commands of rows, with the models, devices, versions and days."""
    facts = {name: sorted({str(line[name]) for line in lines if line.get(name) is not None}) for name in _FACTS}
    if any("emulated GPU" in line.get("evidence", "") for line in lines):
        facts["device"] = [f"an emulated {name}" for name in facts["device"]]
    told = "; ".join(f"{label} {', '.join(facts[name])}" for name, label in _FACTS.items() if facts[name])
    clocks = [line["clocks_after_steps"]["sm_clock_mhz"] for line in lines if line.get("clocks_after_steps")]
    seen = f"; SM clock after the steps {min(clocks)} to {max(clocks)} MHz" if clocks else ""
    commands = sorted({line["command"] for line in lines})
    listed = "\n".join(f"- `{command}`" for command in commands)
    if len(commands) == 1:
        return f"`{commands[0]}`\n{told}{seen}"
    return f"{told}{seen}\n\n<details><summary>{len(commands)} commands</summary>\n\n{listed}\n\n</details>"


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
"""Labels of the fields that `_origin` shows."""


def grouped(lines: list[Row], *names: str) -> dict[tuple[Any, ...], list[Row]]:
    """Return rows by the values of these fields, in the order in which they come."""
    found: dict[tuple[Any, ...], list[Row]] = {}
    for row in lines:
        found.setdefault(tuple(row.get(name) for name in names), []).append(row)
    return found


def is_kind(kind: str) -> Callable[[Row], bool]:
    return lambda row: row.get("kind") == kind
