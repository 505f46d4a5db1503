"""What a save writes and holds: the bytes of each tensor as they lie, whatever its dtype, and no copy of them."""

import io
from pathlib import Path

import numpy as np
import pytest
import torch
from checkpoints import contents
from ranks import run_ranks
from torch import Tensor

from memo.artifacts.checksum import checksum_of
from memo.checkpoint import writer
from memo.checkpoint.chunks import GlobalTensor, Part
from memo.checkpoint.run_state import RunState
from memo.checkpoint.store import open_checkpoint, read_tensors, write_tensors

STATE = RunState(1, 0, 0, 0, 0, 0)
MIB = 1 << 20


def as_bytes(values: Tensor) -> bytes:
    return values.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    "cut",
    [lambda x: x, lambda x: x[3:7], lambda x: x[5, 2:], lambda x: x[:, 1:4]],
    ids=["all", "rows", "row", "columns"],
)
def test_what_is_written_are_the_numbers_in_order(
    dtype: torch.dtype, cut: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In many small pieces, whose checksum is that of the whole."""
    monkeypatch.setattr(writer, "PIECE_BYTES", 16)
    part = cut(torch.arange(80).to(dtype).view(10, 8))  # type: ignore[operator]
    file = io.BytesIO()
    checksum = writer.write_values(file, part)
    assert file.getvalue() == as_bytes(part)
    assert checksum == checksum_of(as_bytes(part))


def test_the_index_says_where_each_rectangle_lies(tmp_path: Path) -> None:
    """As a reader without memo would find it: file, byte, dtype and shape."""
    values = torch.arange(48, dtype=torch.float32).view(6, 8)
    parts = [Part.of((0, 0), values[:2]), Part.of((2, 0), values[2:])]
    tensors = {"master/a": GlobalTensor((6, 8), torch.float32, parts), "exp_avg/a": GlobalTensor.whole(values + 1)}
    final = write_tensors(tmp_path, STATE, tensors)
    state, index = open_checkpoint(final)
    assert state == STATE and list(index) == ["master/a", "exp_avg/a"]
    for rectangle in index["master/a"].rectangles:
        content = (final / rectangle.file).read_bytes()
        found = np.frombuffer(content, np.float32, 8 * rectangle.shape[0], rectangle.at_byte).reshape(rectangle.shape)
        first = rectangle.offset[0]
        assert np.array_equal(found, values[first : first + rectangle.shape[0]].numpy())
    assert torch.equal(contents(final)[1]["exp_avg/a"], values + 1)


@pytest.mark.parametrize(
    "offsets", [[(0, 0)], [(0, 0), (1, 0)], [(0, 0), (2, 0), (2, 0)]], ids=["gap", "overlap", "twice"]
)
def test_rectangles_that_do_not_cover_a_tensor_once_are_not_published(
    tmp_path: Path, offsets: list[tuple[int, int]]
) -> None:
    """A fault of memo's own would show here, not when somebody loads."""
    parts = [Part.of(offset, torch.zeros(2, 8)) for offset in offsets]
    tensors = {"master/a": GlobalTensor((4, 8), torch.float32, parts)}
    with pytest.raises(Exception, match=r"the rectangles of master/a overlap, or do not fill its shape \(4, 8\)"):
        write_tensors(tmp_path, STATE, tensors)
    assert not list(tmp_path.iterdir())


def _high_water_bytes() -> int:
    status = Path("/proc/self/status").read_text()
    return int(next(line.split()[1] for line in status.splitlines() if line.startswith("VmHWM"))) * 1024


def _save_and_load_large(folder: Path, num_bytes: int) -> tuple[int, int]:
    """By how many bytes this process's peak grows while `num_bytes` in four views of one storage are saved; loaded."""
    flat = torch.arange(num_bytes // 4, dtype=torch.float32)
    parts = flat.view(4, -1, 1024)
    tensors = {f"master/{i}": GlobalTensor.whole(part) for i, part in enumerate(parts)}
    write_tensors(folder / "warm", STATE, {"master/x": GlobalTensor.whole(torch.zeros(8))})  # imports, buffers
    contents(folder / "warm" / "iter_0000001")
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before_bytes = _high_water_bytes()
    final = write_tensors(folder / "large", STATE, tensors)
    saving_bytes = _high_water_bytes() - before_bytes
    restored = {f"master/{i}": torch.zeros(parts[0].shape) for i in range(4)}
    Path("/proc/self/clear_refs").write_text("5")
    before_bytes = _high_water_bytes()
    index = open_checkpoint(final)[1]
    read_tensors(final, index, {name: GlobalTensor.whole(values) for name, values in restored.items()})
    loading_bytes = _high_water_bytes() - before_bytes
    assert all(torch.equal(restored[f"master/{i}"], part) for i, part in enumerate(parts))
    return saving_bytes, loading_bytes


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="peaks can be reset on Linux alone")
def test_saving_and_loading_hold_no_copy_of_what_lies_in_host_memory(tmp_path: Path) -> None:
    """128 MiB of states in rectangles of 32: less than 16 MiB may come on top, for the piece in hand; measured: 8."""
    saving_bytes, loading_bytes = run_ranks(1, _save_and_load_large, tmp_path, 128 * MIB)[0]
    print(f"grown by {saving_bytes / MIB:.1f} MiB while saving, {loading_bytes / MIB:.1f} while loading")
    assert max(saving_bytes, loading_bytes) < 16 * MIB
