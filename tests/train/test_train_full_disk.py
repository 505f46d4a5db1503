"""A disk that fills up ends a run with one message and status 3, and the last whole checkpoint can be loaded."""

import contextlib
import io
import resource
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from checkpoints import contents
from processes import SMALL
from ranks import run_ranks
from small_disk import small_disk

from memo.checkpoint import store
from memo.checkpoint.directory import latest_checkpoint
from memo.errors import EXIT_FAILED
from memo.train.entry import main

FLAGS = f"{SMALL} --train-iters 100 --save-interval 2"
DISK_BYTES = 832 << 10
"""Two checkpoints of 320 KiB and the run's log fit, as they must for a run to start; three checkpoints do not."""


def _limit_files_from_the_second_save_on() -> None:
    write, calls = store.write_file, 0

    def wrapped(*args: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 2:
            resource.setrlimit(resource.RLIMIT_FSIZE, (2048, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
        return write(*args)

    store.write_file = wrapped


def _run(flags: list[str], limited_rank: int | None) -> tuple[int | str | None, str]:
    """(exit status, what stands on standard error)."""
    if dist.get_rank() == limited_rank:
        _limit_files_from_the_second_save_on()
    with contextlib.redirect_stderr(io.StringIO()) as errors, pytest.raises(SystemExit) as caught:
        main(flags)
    return caught.value.code, errors.getvalue()


def _check(folder: Path, results: list[tuple[int | str | None, str]], cause: str, whole: int) -> None:
    """`whole`: iteration of the last checkpoint that could be written.

    A step that ends before the failure is known cannot write its logs either, and a warning says so.
    """
    assert [status for status, _ in results] == [EXIT_FAILED] * len(results)
    lines = [line for _, errors in results for line in errors.splitlines() if not line.startswith("warning: ")]
    told = {line.rpartition("error: ")[2] for line in lines}
    assert len(told) == 1 and len(lines) == len(results)  # all ranks say the same, each in one line
    (line,) = told
    assert line.startswith(f"--save {folder}: iteration {whole + 2} could not be written (")
    assert cause in line and "older checkpoints there are untouched: free disk space" in line
    state, values = contents(latest_checkpoint(folder))
    assert state.iteration == whole and len(values) > 10
    assert not list(folder.glob("*.partial"))


@pytest.mark.parametrize(("save", "limited_rank"), [("--async-save", 0), ("--no-async-save", 1)])
def test_one_rank_whose_files_cannot_grow(tmp_path: Path, save: str, limited_rank: int) -> None:
    results = run_ranks(2, _run, [*FLAGS.split(), save, "--save", str(tmp_path)], limited_rank)
    _check(tmp_path, results, "File too large", whole=2)


@pytest.mark.parametrize("save", ["--async-save", "--no-async-save"])
def test_a_disk_without_space(tmp_path: Path, save: str) -> None:
    with small_disk(tmp_path, DISK_BYTES):
        results = run_ranks(1, _run, [*FLAGS.split(), save, "--save", str(tmp_path)], None)
        _check(tmp_path, results, "No space left on device", whole=4)
