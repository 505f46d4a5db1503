"""Checkpoints of strangers: nothing in one is run, and no name in one leads out of its directory.

The directory in tests/golden was written by memo's schema 2, whose index and tensors are pickles.
"""

import contextlib
import io
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import contents
from ranks import run_ranks

from memo.checkpoint.chunks import GlobalTensor
from memo.checkpoint.distcp import written_down
from memo.checkpoint.index import INDEX
from memo.checkpoint.run_state import RunState, read_state, write_state
from memo.checkpoint.store import write_tensors
from memo.cli.main import main as memo_main
from memo.errors import CheckpointError
from memo.train.entry import main as train_main

OLD = Path(__file__).parents[1] / "golden" / "checkpoint_schema_2"
NAME = "master/layers.0.mlp.fc1.weight"


class Exploit:
    """Makes a file when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self.mark}",)


@pytest.fixture
def old(tmp_path: Path) -> Path:
    shutil.copytree(OLD, tmp_path / "old")
    return tmp_path / "old" / "iter_0000003"


def metadata(final: Path) -> Any:
    """torch's own Metadata, to be changed; this file is memo's own, so it may be unpickled here."""
    return pickle.loads((final / ".metadata").read_bytes())


def write_metadata(final: Path, content: object) -> None:
    (final / ".metadata").write_bytes(pickle.dumps(content, protocol=4))


def test_a_checkpoint_of_an_older_memo_is_read_to_the_last_bit(old: Path) -> None:
    """Four rectangles of a matrix by two ranks, in fp32 and fp64, and a vector in bf16."""
    state, values = contents(old)
    assert state == RunState(3, 12, 7, 3, 0, 0, 4)
    for i, (kind, dtype) in enumerate(
        (("master", torch.float32), ("exp_avg", torch.float32), ("exp_avg_sq", torch.float64))
    ):
        assert torch.equal(
            values[f"{kind}/layers.0.mlp.fc1.weight"], (torch.arange(48).view(6, 8) * (i + 1) + 0.5).to(dtype)
        )
        assert torch.equal(values[f"{kind}/final_norm.weight"], torch.arange(5).to(torch.bfloat16) + i)
    assert len(values) == 6


def test_damage_in_an_old_checkpoint_is_found_by_the_sums_of_its_zip_files(old: Path) -> None:
    file = old / "__0_0.distcp"
    content = file.read_bytes()
    position = content.index(torch.arange(0.5, 16.5).numpy().tobytes())
    file.write_bytes(content[:position] + bytes([content[position] ^ 1]) + content[position + 1 :])
    with pytest.raises(CheckpointError, match=r"__0_0.distcp: master/layers.0.mlp.fc1.weight, .* \(crc32\), but"):
        contents(old)


def _refused(command: Callable[[list[str]], int], arguments: list[str]) -> str:
    """Its one message."""
    with contextlib.redirect_stderr(io.StringIO()) as errors, pytest.raises(SystemExit) as caught:
        command(arguments)
    assert caught.value.code == 2
    return errors.getvalue()


def by_load(directory: Path) -> str:
    flags = (
        "--num-layers 1 --hidden-size 8 --num-attention-heads 1 --vocab-size 61 --mock-data --seq-len 64 --device cpu "
        "--num-threads 1 --peak-tflops 1 --no-progress --offload-alpha off"
    )
    return run_ranks(1, _refused, train_main, [*flags.split(), "--load", str(directory)])[0]


def by_export(directory: Path) -> str:
    (directory / "config.toml").write_text(
        "[model]\nnum_layers = 1\nhidden_size = 8\nnum_attention_heads = 1\nvocab_size = 61\n"
        'normalization = "RMSNorm"\nactivation = "swiglu"\n'
    )
    return _refused(memo_main, ["export", str(directory), "--out", str(directory / "out")])


WAYS = pytest.mark.parametrize("way", [by_load, by_export], ids=["--load DIR", "memo export DIR"])


@WAYS
def test_an_index_that_is_a_program_is_not_run(old: Path, tmp_path: Path, way: Callable[[Path], str]) -> None:
    write_metadata(old, Exploit(tmp_path / "mark"))
    message = way(old.parent)
    assert not (tmp_path / "mark").exists()
    assert "it names posix.system, which has no place in a checkpoint" in message


@WAYS
def test_a_program_hidden_in_a_whole_index_is_not_run(old: Path, tmp_path: Path, way: Callable[[Path], str]) -> None:
    content = metadata(old)
    content.storage_meta = Exploit(tmp_path / "mark")
    write_metadata(old, content)
    message = way(old.parent)
    assert not (tmp_path / "mark").exists()
    assert "it names posix.system, which has no place in a checkpoint" in message


def test_a_program_in_the_file_of_a_tensor_is_not_run(old: Path, tmp_path: Path) -> None:
    """Its zip file's directory is read, its pickle never: not even where numbers of the right size lie beside it."""
    content = metadata(old)
    file, archive = old / "__0_0.distcp", io.BytesIO()
    values = torch.arange(0.5, 16.5).view(2, 8)
    torch.save({"values": values, "more": Exploit(tmp_path / "mark")}, archive)
    (key,) = [key for key in content.storage_data if key.fqn == NAME and tuple(key.offset) == (0, 0)]
    content.storage_data[key].offset = file.stat().st_size
    content.storage_data[key].length = len(archive.getvalue())
    write_metadata(old, content)
    file.write_bytes(file.read_bytes() + archive.getvalue())
    assert torch.equal(contents(old)[1][NAME][:2], values)
    assert not (tmp_path / "mark").exists()


