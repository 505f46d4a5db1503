"""`memo report`: draws training runs and memory plans."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from memo.artifacts.memory_plan import MemoryPlan
from memo.artifacts.run_log import RunLog
from memo.config.command_line import parse_options
from memo.config.flag import Flag
from memo.config.require import require
from memo.report.addresses import draw_addresses
from memo.report.run_page import write_report

ABOUT = (
    "Draw training runs (loss, speed, memory, overlap of copies, plan against measured) as one page of HTML with its "
    "pictures, or a memory plan as one drawing. Needs matplotlib (pip install 'memo-train[report]')."
)

EXAMPLES = ("memo report runs/a runs/b --out compared", "memo report --memory plan.json --out plan.svg")


@dataclass(frozen=True)
class _Options:
    runs: Annotated[tuple[str, ...], Flag(metavar="RUN ...", is_positional=True)] = ()
    """The --save directory of a run, or the file of its --log-jsonl; several runs share their curves."""
    memory: str | None = None
    """Instead of runs: file of `memo solve --out`; its blocks are drawn by time and address."""
    out: str | None = None
    """For runs a folder for index.html and the pictures; default: report, next to the first log. For --memory the
    drawing, .svg, .png or .pdf; default: the plan's name with .svg."""


def main(argv: Sequence[str]) -> None:
    """Raises MemoError for a file that is no log or plan, or if matplotlib is missing."""
    options = parse_options(_Options, argv, prog="memo report", about=ABOUT, examples=EXAMPLES)
    require(
        bool(options.runs) != (options.memory is not None),
        f"memo report got runs {' '.join(options.runs) or None} and --memory {options.memory}, but draws one or the "
        "other: give the directories of runs, or --memory FILE",
    )
    if options.memory is not None:
        target = options.out or str(Path(options.memory).with_suffix(".svg"))
        draw_addresses(MemoryPlan.load(options.memory), target, Path(options.memory).stem)
        print(f"drawn to {target}")
        return
    logs = [RunLog.load(path) for path in options.runs]
    runs = dict(zip(_names(options.runs), logs, strict=True))
    page, *pictures = write_report(runs, options.out or logs[0].path.parent / "report")
    print(f"written: {page}, with {len(pictures)} pictures")


def _names(paths: Sequence[str]) -> list[str]:
    """A name for each run: the last part of its path, or the whole path if the last parts are not unique."""
    whole = [str(Path(path)) for path in paths]
    require(len(set(whole)) == len(whole), f"memo report got {' '.join(paths)}, one of them twice: leave it out")
    short = [Path(path).stem if Path(path).is_file() else Path(path).resolve().name for path in paths]
    return short if len(set(short)) == len(short) else whole
