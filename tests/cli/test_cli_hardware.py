"""`memo hardware`: the table, one machine, and the file of one."""

from pathlib import Path

import pytest

from memo.cli import hardware
from memo.cli.main import main
from memo.estimate.hardware_files import HARDWARE, read_hardware
from memo.estimate.prices import PRICES

Capture = pytest.CaptureFixture[str]


def printed(argv: list[str], capsys: Capture) -> str:
    assert main(["hardware", *argv]) == 0
    return capsys.readouterr().out


def test_the_table_has_every_machine_and_the_known_prices(capsys: Capture) -> None:
    lines = printed([], capsys).splitlines()
    heads, rows = lines[0], lines[1 : 1 + len(HARDWARE)]
    assert heads.startswith("name ") and heads.endswith("$/GPU/h")
    assert [row.split()[0] for row in rows] == list(HARDWARE)
    by_name = {row.split()[0]: row for row in rows}
    assert by_name["h100-80"].endswith(
        "989.4  79.65  3350            25           450            8             2048     4.76"
    )
    assert by_name["a800-80"].split()[-1] == "2048", "it has no price"
    assert "--hardware mine.toml" in lines[-2] and "10 March 2026" in lines[-1]


@pytest.mark.parametrize("columns", [80, 120])
@pytest.mark.parametrize("argv", [[], ["h100-80"], ["rtx-pro-6000"]])
def test_tables_fit_the_terminal(
    argv: list[str], columns: int, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = printed(argv, capsys)
    monkeypatch.setattr(hardware, "terminal_columns", lambda: columns)
    fitted = printed(argv, capsys).split(f"\n\n{hardware._HOW}")[0]
    assert max(map(len, fitted.splitlines())) <= columns
    assert printed([*argv, "--wide"], capsys) == whole
    if not argv:
        assert "\nnot shown for want of room: GPU, as its driver reports it" in fitted and "$/GPU/h" in fitted


def test_prices_are_of_known_machines() -> None:
    assert PRICES.keys() <= HARDWARE.keys()


def test_one_machine_with_all_that_is_assumed_of_it(capsys: Capture) -> None:
    text = printed(["L40S"], capsys)
    assert "peak_tflops                     bf16 362.05, fp32 91.6, fp64 1.43125\n" in text
    assert "efficiency.source               assumed: " in text
    assert "price                           $1.40 a GPU and hour on demand (RunPod" in text and "$0.79 spot" in text
    assert "price                           none known\n" in printed(["gh200"], capsys)


@pytest.mark.parametrize("name", HARDWARE)
def test_the_file_of_a_machine_describes_it_again(name: str, tmp_path: Path, capsys: Capture) -> None:
    path = tmp_path / f"{name}.toml"
    path.write_text(printed([name, "--toml"], capsys))
    assert read_hardware(path) == HARDWARE[name]
