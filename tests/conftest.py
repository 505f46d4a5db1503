"""What all tests share: nothing that memo keeps for its user goes to, or comes from, the real user's cache."""

import gc
import os
from collections.abc import Iterator

import pytest

if "PYTEST_XDIST_WORKER" in os.environ:  # several workers share the cores; decided before the first import of torch
    os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_collection_finish() -> None:
    """What all tests and their modules brought lives until the end: no garbage collection need visit it again."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def cache_of_this_session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """One for all workers of pytest-xdist, so that the allocator is compiled once and each kind of layer measured once.

    Processes of tests inherit it."""
    base = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        base = base.parent
    cache = base / "cache"
    cache.mkdir(exist_ok=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(cache))
        yield


@pytest.fixture(autouse=True)
def environment_stays() -> Iterator[None]:
    """What a test sets for a run in its own process, such as RANK, is not for the tests and processes after it."""
    before = _environment()
    yield
    for name in _environment().keys() - before.keys():
        del os.environ[name]
    os.environ |= before


def _environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
