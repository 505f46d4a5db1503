"""checkpoint_checksums.py compares saves with checksums to saves without, and leaves memo as it was."""

from pathlib import Path

import checkpoint_checksums as benchmark
import pytest
import torch

from memo.checkpoint import writer
from memo.checkpoint.chunks import GlobalTensor
from memo.checkpoint.run_state import RunState
from memo.checkpoint.store import open_checkpoint, write_tensors


def test_a_row_has_both_sides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(benchmark, "TENSOR_BYTES", 1 << 16)
    row = benchmark.measure(tmp_path, 1 << 17, repeats=1)
    assert row["bytes"] == 1 << 17
    assert row["added_to_save_percent"] == pytest.approx(100 * (row["save_s"] / row["save_without_s"] - 1))
    assert min(row["load_s"], row["load_without_s"]) > 0
    assert not list(tmp_path.iterdir())


def test_without_is_without_and_only_there(tmp_path: Path) -> None:
    real, tensors = writer.checksum, {"master/a": GlobalTensor.whole(torch.ones(4))}
    with benchmark.without_checksums():
        final = write_tensors(tmp_path, RunState(1, 0, 0, 0, 0, 0), tensors)
    assert open_checkpoint(final)[1]["master/a"].rectangles[0].xxh3_64 == ""
    assert writer.checksum is real
