"""What a save holds in memory: nothing of tensors on the host, whatever their dtype and however they are cut."""

from pathlib import Path

import pytest
import torch
from checkpoints import ALONE
from ranks import run_ranks
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import WriteItem, WriteItemType

from memo.checkpoint.chunks import ChunkedTensor
from memo.checkpoint.directory import RunState
from memo.checkpoint.store import read_tensors, write_tensors
from memo.checkpoint.writer import InPlacePlanner

STATE = RunState(1, 0, 0, 0, 0, 0)
MIB = 1 << 20


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("cut", "copied"),
    [(lambda x: x, False), (lambda x: x[3:7], False), (lambda x: x[5, 2:], False), (lambda x: x[:, 1:4], True)],
    ids=["whole", "rows", "part of a row", "columns"],
)
def test_rectangles_are_handed_out_where_they_lie(dtype: torch.dtype, cut: object, copied: bool) -> None:
    """torch.save writes whole storages, so each must begin and end with its rectangle; columns never occur in memo."""
    part = cut(torch.arange(80).to(dtype).view(10, 8))  # type: ignore[operator]
    planner = InPlacePlanner()
    planner.set_up_planner({"x": ChunkedTensor(part.shape, [((0,) * part.ndim, part)], dtype)}, is_coordinator=True)
    item = WriteItem(MetadataIndex("x", torch.Size((0,) * part.ndim)), WriteItemType.SHARD)
    resolved = planner.resolve_data(item)
    assert torch.equal(resolved, part) and resolved.dtype == dtype
    assert resolved.untyped_storage().nbytes() == part.nbytes
    assert (resolved.data_ptr() == part.data_ptr()) is not copied


def _high_water_bytes() -> int:
    status = Path("/proc/self/status").read_text()
    return int(next(line.split()[1] for line in status.splitlines() if line.startswith("VmHWM"))) * 1024


def _save_large(folder: Path, num_bytes: int) -> int:
    """By how many bytes the peak of this process grows while `num_bytes` in four views of one storage are saved."""
    flat = torch.arange(num_bytes // 4, dtype=torch.float32)
    parts = flat.view(4, -1, 1024)
    tensors = {f"master/{i}": ChunkedTensor(part.shape, [((0, 0), part)], part.dtype) for i, part in enumerate(parts)}
    write_tensors(folder / "warm", STATE, {"master/x": torch.zeros(8)}, ALONE)  # imports, buffers
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before_bytes = _high_water_bytes()
    write_tensors(folder / "large", STATE, tensors, ALONE)  # type: ignore[arg-type]
    grown_bytes = _high_water_bytes() - before_bytes
    restored = {f"master/{i}": torch.empty(parts[0].shape) for i in range(4)}
    read_tensors(folder / "large" / "iter_0000001", restored, ALONE)
    assert all(torch.equal(restored[f"master/{i}"], part) for i, part in enumerate(parts))
    return grown_bytes


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="peaks can be reset on Linux alone")
def test_saving_holds_no_copy_of_what_lies_in_host_memory(tmp_path: Path) -> None:
    """128 MiB of states: less than 16 MiB may come on top, for buffers of files; torch's own way would take 128."""
    grown_bytes = run_ranks(1, _save_large, tmp_path, 128 * MIB)[0]
    print(f"grown by {grown_bytes / MIB:.1f} MiB")
    assert grown_bytes < 16 * MIB
