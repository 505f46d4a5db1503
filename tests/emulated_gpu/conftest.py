"""Tests of the emulated GPU run on it (`make emulated`); elsewhere they are skipped, but for those of its building."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from memo.emulated_gpu import face
from memo.emulated_gpu.launch import is_emulated

WITHOUT_GPU = "test_building.py"
SCHEDULES = [("eager", 0), ("lazy", 0), *(("random", seed) for seed in range(3))]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if is_emulated():
        return
    skip = pytest.mark.skip(reason="runs on the emulated GPU alone: `make emulated`")
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent) and item.path.name != WITHOUT_GPU:
            item.add_marker(skip)


@pytest.fixture
def gpu() -> Iterator[face.EmulatedGpu]:
    """The process's emulated GPUs: lazy, races checked, nothing counted yet. No test may leave a race unread."""
    device = face.EmulatedGpu()
    device.set_schedule("lazy")
    device.check_races()
    device.clear()
    yield device
    races = device.races()
    device.set_schedule("eager")
    device.clear()
    assert not races


@pytest.fixture(params=SCHEDULES, ids=[f"{policy}{seed}" for policy, seed in SCHEDULES])
def any_schedule(request: pytest.FixtureRequest, gpu: face.EmulatedGpu) -> face.EmulatedGpu:
    gpu.set_schedule(*request.param)
    return gpu
