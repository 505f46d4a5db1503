"""The table of attention kernels as a file, its classes of length, its sums, and its place in the cache."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from memo.artifacts import artifact
from memo.artifacts.attention_table import LONGEST_TOKENS, AttentionCase, AttentionRow, AttentionTable, length_class
from memo.artifacts.profile_cache import attention_table_file, read_attention_table
from memo.errors import ArtifactError

CASE = AttentionCase(128, "bf16", causal=True, packed=False, tokens=4096)
FULL = dataclasses.replace(CASE, causal=False)
ROW = AttentionRow(
    CASE, 8, 2, 1, "2026-01-31T12:00:00+01:00", {"cudnn": 0.1 + 0.2, "flash": 0.5}, {"te": "it is not installed"}
)
TABLE = AttentionTable("a GPU", "2.13.0", "0.1.0", (ROW, dataclasses.replace(ROW, case=FULL, seconds={"flash": 0.25})))


def test_a_file_gives_back_every_bit(tmp_path: Path) -> None:
    TABLE.save(tmp_path / "new" / "table.json")
    assert AttentionTable.load(tmp_path / "new" / "table.json") == TABLE


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"seconds": {"cudnn": 0}}, r"rows\[0\].seconds\['cudnn'\] is 0: give a number above 0, or "),
    ({"measured_at": "yesterday"}, "measured_at is 'yesterday': give a string with a date"),
    ({"colour": "red"}, "has a field 'colour', which is not known"),
]


@pytest.mark.parametrize(("change", "message"), WRONG)
def test_anything_else_is_refused(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    path = tmp_path / "table.json"
    body = json.loads(json.dumps(dataclasses.asdict(TABLE)))
    body["rows"][0] |= change
    artifact.write(path, "attention_table", 1, body)
    with pytest.raises(ArtifactError, match=f"{message}.*delete it, and run `memo profile --attention` again"):
        AttentionTable.load(path)


def test_classes_of_length() -> None:
    assert [length_class(n) for n in (1, 2, 3, 4095, 4096, 5000)] == [1, 2, 2, 2048, 4096, 4096]
    assert length_class(LONGEST_TOKENS) == length_class(1 << 20) == LONGEST_TOKENS == 32768


def test_totals_are_of_what_was_measured_in_every_case() -> None:
    assert TABLE.totals({CASE: 1.0}) == {"cudnn": 0.1 + 0.2, "flash": 0.5}
    assert list(TABLE.totals({CASE: 1.0})) == ["cudnn", "flash"]  # the quickest first
    assert TABLE.totals({CASE: 1.0, FULL: 2.0}) == {"flash": 1.0}
    assert TABLE.totals({dataclasses.replace(CASE, packed=True): 1.0}) == TABLE.totals({}) == {}


def test_a_case_that_is_measured_again_takes_the_place_of_the_old() -> None:
    again = dataclasses.replace(ROW, seconds={"cudnn": 9.0})
    updated = TABLE.updated((again,))
    assert updated.row(CASE) == again and updated.row(FULL) == TABLE.row(FULL) and len(updated.rows) == 2


def test_each_device_and_version_has_its_own_file(tmp_path: Path) -> None:
    empty = AttentionTable("a GPU", "2.13.0", "0.1.0")
    path = attention_table_file(str(tmp_path), empty)
    assert path is not None and read_attention_table(path, empty) == empty
    TABLE.save(path)
    assert read_attention_table(path, empty) == TABLE
    others = [dataclasses.replace(empty, **change) for change in ({"device": "x"}, {"torch": "2.14.0"}, {"memo": "1"})]
    assert len({path, *(attention_table_file(str(tmp_path), other) for other in others)}) == 4
    for other in others:
        with pytest.raises(ArtifactError, match="table of another device or version: delete it"):
            read_attention_table(path, other)
    assert attention_table_file("off", empty) is None
