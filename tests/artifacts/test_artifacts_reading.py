"""Files of strangers end in a value or in one message of the caller's error, whatever they hold."""

import io
import json
import os

import pytest

from memo.artifacts import reading
from memo.artifacts.reading import MAX_DEPTH, MAX_VALUES, Source, parse_json, read_json, read_json_object, read_toml
from memo.errors import DataError

SOURCE = Source("a.json", DataError, "download it again")


def _refused(content: bytes | str) -> str:
    with pytest.raises(DataError) as caught:
        parse_json(content, SOURCE)
    return str(caught.value)


def test_json_is_read():
    assert parse_json(b'\xef\xbb\xbf{"a": [1, 2.5, null, true], "a": [1, 2.5, null, true]}', SOURCE) == {
        "a": [1, 2.5, None, True]
    }
    assert parse_json('{"max": 1000000000000000019884624838656}', SOURCE) == {"max": 10**30 + 19884624838656}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "a.json: is not JSON (Expecting value: line 1 column 1 (char 0)): download it again"),
        (b"\xff{}", "a.json: is not text in UTF-8 (invalid start byte at byte 0): download it again"),
        ('{"a": 1, "b": 2, "a": 3}', "'a' stands twice in one object, as 1 and 3"),
        ("1" * 5000, "is not JSON (Exceeds the limit (4300 digits)"),
        ("[" * 100_000, f"a.json: is nested more than {MAX_DEPTH} deep: download it again"),
        ("[" * 100_000 + "]" * 100_000, f"is nested more than {MAX_DEPTH} deep"),
        ('{"a":' * 500 + "1" + "}" * 500, f"is nested more than {MAX_DEPTH} deep"),
        ("[" + "1," * MAX_VALUES + "1]", f"values, but {MAX_VALUES} is the most that is read"),
    ],
    ids=["empty", "no UTF-8", "twice", "digits", "open", "deep", "500", "many"],
)
def test_json_that_is_refused(content, message):
    assert message in _refused(content)


def test_a_reader_may_allow_another_number_of_values():
    assert parse_json("[1, 2, 3]", SOURCE, max_values=4) == [1, 2, 3]
    with pytest.raises(DataError, match="holds about 4 values, but 3 is the most that is read"):
        parse_json("[1, 2, 3]", SOURCE, max_values=3)


def test_depth_up_to_the_limit_is_read():
    assert parse_json("[" * MAX_DEPTH + "]" * MAX_DEPTH, SOURCE)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("a = " + "[" * 3000, "is nested more than"),
        ("[" + ".".join("a" * 10_000) + "]", "line 1 has more than 64 dots"),
        ("\n".join(f"[[{'.'.join('a' * n)}]]" for n in range(1, 63)), "is nested more than"),
        ("a = 1\na = 2", "is not valid TOML (Cannot overwrite a value"),
        ("a = " + "1" * 5000, "is not valid TOML (Exceeds the limit (4300 digits)"),
        ("a = 1\n" + "# " + "." * 300 + "\nb", "is not valid TOML"),
        ("# " + "x" * reading.MAX_TOML_BYTES, f"has more than {reading.MAX_TOML_BYTES} bytes"),
    ],
    ids=["deep", "dots", "arrays", "twice", "digits", "comment", "long"],
)
def test_toml_that_is_refused(tmp_path, content, message):
    path = tmp_path / "a.toml"
    path.write_text(content)
    with pytest.raises(DataError) as caught:
        read_toml(path, Source(str(path), DataError, "mend it"))
    assert message in str(caught.value) and str(caught.value).endswith(": mend it")


def test_files_that_cannot_be_read(tmp_path):
    def refused(path, read=read_json, **limits):
        with pytest.raises(DataError) as caught:
            read(path, SOURCE, **limits)
        return str(caught.value)

    assert refused(tmp_path / "none") == "a.json: the file does not exist: download it again"
    assert refused(tmp_path) == "a.json: cannot be read (it is a directory, not a regular file): download it again"
    assert "cannot be read" in refused(f"{tmp_path}/a\0b")
    assert "cannot be read (File name too long)" in refused(tmp_path / ("x" * 300))
    os.mkfifo(tmp_path / "pipe")
    assert "it is a named pipe, not a regular file" in refused(tmp_path / "pipe")
    path = tmp_path / "some.json"
    path.write_text("[1, 2]")
    assert refused(path, max_bytes=5) == "a.json: has more than 5 bytes, which is the most that is read: " + (
        "download it again"
    )
    assert refused(path, read_json_object) == "a.json: holds a list, not an object: download it again"
    assert read_json(path, SOURCE, max_bytes=6) == [1, 2]


def test_lines_have_a_limit_and_the_file_has_none():
    content = b"one\ntwo\nthree"
    assert list(reading.read_lines(io.BytesIO(content), SOURCE, max_bytes=5)) == [b"one\n", b"two\n", b"three"]
    with pytest.raises(DataError, match=r"a.json: line 3 has more than 4 bytes: split it"):
        list(reading.read_lines(io.BytesIO(content), SOURCE, max_bytes=4))


def test_values_are_never_long_in_messages():
    for value in (10**5000, "x" * 1000, [list(range(1000))] * 9, {"a": "x" * 1000}, 10**70):
        assert len(reading.shown(value)) < 100
    assert reading.shown(10**5000) == "a whole number of 16610 bits"
    assert json.loads(reading.shown(12)) == 12
