"""Files of a stranger's model directory: found inside, in the store of the hub's cache, and nowhere else."""

import os
import socket
from pathlib import Path

import pytest

from memo.artifacts.model_directory import model_file, path_within
from memo.errors import CheckpointError

NAME = "tokenizer.json"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "secret").write_text("secret")
    (tmp_path / "model").mkdir()
    return tmp_path / "model"


def test_plain_files_and_links_inside_are_found(model: Path) -> None:
    assert model_file(model, NAME) is None
    (model / "real.json").write_text("{}")
    (model / NAME).symlink_to("real.json")
    assert model_file(model, NAME) == model / "real.json"
    (model.parent / "by-link").symlink_to(model)
    assert model_file(model.parent / "by-link", NAME) == model / "real.json"
    (model / NAME).unlink()
    (model / NAME).symlink_to("gone.json")
    assert model_file(model, NAME) is None


@pytest.mark.parametrize("target", ["../secret", "/etc/hostname", "deeper/../../secret", "../gone", "step"])
def test_links_that_leave_the_directory_are_refused_by_name(model: Path, target: str) -> None:
    (model / "step").symlink_to("../secret")  # a link inside that leads on to the outside
    (model / NAME).symlink_to(target)
    with pytest.raises(CheckpointError, match=rf"^{model}/{NAME} is a link to /.*, outside of {model}: replace it"):
        model_file(model, NAME)


def test_a_folder_that_is_a_link_to_the_outside_is_refused(model: Path) -> None:
    (model.parent / "other").mkdir()
    (model / "hugging_face").symlink_to("../other")
    with pytest.raises(CheckpointError, match=r"hugging_face is a link to .*/other, outside of"):
        path_within(model, "hugging_face")
    with pytest.raises(CheckpointError, match=r"is a link to .*/secret, outside of"):
        path_within(model, "../secret")


def make_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        folder = os.open(path.parent, os.O_RDONLY)  # names of sockets are short: this one is named by the open folder
        server.bind(f"/proc/self/fd/{folder}/{path.name}")
        os.close(folder)


@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (Path.mkdir, "a directory"),
        (os.mkfifo, "a named pipe"),
        (make_socket, "a socket"),
    ],
)
def test_what_is_no_regular_file_is_refused(model: Path, make, kind: str) -> None:  # type: ignore[no-untyped-def]
    make(model / NAME)
    with pytest.raises(CheckpointError, match=rf"{NAME} is {kind}, not a regular file: remove it"):
        model_file(model, NAME)


def test_a_link_to_itself_is_refused(model: Path) -> None:
    (model / NAME).symlink_to(NAME)
    with pytest.raises(CheckpointError, match=rf"{NAME} cannot be read \(Too many levels of symbolic links\)"):
        model_file(model, NAME)


def hub_snapshot(root: Path, repository: str) -> Path:
    """A snapshot as the hub's cache lays it out."""
    snapshot = root / repository / "snapshots" / "0123abcd"
    snapshot.mkdir(parents=True)
    (root / repository / "blobs").mkdir()
    (root / repository / "blobs" / "6f1c").write_text("{}")
    return snapshot


def test_a_snapshot_of_the_hubs_cache_links_to_the_store_of_its_own_model(tmp_path: Path) -> None:
    snapshot = hub_snapshot(tmp_path, "models--org--name")
    (snapshot / NAME).symlink_to("../../blobs/6f1c")
    assert model_file(snapshot, NAME) == tmp_path / "models--org--name" / "blobs" / "6f1c"


@pytest.mark.parametrize("target", ["../../../models--org--private/blobs/6f1c", "../../../../secret", "../../refs/x"])
def test_a_snapshot_that_links_elsewhere_is_refused(tmp_path: Path, target: str) -> None:
    snapshot = hub_snapshot(tmp_path / "hub", "models--org--name")
    hub_snapshot(tmp_path / "hub", "models--org--private")
    (tmp_path / "secret").write_text("secret")
    (snapshot / NAME).symlink_to(target)
    with pytest.raises(CheckpointError, match=rf"{NAME} is a link to .*, outside of"):
        model_file(snapshot, NAME)


def test_a_store_that_is_itself_a_link_is_refused(tmp_path: Path) -> None:
    snapshot = hub_snapshot(tmp_path, "models--org--name")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "6f1c").write_text("secret")
    store = tmp_path / "models--org--name" / "blobs"
    (store / "6f1c").unlink()
    store.rmdir()
    store.symlink_to("../elsewhere")
    (snapshot / NAME).symlink_to("../../blobs/6f1c")
    with pytest.raises(CheckpointError, match="outside of"):
        model_file(snapshot, NAME)
    (tmp_path / "other" / "snapshots" / "1").mkdir(parents=True)  # no folder of the hub's cache: models--...
    (tmp_path / "other" / "blobs").mkdir()
    (tmp_path / "other" / "snapshots" / "1" / NAME).symlink_to("../../blobs/6f1c")
    with pytest.raises(CheckpointError, match="outside of"):
        model_file(tmp_path / "other" / "snapshots" / "1", NAME)
