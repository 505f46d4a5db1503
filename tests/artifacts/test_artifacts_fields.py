"""Values of files against dataclasses: what fits is kept, what does not is named with field, value and remedy."""

from dataclasses import dataclass, field
from typing import Any, Literal

import pytest

from memo.artifacts.fields import AnyFloat, Count, FileName, PositiveFloat, Time, build, checked
from memo.artifacts.reading import Source, shown
from memo.errors import CheckpointError

SOURCE = Source("a.json", CheckpointError, "write it again")


@dataclass(frozen=True)
class Inner:
    size: Count
    at: Time = "2026-01-31"


@dataclass(frozen=True)
class Outer:
    name: str
    whole: int = 0
    share: float = 0.5
    loss: AnyFloat = 0.0
    seconds: dict[str, PositiveFloat] = field(default_factory=dict)
    switch: bool = False
    kind: Literal["a", "b", 1] = "a"
    maybe: int | None = None
    inner: Inner | None = None
    rows: tuple[Inner, ...] = ()
    pair: tuple[int, str] = (0, "")
    free: dict[str, Any] = field(default_factory=dict)
    either: int | str = 0
    names: list[str] = field(default_factory=list)
    file: FileName = "a.bin"


def test_what_fits_is_kept():
    found = {
        "name": "n",
        "share": 1,
        "loss": float("nan"),
        "seconds": {"x": 2},
        "kind": 1,
        "inner": {"size": 3},
        "rows": [{"size": 1}, {"size": 2, "at": "2026-01-31T12:00:00+01:00"}],
        "pair": [1, "x"],
        "free": {"anything": [{}]},
        "either": "text",
        "names": ["a"],
    }
    kept = build(Outer, found, SOURCE)
    assert kept.loss != kept.loss
    assert (kept.share, type(kept.share), type(kept.seconds["x"])) == (1.0, float, float)
    assert (kept.inner, kept.rows[0], kept.pair) == (Inner(3), Inner(1), (1, "x"))
    assert (kept.kind, kept.either, kept.names, kept.free) == (1, "text", ["a"], {"anything": [{}]})


@pytest.mark.parametrize(
    ("found", "problem"),
    [
        ({"whole": "no"}, "whole is 'no' (a string): give a whole number"),
        ({"whole": True}, "whole is True (a boolean): give a whole number"),
        ({"whole": 1.0}, "whole is 1.0 (a number): give a whole number"),
        ({"whole": 1 << 63}, "whole is 9223372036854775808 (a whole number of more than 64 bits): give a whole number"),
        ({"whole": 10**300}, "whole is a whole number of 997 bits"),
        ({"whole": None}, "whole is None (null): give a whole number"),
        ({"share": False}, "share is False (a boolean): give a number"),
        ({"share": float("nan")}, "share is nan (a number that is not finite): give a number"),
        ({"share": 10**400}, "share is a whole number of 1329 bits"),
        ({"loss": "nan"}, "loss is 'nan' (a string): give a number"),
        ({"seconds": {"x": 0}}, "seconds['x'] is 0: give a number above 0"),
        ({"seconds": [1]}, "seconds is a list of 1: give an object"),
        ({"switch": "no"}, "switch is 'no' (a string): give true or false"),
        ({"switch": 1}, "switch is 1 (a whole number): give true or false"),
        ({"kind": "c"}, """kind is 'c' (a string): give one of "a", "b", "1\""""),
        ({"kind": True}, "kind is True (a boolean)"),
        ({"kind": {}}, "kind is {} (an object)"),
        ({"maybe": "x"}, "maybe is 'x' (a string): give a whole number"),
        ({"inner": {"size": -1}}, "inner.size is -1: give a whole number of 0 or more"),
        ({"inner": {"size": 1, "at": "soon"}}, "inner.at is 'soon': give a string with a date and time"),
        ({"inner": {"size": 1, "more": 2}}, "inner has a field 'more', which is not known: write it again"),
        ({"inner": {}}, "inner has no field size: write it again"),
        ({"inner": [1]}, "inner holds a list, not an object: write it again"),
        ({"rows": [{"size": 1}, {"size": "x"}]}, "rows[1].size is 'x' (a string)"),
        ({"pair": [1]}, "pair is a list of 1: give a list of 2"),
        ({"pair": [1, 2]}, "pair[1] is 2 (a whole number): give a string"),
        ({"either": 1.5}, "either is 1.5 (a number): give a whole number or a string"),
        ({"names": "a"}, "names is 'a' (a string): give a list"),
        *(
            ({"file": name}, f"file is {shown(name)}: give a string that names a file beside it, or ")
            for name in ("", "..", "/etc/passwd", "../a", "a/", "a\0b", "\ud800", "x" * 256)
        ),
        ({"x" * 1000: 1}, f"has a field '{'x' * 80}'..., which is not known"),
    ],
)
def test_what_does_not_fit_is_named(found, problem):
    with pytest.raises(CheckpointError) as caught:
        build(Outer, {"name": "n", **found}, SOURCE)
    assert str(caught.value).startswith(f"a.json: {problem}")
    assert str(caught.value).endswith("write it again")


def test_the_whole_must_be_an_object_with_its_fields():
    for found, problem in (([], "holds a list, not an object"), ({}, "has no field name")):
        with pytest.raises(CheckpointError, match=f"^a.json: {problem}: write it again$"):
            build(Outer, found, SOURCE)
    assert build(Inner, {"size": 1, "later": 2}, SOURCE, ignore_unknown=True) == Inner(1)


def test_one_value_by_its_type():
    assert checked(tuple[int, ...], [1, 2], "ids", SOURCE) == (1, 2)
    with pytest.raises(CheckpointError, match=r"^a.json: ids\[1\] is 'x' \(a string\): give a whole number, or write"):
        checked(tuple[int, ...], [1, "x"], "ids", SOURCE)
