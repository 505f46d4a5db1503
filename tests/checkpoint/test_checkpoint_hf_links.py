"""A model directory of a stranger must not make import or export copy other files of this machine."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from hf_directories import write_model

from memo.checkpoint.hugging_face import export_checkpoint, import_checkpoint
from memo.errors import CheckpointError

SECRET = "-----BEGIN OPENSSH PRIVATE KEY-----"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """llama/ as it is published, and checkpoint/, which was imported from it."""
    pytest.importorskip("transformers")
    root = tmp_path_factory.mktemp("made")
    write_model("llama", root)
    (root / "llama" / "generation_config.json").write_text("{}")
    import_checkpoint(root / "llama", root / "checkpoint")
    return root


@pytest.fixture
def published(made: Path, tmp_path: Path) -> Path:
    """A copy, beside a secret."""
    (tmp_path / "secret").write_text(SECRET)
    shutil.copytree(made, tmp_path / "made")
    return tmp_path / "made"


def replace_by_link(path: Path, target: Path) -> None:
    path.unlink(missing_ok=True)
    path.symlink_to(os.path.relpath(target, path.parent))


@pytest.mark.parametrize("name", ["special_tokens_map.json", "generation_config.json", "chat_template.jinja"])
def test_import_copies_no_file_from_outside(published: Path, tmp_path: Path, name: str) -> None:
    replace_by_link(published / "llama" / name, tmp_path / "secret")
    with pytest.raises(CheckpointError, match=rf"llama/{name} is a link to .*/secret, outside of .*llama: replace it"):
        import_checkpoint(published / "llama", tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_import_reads_no_file_from_outside(published: Path, tmp_path: Path, name: str) -> None:
    shutil.move(published / "llama" / name, tmp_path / name)
    replace_by_link(published / "llama" / name, tmp_path / name)
    with pytest.raises(CheckpointError, match=rf"llama/{name} is a link to .*/{name}, outside of"):
        import_checkpoint(published / "llama", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def link_a_file(checkpoint: Path, secret: Path) -> None:
    replace_by_link(checkpoint / "hugging_face" / "added_tokens.json", secret)


def link_the_folder(checkpoint: Path, secret: Path) -> None:
    (secret.parent / "private").mkdir()
    shutil.copy(secret, secret.parent / "private" / "added_tokens.json")
    shutil.rmtree(checkpoint / "hugging_face")
    replace_by_link(checkpoint / "hugging_face", secret.parent / "private")


@pytest.mark.parametrize("link", [link_a_file, link_the_folder])
def test_export_copies_no_file_from_outside(
    published: Path, tmp_path: Path, link: Callable[[Path, Path], None]
) -> None:
    link(published / "checkpoint", tmp_path / "secret")
    with pytest.raises(CheckpointError, match=r"is a link to .*, outside of .*: replace it with a copy"):
        export_checkpoint(published / "checkpoint", tmp_path / "out")
    assert not list(tmp_path.glob("out*"))


def test_export_copies_no_linked_file_of_a_given_tokenizer(published: Path, tmp_path: Path) -> None:
    (tmp_path / "tokenizer").mkdir()
    replace_by_link(tmp_path / "tokenizer" / "merges.txt", tmp_path / "secret")
    with pytest.raises(CheckpointError, match=r"tokenizer/merges.txt is a link to .*/secret"):
        export_checkpoint(published / "checkpoint", tmp_path / "out", tokenizer=tmp_path / "tokenizer")
    assert not list(tmp_path.glob("out*"))


def test_a_named_pipe_is_refused_instead_of_read(published: Path, tmp_path: Path) -> None:
    os.mkfifo(published / "llama" / "vocab.json")
    with pytest.raises(CheckpointError, match=r"llama/vocab.json is a named pipe, not a regular file: remove it"):
        import_checkpoint(published / "llama", tmp_path / "out")


def test_a_snapshot_of_the_hubs_cache_is_imported(published: Path, tmp_path: Path) -> None:
    """All of its files are links into the store beside it."""
    repository = tmp_path / "hub" / "models--org--llama"
    snapshot = repository / "snapshots" / "0123abcd"
    snapshot.mkdir(parents=True)
    shutil.copytree(published / "llama", repository / "blobs")
    for file in (repository / "blobs").iterdir():
        replace_by_link(snapshot / file.name, file)
    imported = import_checkpoint(snapshot, tmp_path / "out")
    assert imported.companions == ["config.json", "generation_config.json"]
    assert not (tmp_path / "out" / "hugging_face" / "config.json").is_symlink()
    exported = export_checkpoint(tmp_path / "out", tmp_path / "exported")
    assert SECRET not in "".join(path.read_text(errors="replace") for path in exported.path.iterdir())
