"""Checkpoints of strangers: nothing in one is run, and no name in one leads out of its directory."""

import contextlib
import io
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from checkpoints import contents
from ranks import run_ranks

from memo.checkpoint.chunks import GlobalTensor
from memo.checkpoint.directory import LATEST
from memo.checkpoint.index import INDEX
from memo.checkpoint.run_state import RunState, read_state, write_state
from memo.checkpoint.store import write_tensors
from memo.cli.main import main as memo_main
from memo.errors import CheckpointError
from memo.train.entry import main as train_main

NAME = "master/layers.0.mlp.fc1.weight"


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
def test_the_format_of_no_release_is_refused_by_one_message(tmp_path: Path, way: Callable[[Path], str]) -> None:
    """Its index was a pickle: a small one of nested tuples took for ever to describe, so none is opened."""
    old = tmp_path / "iter_0000003"
    old.mkdir()
    (tmp_path / LATEST).write_text("3")
    (old / "run_state.json").write_text(json.dumps({"schema_version": 2, "iteration": 3, "consumed_samples": 12}))
    (old / ".metadata").write_bytes(b"\x80\x04)" + b"\x86\x940" * 200 + b".")
    assert "run_state.json is of schema 2, but this version of memo reads schema 3; use the version" in way(tmp_path)


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
