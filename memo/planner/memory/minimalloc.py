"""Problems and solutions as CSV, in the format of minimalloc (github.com/google/minimalloc).

Columns id, lower, upper, size, in any order; a block lives from lower until just before upper. A solution has the
same columns and offset. Other columns are refused: they could change the problem.
"""

import codecs
import csv
import itertools
import operator
from pathlib import Path

from memo.artifacts.reading import Source, listed, opened, read_table, shown
from memo.artifacts.regular_file import replacing
from memo.errors import ArtifactError, PlanError, writing
from memo.planner.memory.dsa import Block, Problem, Solution

_COLUMNS = ("id", "lower", "upper", "size")
MAX_BLOCKS = 1_000_000
"""Limit of a problem, three times the requests of a step of the largest models."""


def read_csv(path: str | Path, capacity_bytes: int | None = None) -> Problem:
    """Read a problem without alignment. Raises ArtifactError, naming file and line, for any other content."""
    source = Source(str(path), ArtifactError, f"give a CSV file with {', '.join(_COLUMNS)}")
    with opened(path, source) as file:
        rows = read_table(file, source, strict=True)
        header = [name.strip() for name in next(rows, (0, []))[1]]
        if sorted(header) != sorted(_COLUMNS):
            raise ArtifactError(
                f"{path} has the columns {listed(header) or 'none'}, but {', '.join(_COLUMNS)} are needed: "
                "name them in its first line"
            )
        filled = filter(operator.itemgetter(1), rows)  # no blank lines
        blocks = [_block(f"{path} line {number}", header, row) for number, row in itertools.islice(filled, MAX_BLOCKS)]
        if next(filled, None) is not None:
            raise source.refusal(f"has more than {MAX_BLOCKS} blocks, which is the most that is solved", "solve a part")
    try:
        return Problem(tuple(blocks), capacity_bytes)
    except PlanError as error:
        raise ArtifactError(f"{path}: {error}") from None


def write_csv(path: str | Path, problem: Problem, solution: Solution) -> None:
    """Write the blocks in the problem's order, each with its offset. Raises ArtifactError."""
    with writing(path, ArtifactError), replacing(path) as file:
        rows = csv.writer(codecs.getwriter("utf-8")(file), lineterminator="\n")
        rows.writerow((*_COLUMNS, "offset"))
        rows.writerows((*block, solution.offsets[block.id]) for block in problem.blocks)


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
