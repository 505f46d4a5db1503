"""docs/architecture.md speaks of what exists: every path, every dotted name, and the order of imports."""

import importlib
import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "architecture.md").read_text()
QUOTED = re.findall(r"`([^`]+)`", re.sub(r"^```.*?^```", "", TEXT, flags=re.DOTALL | re.MULTILINE))
PATHS = sorted({word for word in QUOTED if re.fullmatch(r"[\w.-]+(/[\w.-]+)+/?", word)})
NAMES = sorted(set(re.findall(r"\bmemo(?:\.\w+)+", TEXT)))


def test_paths_exist() -> None:
    assert len(PATHS) > 60
    missing = [path for path in PATHS if not (ROOT / path).exists()]
    assert not missing, f"docs/architecture.md names files that do not exist: {missing}"


def test_dotted_names_exist() -> None:
    assert len(NAMES) > 60
    missing = [name for name in NAMES if not exists(name)]
    assert not missing, f"docs/architecture.md names what memo does not have: {missing}"


def exists(name: str) -> bool:
    """Whether a dotted name is a module, or an attribute of the longest part of it that is one."""
    words = name.split(".")
    for length in range(len(words), 0, -1):
        try:
            found = importlib.import_module(".".join(words[:length]))
        except ModuleNotFoundError:
            continue
        for word in words[length:]:
            if not hasattr(found, word):
                return False
            found = getattr(found, word)
        return True
    return False


def test_a_name_that_is_missing_is_found() -> None:
    assert exists("memo.spec.shapes.ModelShape.layer_weights")
    assert not exists("memo.spec.shapes.ModelShape.layer_heights")
    assert not exists("memo.spec.no_such_module")


def test_the_order_of_packages_is_the_import_contract() -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    (layers,) = (contract["layers"] for contract in contracts if contract["type"] == "layers")
    contract = [sorted(name.strip().removeprefix("memo.") for name in line.split("|")) for line in layers]
    (diagram,) = re.findall(r"^```\n( cli .*?)^```", TEXT, re.DOTALL | re.MULTILINE)
    drawn = [sorted(re.split(r" {2,}", line[:48].strip())) for line in diagram.splitlines()]
    assert drawn == contract[1:]  # without memo.__main__
    packages = {path.parent.name for path in (ROOT / "memo").glob("*/__init__.py")} - {"emulated_gpu"}
    described = set(re.findall(r"^\| `(\w+)` \|", TEXT, re.MULTILINE))
    assert described == packages
