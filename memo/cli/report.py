"""`memo report`: drawings of what other commands wrote."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import tyro

from memo.artifacts.memory_plan import MemoryPlan
from memo.report.addresses import draw_addresses

ABOUT = "Draw what another command wrote; needs matplotlib (pip install 'memo-train[report]')."


@dataclass(frozen=True)
class _Options:
    memory: str
    """File of `memo solve --out`: its blocks are drawn as time against address."""
    out: str | None = None
    """The drawing, .svg, .png or .pdf; default: the plan's name with .svg."""


def main(argv: Sequence[str]) -> None:
    """Raises MemoError for a file that is no plan, or where matplotlib is missing."""
    options = tyro.cli(_Options, args=list(argv), prog="memo report", description=ABOUT)
    plan = MemoryPlan.load(options.memory)
    out = options.out or str(Path(options.memory).with_suffix(".svg"))
    draw_addresses(plan, out, Path(options.memory).stem)
    print(f"drawn to {out}")
