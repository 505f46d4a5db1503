"""Command lines of the guide as the site shows them: whole on a screen of usual width, and the same commands."""

import importlib.util
import re
import shlex
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


@pytest.fixture(scope="module")
def site_pages() -> ModuleType:
    pytest.importorskip("mkdocs")
    spec = importlib.util.spec_from_file_location("site_pages", ROOT / "docs" / "site_pages.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def words(text: str) -> list[str]:
    return shlex.split(re.sub(r"^#.*$", "", text.replace("\\\n", " "), flags=re.MULTILINE), comments=True)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_commands_are_no_wider_than_a_page_and_say_the_same(page: Path, site_pages: ModuleType) -> None:
    for block in site_pages.BLOCK.findall(page.read_text()):
        for line in block.splitlines():
            if site_pages.COMMAND.match(line):
                shown = site_pages.wrapped(line)
                assert max(map(len, shown.splitlines())) <= site_pages.CODE_COLUMNS, shown
                assert words(shown.removesuffix("\\")) == words(line.removesuffix("\\"))


def test_a_long_command_breaks_before_flags(site_pages: ModuleType) -> None:
    flags = " ".join(f"--flag-{number} value" for number in range(8))
    shown = site_pages.wrapped(f'memo train {flags} --prompt "a b"  # what it does').splitlines()
    assert shown[0] == "# what it does" and shown[1].startswith("memo train --flag-0 value ") and len(shown) == 3
    assert all(line.endswith(" \\") for line in shown[1:-1]) and shown[2].startswith("    --flag-")
    assert site_pages.wrapped("x" * 200) == "x" * 200


def test_flags_in_sentences_are_marked(site_pages: ModuleType) -> None:
    html = "<p><code>--seq-len 128K</code>, <code>a--b</code></p><pre><code><span>--tp</span></code></pre>"
    marked = site_pages.on_page_content(html, None, None, None)
    assert marked == (
        '<p><code><span class="flag">--seq-len</span> 128K</code>, <code>a--b</code></p>'
        "<pre><code><span>--tp</span></code></pre>"
    )