@pytest.mark.parametrize(
    "program",
    [
        b"cposix\nsystem\n(S'true'\ntR.",
        b"\x80\x04\x95\x05\x00\x00\x00\x00\x00\x00\x00j\xff\xff\xff\x7f.",  # the 2^31-th thing remembered
        b"\x80\x04r\xff\xff\xff\x7f.",  # remembered there: C's unpickler would take 32 GiB
        b"\x80\x04" + b"(" * 100_000 + b"l" * 100_000 + b".",
        b"\x80\x04" + b")\x85" * 100_000 + b".",
        b"\x80\x04}}K\x01s.",
        b"\x80\x04\x8c\x05torch\x8c\x04Sizeb.",
        b"\x80\x04]",
        b"",
    ],
    ids=[
        "text",
        "far recall",
        "far memory",
        "deep",
        "deep tuple",
        "key no hash",
        "state of a text",
        "cut short",
        "empty",
    ],
)
def test_programs_that_no_checkpoint_holds_are_refused(old: Path, program: bytes) -> None:
    (old / ".metadata").write_bytes(program)
    with pytest.raises(CheckpointError, match=r"cannot be read \(.metadata is not as memo wrote it"):
        contents(old)


def test_nothing_is_called_while_an_index_is_written_down() -> None:
    """Even what is known by name stays a name."""
    found = written_down(pickle.dumps([torch.Size((2, 3)), torch.float32], protocol=4))
    assert [entry.name for entry in found] == ["torch.Size", "torch.float32"]
    assert found[0].arguments == ((2, 3),)


@pytest.fixture
def new(tmp_path: Path) -> Path:
    return write_tensors(tmp_path / "new", RunState(1, 0, 0, 0, 0, 0), {NAME: GlobalTensor.whole(torch.ones(4))})


def rename_in_index(final: Path, name: str) -> None:
    """As a stranger would: with checksums that are right."""
    text = (final / INDEX).read_text()
    assert "tensors-00000.bin" in text
    (final / INDEX).write_text(text.replace("tensors-00000.bin", name))
    write_state(final, read_state(final))


@pytest.mark.parametrize("name", ["../secret", "/etc/hostname", "below/secret", "..", ".", "", "a\\u0000b"])
def test_a_name_that_leaves_the_directory_is_refused(new: Path, name: str) -> None:
    (new.parent / "secret").write_bytes(bytes(16))
    (new / "below").mkdir()
    (new / "below" / "secret").write_bytes(bytes(16))
    rename_in_index(new, name)
    with pytest.raises(CheckpointError, match="give a string that names a file beside it"):
        contents(new)


@pytest.mark.parametrize("name", ["../secret", "/etc/hostname"])
def test_a_name_in_an_old_index_that_leaves_the_directory_is_refused(old: Path, name: str) -> None:
    content = metadata(old)
    for place in content.storage_data.values():
        place.relative_path = name
    write_metadata(old, content)
    with pytest.raises(CheckpointError, match="is no name of a file in a checkpoint"):
        contents(old)


@pytest.mark.parametrize("name", ["tensors-00000.bin", "index.json", "run_state.json"])
def test_a_link_that_leaves_the_directory_is_refused(new: Path, name: str) -> None:
    shutil.move(new / name, new.parent / "elsewhere")
    (new / name).symlink_to(new.parent / "elsewhere")
    with pytest.raises(CheckpointError, match=rf"{name} is a link to .*elsewhere, outside of"):
        contents(new)


def test_a_pipe_is_not_waited_for(new: Path) -> None:
    (new / "tensors-00000.bin").unlink()
    os.mkfifo(new / "tensors-00000.bin")
    with pytest.raises(CheckpointError, match="is a named pipe, not a regular file"):
        contents(new)


@pytest.mark.parametrize(
    ("old_text", "new_text", "message"),
    [
        ('"shape": [4]', '"shape": [-4]', "shape"),
        ('"shape": [4]', '"shape": [4000000000000000000000]', "shape"),
        ('"at_byte": 0', '"at_byte": 9223372036854775000', "were written: it is cut short"),
        ('"at_byte": 0', '"at_byte": "0"', "at_byte"),
        ('"offset": [0]', '"offset": [0, 0]', r"has 1 dims, and its rectangles \[1, 2\]"),
        ('"offset": [0]', '"offset": [1]', "overlap, or do not fill its shape"),
        ("float32", "object", "dtype"),
        ('"version": 1', '"version": 2', "version"),
        ('{"schema"', "[" * 100_000 + '{"schema"', "index.json"),
    ],
    ids=["negative", "large", "far", "text", "dims", "gap", "dtype", "version", "deep"],
)
def test_an_index_of_nonsense_is_one_message(new: Path, old_text: str, new_text: str, message: str) -> None:
    text = (new / INDEX).read_text()
    assert old_text in text
    (new / INDEX).write_text(text.replace(old_text, new_text))
    write_state(new, read_state(new))
    with pytest.raises(CheckpointError, match=message) as caught:
        contents(new)
    assert "\n" not in str(caught.value)
