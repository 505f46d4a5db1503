"""The documentation as a site: built strictly, so that every link and anchor of a page leads somewhere in it too."""

import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

import memo

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.full


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    done = subprocess.run(command, check=False, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return folder


class _Page(HTMLParser):
    """What a page fetches, and the text of its first heading."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.fetched: list[str] = []
        self.feed(path.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        if tag in ("script", "img") and values.get("src"):
            self.fetched.append(str(values["src"]))
        elif tag == "link" and values.get("rel") in ("stylesheet", "icon"):
            self.fetched.append(str(values["href"]))


def test_every_page_is_there_and_fetches_nothing_from_elsewhere(site: Path) -> None:
    pages = sorted(site.rglob("*.html"))
    docs = {path.stem for path in (ROOT / "docs").glob("*.md")} - {"README"}
    assert docs <= {path.parent.name for path in pages}
    for path in pages:
        for source in _Page(path).fetched:
            assert "//" not in source, f"{path.relative_to(site)} fetches {source}"
            if path.name != "404.html":  # its addresses begin at the top of the site
                assert Path(os.path.normpath(path.parent / source)).exists(), f"{path.relative_to(site)}: {source}"


def test_the_front_page_is_the_readme_and_names_no_path_of_the_repository(site: Path) -> None:
    front = (site / "index.html").read_text()
    assert "Status:" in front and 'href="long_context/"' in front
    assert not re.search(r'href="[^"]*\.md[#"]', front)


def test_the_reference_has_every_public_name(site: Path) -> None:
    reference = (site / "api" / "index.html").read_text()
    for name in set(memo.__all__) - {"__version__"}:
        assert re.search(rf'id="memo\.[\w.]*\b{name}"', reference), name
    assert "ConfigError" in reference and "Run until train_iters" in reference


def test_the_reference_begins_with_what_a_trainer_does(site: Path) -> None:
    reference = (site / "api" / "index.html").read_text()
    members = re.findall(r'id="memo\.[\w.]*\bTrainer\.(\w+)"', reference)
    assert members[0] == "train" and members.index("step") < members.index("parts")


def test_flags_are_whole_words(site: Path) -> None:
    flags = (site / "flags" / "index.html").read_text()
    assert '<code><span class="flag">--tensor-model-parallel-size</span></code>' in flags
    assert ".md-typeset .flag" in (site / "site.css").read_text()
