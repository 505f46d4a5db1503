"""Checkpoints of strangers: nothing in one is run, and no name in one leads out of its directory."""

import os
import shutil
from pathlib import Path

import pytest
import torch
from checkpoints import contents

from memo.checkpoint.chunks import GlobalTensor
from memo.checkpoint.index import INDEX
from memo.checkpoint.run_state import RunState, read_state, write_state
from memo.checkpoint.store import write_tensors
from memo.errors import CheckpointError

NAME = "master/layers.0.mlp.fc1.weight"


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
