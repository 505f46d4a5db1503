"""Problems and solutions as CSV, in the format of minimalloc (github.com/google/minimalloc).

Columns id, lower, upper, size, in any order; a block lives from lower until just before upper. A solution has the
same columns and offset. Other columns are refused: they could change the problem.
"""

import codecs
import csv
from pathlib import Path

from memo.artifacts.reading import listed, shown
from memo.artifacts.regular_file import replacing
from memo.errors import ArtifactError, PlanError
from memo.planner.memory.dsa import Block, Problem, Solution

_COLUMNS = ("id", "lower", "upper", "size")


def read_csv(path: str | Path, capacity_bytes: int | None = None) -> Problem:
    """Read a problem without alignment. Raises ArtifactError, naming file and line, for any other content."""
    try:
        with open(path, encoding="utf-8", newline="") as file:
            rows = csv.reader(file, strict=True)
            header = [name.strip() for name in next(rows, [])]
            if sorted(header) != sorted(_COLUMNS):
                raise ArtifactError(
                    f"{path} has the columns {listed(header) or 'none'}, but {', '.join(_COLUMNS)} are needed: "
                    "name them in its first line"
                )
            blocks = [_block(f"{path} line {rows.line_num}", header, row) for row in rows if row]
    except OSError as error:
        raise ArtifactError(f"{path}: {error.strerror}: give the path of a CSV file") from None
    except (UnicodeDecodeError, csv.Error) as error:
        raise ArtifactError(f"{path} is no CSV file ({error}): give one with {', '.join(_COLUMNS)}") from None
    try:
        return Problem(tuple(blocks), capacity_bytes)
    except PlanError as error:
        raise ArtifactError(f"{path}: {error}") from None


def write_csv(path: str | Path, problem: Problem, solution: Solution) -> None:
    """Write the blocks in the problem's order, each with its offset. Raises ArtifactError."""
    try:
        with replacing(path) as file:
            rows = csv.writer(codecs.getwriter("utf-8")(file), lineterminator="\n")
            rows.writerow((*_COLUMNS, "offset"))
            rows.writerows((*block, solution.offsets[block.id]) for block in problem.blocks)
    except OSError as error:
        raise ArtifactError(f"{path}: {error.strerror}: give a path that can be written") from None


def _block(where: str, header: list[str], row: list[str]) -> Block:
    if len(row) != len(header):
        raise ArtifactError(f"{where} has {len(row)} fields, but the first line names {len(header)}: complete it")
    fields = dict(zip(header, row, strict=True))
    numbers = []
    for name in ("lower", "upper", "size"):
        try:
            numbers.append(int(fields[name]))
        except ValueError:
            raise ArtifactError(f"{where}: {name} is {shown(fields[name])}, not a whole number: correct it") from None
    return Block(fields["id"], *numbers)
