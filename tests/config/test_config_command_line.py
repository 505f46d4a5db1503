"""What every command line has in common: how words become values, and one message about each that does not.

tests/cli/refusals.txt has the words that users of memo mistake.
"""

import dataclasses
from dataclasses import dataclass
from typing import Annotated, Literal

import pytest

from memo.config.command_line import parse_options, read_values
from memo.config.flag import BYTES, COUNT, TOKENS, Flag
from memo.config.flag_table import CommandLine, FlagGroup, entries_of, texts_of
from memo.config.flags import EVERYONE_NEEDS
from memo.config.other_names import OTHER_NAMES, advice, filled
from memo.config.run import RunConfig, section_of
from memo.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Options:
    """Do something. For a test."""

    out: str
    """File to write; iter_... in it. The rest is not shown."""
    length: Annotated[int, TOKENS, Flag(aliases=("len",))] = 1024
    """Tokens."""
    steps: Annotated[int | None, COUNT] = None
    room: Annotated[int | None, BYTES] = None
    size: int = 4
    rate: float = 0.5
    mode: Literal["fast", "slow"] = "fast"
    share: Literal["off", "auto"] | float = "auto"
    packing: bool = True
    files: tuple[str, ...] = ()


@dataclass(frozen=True)
class Paths:
    paths: Annotated[tuple[str, ...], Flag(metavar="IN... OUT", is_positional=True)]
    """Files."""
    key: str = "text"


def read(text: str) -> Options:
    return parse_options(Options, ["--out", "x", *text.split()], prog="memo test")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", {}),
        ("--length 512K --len=1M", {"length": 1 << 20}),
        ("--length 1_000", {"length": 1000}),
        ("--len 1.5k", {"length": 1536}),
        ("--steps 2K", {"steps": 2000}),
        ("--steps 1.5B", {"steps": 1_500_000_000}),
        ("--steps None", {"steps": None}),
        ("--room 64KiB", {"room": 65536}),
        ("--room 1G", {"room": 1 << 30}),
        ("--rate -1e-3", {"rate": -1e-3}),
        ("--size=-3", {"size": -3}),
        ("--mode slow --share 0.25", {"mode": "slow", "share": 0.25}),
        ("--share off", {"share": "off"}),
        ("--no-packing", {"packing": False}),
        ("--no_packing --packing", {"packing": True}),
        ("--files a b --size 1", {"files": ("a", "b"), "size": 1}),
    ],
)
def test_words_become_values(text: str, expected: dict[str, object]) -> None:
    assert read(text) == dataclasses.replace(Options(out="x"), **expected)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("--length 12Q", "--length is '12Q': give a whole number of tokens, such as 131072 or 128K (1K is 1,024)"),
        ("--len 0.3K", "--len is '0.3K': give a whole number of tokens"),
        ("--steps 1KiB", "--steps is '1KiB': give a whole number, such as 2000 or 2K (1K is 1,000)"),
        ("--room 64KB", "--room is '64KB': give a whole number of bytes, such as 65536 or 64KiB"),
        ("--size 4.0", "--size is '4.0': give a whole number, such as the default 4"),
        ("--rate fast", "--rate is 'fast': give a number, such as the default 0.5"),
        ("--rate --size 3", "--rate is given without a value: give a number"),
        ("--size \udcff", "'\\udcff' is not text in UTF-8: rename the file, or write the text in UTF-8"),
        ("--size " + "9" * 20, "--size is '99999999999999999999': give a whole number"),
        ("--packing=no", "--packing is given the value 'no', but it is a switch: write --packing for on, --no-packing"),
        ("--no-size", "there is no flag --no-size: did you mean --size?"),
        ("--zzz 3", "there is no flag --zzz: see `memo test --help`"),
    ],
)
def test_what_is_refused(text: str, says: str) -> None:
    with pytest.raises(ConfigError) as refused:
        read(text)
    assert str(refused.value).startswith(says) and "\n" not in str(refused.value)


def test_what_is_missing_is_named_with_what_it_is() -> None:
    with pytest.raises(
        ConfigError, match=r"^memo test: --out is not given: give it \(file to write; iter_... in it\)$"
    ):
        parse_options(Options, [], prog="memo test")
    with pytest.raises(ConfigError, match=r"^memo test: IN... OUT is not given: give it \(files\)$"):
        parse_options(Paths, ["--key", "a"], prog="memo test")


def test_words_that_stand_alone() -> None:
    assert parse_options(Paths, ["a", "--key", "k", "b"], prog="memo test") == Paths(("a", "b"), "k")


def test_help_explains_all_of_few_flags_and_of_many_those_that_are_first(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        parse_options(Options, ["--size", "x", "-h"], prog="memo test", examples=("memo test --out a",))
    assert stopped.value.code == 0
    shown = capsys.readouterr().out
    assert "usage: memo test [--FLAG VALUE ...]\n\nDo something. For a test.\n\nexamples:\n  memo test --out a" in shown
    assert "  --length, --len TOKENS\n      Tokens. (default: 1024)\n" in shown and "  --out TEXT" in shown
    assert "--packing, --no-packing\n      (default: on)" in shown and "--files TEXT ..." in shown


def test_notes_come_before_nearest_names() -> None:
    line = CommandLine("memo test", "", (FlagGroup(Options),), notes={"sizes": "give --size VALUE"})
    with pytest.raises(ConfigError, match="there is no flag --sizes: give --size 3"):
        read_values(line, ["--sizes", "3"])


def test_no_two_fields_of_a_run_have_one_flag() -> None:
    groups = [section.default_factory for section in dataclasses.fields(RunConfig)]
    flags = [flag for kind in groups for entry in entries_of(kind) for flag in entry.flags]  # type: ignore[arg-type]
    assert len(flags) == len(set(flags)) > 100


def test_every_flag_of_a_run_says_what_it_does() -> None:
    for section in dataclasses.fields(RunConfig):
        texts = texts_of(section.default_factory)  # type: ignore[arg-type]
        assert all(len(texts[entry.field]) > 5 for entry in entries_of(section.default_factory))  # type: ignore[arg-type]


def test_names_of_other_trainers_lead_to_fields_that_memo_has_and_are_none_themselves() -> None:
    known: list[str] = []
    for text in OTHER_NAMES.values():
        filled(text, lambda field: known.append(field) or field)  # type: ignore[func-returns-value]
    for field in {*known, *EVERYONE_NEEDS} - {"model"}:
        assert section_of(field, "test"), field
    for name in OTHER_NAMES:
        with pytest.raises(ConfigError, match="there is no field"):
            section_of(name, "test")


def test_advice_speaks_of_another_command_where_this_one_has_no_such_flag() -> None:
    assert advice("learning_rate", {"lr"}, str) == "memo calls it lr: the peak learning rate"
    assert advice("learning_rate", {"gpus"}, str, "memo plan").startswith("memo plan does not need it; for memo train,")
    assert advice("gradient_clipping_of_nobody", {"lr"}, str) == ""
