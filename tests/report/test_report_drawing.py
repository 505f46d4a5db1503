"""Drawings: formats, and what is said when they cannot be made."""

import sys
from pathlib import Path

import pytest

from memo.errors import ArtifactError, ConfigError
from memo.report.drawing import check_suffix, panels, save_figure


def draw(path: Path) -> None:
    figure, _ = panels(path, 3.0, 2.0)
    save_figure(figure, path)


@pytest.mark.parametrize(("suffix", "magic"), [(".png", b"\x89PNG"), (".pdf", b"%PDF"), (".svg", b"<?xml")])
def test_formats_and_folders_that_do_not_exist_yet(suffix: str, magic: bytes, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "new" / f"a{suffix}"
    draw(path)
    assert path.read_bytes().startswith(magic)


def test_an_unknown_format() -> None:
    with pytest.raises(ConfigError, match=r"swaps\.gif, but its suffix must be one of \.svg, \.png, \.pdf"):
        check_suffix("swaps.gif")


def test_without_matplotlib(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("matplotlib", "matplotlib.figure"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ConfigError, match=r"a\.svg needs the package matplotlib.*pip install 'memo-train\[report\]'"):
        draw(tmp_path / "a.svg")


def test_a_path_that_cannot_be_written(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    (tmp_path / "file").write_text("")
    with pytest.raises(ArtifactError, match=r"file/a\.svg could not be written .*: check the path"):
        draw(tmp_path / "file" / "a.svg")
