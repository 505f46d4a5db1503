"""What all tests share: nothing that memo keeps for its user goes to, or comes from, the real user's cache."""

import gc
import os
import sys
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import forked
import pytest

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))  # scripts whose figures are held, imported by name
if "PYTEST_XDIST_WORKER" in os.environ:  # several workers share the cores; decided before the first import of torch
    os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_configure() -> None:
    """Workers of pytest-xdist start later: they share this process's server."""
    forked.server()
    gc.disable()  # until the tests are collected: none of their objects is garbage


def pytest_collection_finish() -> None:
    """Runs in this process are spared measurements too, unless it would have to import torch just for that."""
    gc.enable()
    if "memo.train.device" in sys.modules:
        import spared_measurements  # noqa: F401


@pytest.hookimpl(wrapper=True)
def pytest_report_to_serializable(report: pytest.CollectReport | pytest.TestReport) -> Generator[None, Any, Any]:
    """Workers send three reports of a test; nobody asks for the keywords of those that passed."""
    data = yield
    if report.passed and data is not None:
        data["keywords"] = {}
    return data


@pytest.fixture(scope="module", autouse=True)
def what_lives_is_visited_once() -> None:
    """What earlier modules brought and left, such as cached plans, lives until the end; no collection visits it again.

    It is millions of objects, with which the collection at a trainer's end takes a second. Those that Python starts by
    itself are rarer here: they took a quarter of the time of the tests of plans.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 10, 30)


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
