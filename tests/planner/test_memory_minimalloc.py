"""minimalloc's CSV: columns in any order, one message for what is no problem, offsets added."""

from pathlib import Path

import pytest

from memo.errors import ArtifactError
from memo.planner.memory.dsa import Block, Problem, Solution
from memo.planner.memory.minimalloc import read_csv, write_csv


def test_columns_in_any_order(tmp_path: Path) -> None:
    path = tmp_path / "in.csv"
    path.write_text("size,id,upper,lower\n4,b1,3,0\n\n5,7,9,3\n")
    assert read_csv(path, 10) == Problem((Block("b1", 0, 3, 4), Block("7", 3, 9, 5)), capacity_bytes=10)


def test_solution_is_read_back_without_its_offsets(tmp_path: Path) -> None:
    problem = Problem((Block("x", 0, 3, 4), Block("a,b", 1, 9, 5)))
    write_csv(tmp_path / "out.csv", problem, Solution({"x": 5, "a,b": 0}, 9, 9, "optimal", "hand"))
    assert (tmp_path / "out.csv").read_text() == 'id,lower,upper,size,offset\nx,0,3,4,5\n"a,b",1,9,5,0\n'


def test_files_that_cannot_be_read_or_written(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match=r"none\.csv: the file does not exist"):
        read_csv(tmp_path / "none.csv")
    (tmp_path / "image.csv").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ArtifactError, match="is not text in UTF-8"):
        read_csv(tmp_path / "image.csv")
    with pytest.raises(ArtifactError, match=r"could not be written .*: check the path"):
        write_csv(tmp_path, Problem(()), Solution({}, 0, 0, "optimal", "hand"))
