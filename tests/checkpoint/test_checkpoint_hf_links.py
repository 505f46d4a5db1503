"""A model directory of a stranger must not make import or export copy other files of this machine."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from chats import write_tokenizer
from hf_directories import write_model

from memo import Trainer
from memo.checkpoint.hugging_face.exporter import export_checkpoint
from memo.checkpoint.hugging_face.importer import import_checkpoint
from memo.config import RunConfig
from memo.config.run import read_toml
from memo.data import build_corpus
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


def link_a_file(root: Path, secret: Path) -> Path | None:
    replace_by_link(root / "made" / "checkpoint" / "hugging_face" / "added_tokens.json", secret)
    return None


def link_the_folder(root: Path, secret: Path) -> Path | None:
    (root / "private").mkdir()
    shutil.copy(secret, root / "private" / "added_tokens.json")
    shutil.rmtree(root / "made" / "checkpoint" / "hugging_face")
    replace_by_link(root / "made" / "checkpoint" / "hugging_face", root / "private")
    return None


def link_a_file_of_a_tokenizer(root: Path, secret: Path) -> Path | None:
    (root / "tokenizer").mkdir()
    replace_by_link(root / "tokenizer" / "merges.txt", secret)
    return root / "tokenizer"


@pytest.mark.parametrize("link", [link_a_file, link_the_folder, link_a_file_of_a_tokenizer])
def test_export_copies_no_file_from_outside(
    published: Path, tmp_path: Path, link: Callable[[Path, Path], Path | None]
) -> None:
    tokenizer = link(tmp_path, tmp_path / "secret")
    with pytest.raises(CheckpointError, match=r"is a link to .*, outside of .*: replace it with a copy"):
        export_checkpoint(published / "checkpoint", tmp_path / "out", tokenizer=tokenizer)
    assert not list(tmp_path.glob("out*"))


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


def test_export_copies_nothing_from_where_a_config_points(published: Path, tmp_path: Path) -> None:
    """The config.toml beside a checkpoint may be a stranger's, and name any directory of this machine."""
    shutil.rmtree(published / "checkpoint" / "hugging_face")
    for name in ("private", "run/hugging_face"):
        shutil.copytree(published / "llama", tmp_path / name)
        (tmp_path / name / "added_tokens.json").write_text(SECRET)
    config = RunConfig().override(read_toml(published / "checkpoint" / "config.toml"))
    pointing = {"pretrained_checkpoint": str(tmp_path / "private"), "load": str(tmp_path / "run")}
    (published / "checkpoint" / "config.toml").write_text(config.override(pointing).to_toml())
    exported = export_checkpoint(published / "checkpoint", tmp_path / "out")
    assert not (exported.path / "added_tokens.json").exists() and "added_tokens.json" not in exported.companions


def test_export_copies_no_tokenizer_or_template_to_which_a_config_points(published: Path, tmp_path: Path) -> None:
    """A run keeps both when it starts."""
    (published / "texts.txt").write_text("some words\n" * 100)
    build_corpus([published / "texts.txt"], tmp_path / "corpus")
    (tmp_path / "corpus-chat_template.jinja").write_text("{{ messages }}")
    run(
        published,
        tmp_path / "run",
        model="llama-tiny",
        train_iters=1,
        mock_data=False,
        data_path=str(tmp_path / "corpus"),
    )
    private = write_tokenizer(tmp_path / "private", "chatml", marks=False)
    shutil.copy(tmp_path / "secret", tmp_path / "stranger-chat_template.jinja")
    kept = export_checkpoint(tmp_path / "run", tmp_path / "kept").path
    assert (kept / "chat_template.jinja").read_text() == "{{ messages }}" and (kept / "tokenizer.json").exists()
    config = RunConfig().override(read_toml(tmp_path / "run" / "config.toml"))
    shutil.rmtree(tmp_path / "run" / "hugging_face", ignore_errors=True)
    for pointing in ({"tokenizer": str(private)}, {"data_path": (str(tmp_path / "stranger"),)}):
        (tmp_path / "run" / "config.toml").write_text(config.override(pointing).to_toml())
        assert export_checkpoint(tmp_path / "run", tmp_path / str(*pointing)).companions == []


def run(published: Path, save: Path, **flags: Any) -> None:
    values = {"seq_length": 32, "device": "cpu", "offload_alpha": "off", "mock_data": True, "num_threads": 1, **flags}
    with Trainer(**values, save=str(save), progress=False) as trainer:
        trainer.train()


def test_a_run_keeps_what_its_export_needs(published: Path, tmp_path: Path) -> None:
    """Of the model that it began with: copies, which stay when that is gone, and which a run that goes on hands on."""
    model = published / "llama"
    (model / "chat_template.jinja").write_text("{{ messages }}")
    (model / "generation_config.json").write_text('{"eos_token_id": 2}')
    run(published, tmp_path / "first", model=model, train_iters=1)
    kept = tmp_path / "first" / "hugging_face"
    names = {"config.json", "chat_template.jinja", "generation_config.json"}
    expected = {name: (model / name).read_bytes() for name in names}
    assert {path.name: path.read_bytes() for path in kept.iterdir()} == expected
    shutil.rmtree(model)
    config = RunConfig().override(read_toml(tmp_path / "first" / "config.toml"))
    for save, steps in ((tmp_path / "first", 2), (tmp_path / "second", 3)):
        run(published, save, config=config, load=str(tmp_path / "first"), train_iters=steps)
        assert {path.name: path.read_bytes() for path in (save / "hugging_face").iterdir()} == expected
    exported = export_checkpoint(tmp_path / "second", tmp_path / "out")
    for name in names - {"config.json"}:
        assert (exported.path / name).read_bytes() == expected[name]


def test_a_run_leaves_nothing_of_another_model_for_its_export(published: Path, tmp_path: Path) -> None:
    """The run that put it there ended before its first checkpoint."""
    shutil.copytree(published / "llama", tmp_path / "save" / "hugging_face")
    (tmp_path / "save" / "hugging_face" / "model.safetensors").unlink()
    run(published, tmp_path / "save", model="llama-tiny", train_iters=1)
    assert list((tmp_path / "save" / "hugging_face").iterdir()) == []


def test_a_run_puts_it_through_no_link(published: Path, tmp_path: Path) -> None:
    save = tmp_path / "save"
    (save / "hugging_face").mkdir(parents=True)
    replace_by_link(save / "hugging_face" / "config.json", tmp_path / "secret")
    with pytest.raises(
        CheckpointError, match=r"hugging_face/config.json: it is a link to .*secret, not a regular file"
    ):
        run(published, save, model=published / "llama", train_iters=1)
    shutil.rmtree(save / "hugging_face")
    (tmp_path / "elsewhere").mkdir()
    replace_by_link(save / "hugging_face", tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match=r"save/hugging_face is a link to .*elsewhere, outside of"):
        run(published, save, model=published / "llama", train_iters=1)
    assert (tmp_path / "secret").read_text() == SECRET and not list((tmp_path / "elsewhere").iterdir())
