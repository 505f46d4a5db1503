"""What goes wrong with checkpoints: each failure has one message, and the last whole checkpoint stays."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from layouts import make, one_step_backward, tiny
from ranks import run_ranks

from memo.checkpoint import index
from memo.checkpoint.directory import has_checkpoint, latest_checkpoint
from memo.checkpoint.run_state import RunState
from memo.checkpoint.store import load_checkpoint, save_checkpoint
from memo.config import RunConfig
from memo.errors import CheckpointError
from memo.train.parallel_model import ParallelModel

torch.set_num_threads(1)


def state_at(iteration: int) -> RunState:
    return RunState(iteration, 4 * iteration, 7, iteration, 0, 0)


def save(model: ParallelModel, directory: Path, iteration: int) -> Path:
    return save_checkpoint(directory, state_at(iteration), model.optimizer.segment_states(), model.mesh)


def load(model: ParallelModel, directory: Path) -> RunState:
    return load_checkpoint(directory, model.optimizer.segment_states(), model.mesh)


def masters(model: ParallelModel) -> torch.Tensor:
    return torch.cat([segment.weight.detach().clone() for segment in model.optimizer.segments])


def trained(config: RunConfig, world_size: int = 1) -> ParallelModel:
    model, feed = make(config, world_size)
    one_step_backward(model, feed)
    model.optimizer.step(1e-2)
    return model


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("checkpoint")
    save(trained(tiny()), directory, 3)
    return directory


def test_an_index_that_nobody_could_read_is_not_published(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(checkpoint, tmp_path / "run")
    monkeypatch.setattr(index, "MAX_BYTES", 1000)
    with pytest.raises(CheckpointError, match=r"index.json would have \d+ bytes, but 1000 is the most that is read"):
        save(trained(tiny()), tmp_path / "run", 4)
    assert latest_checkpoint(tmp_path / "run").name == "iter_0000003"


def test_no_checkpoint(tmp_path: Path) -> None:
    assert not has_checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match=r"--load .*latest_checkpointed_iteration.txt is not there.*--save"):
        latest_checkpoint(tmp_path)


def test_pointer_to_nothing(tmp_path: Path) -> None:
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("12\n")
    with pytest.raises(CheckpointError, match="names iter_0000012, which is not there"):
        latest_checkpoint(tmp_path)


@pytest.mark.parametrize("text", ["", "release\n"])
def test_pointer_that_is_no_number(tmp_path: Path, text: str) -> None:
    (tmp_path / "latest_checkpointed_iteration.txt").write_text(text)
    with pytest.raises(CheckpointError, match=r"latest_checkpointed_iteration.txt: holds .*number"):
        latest_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"hidden_size": 48}, r"has shape \(.*32.*\) there and shape \(.*48.*\) in this model.*model flags"),
        ({"num_layers": 3}, r"exp_avg/layers\.2\.\S+ has no place there and shape .* so it is of another"),
        (
            {"num_layers": 1},
            r"exp_avg/layers\.1\.\S+ has shape .* there and no place in this model.*another: give the model",
        ),
        ({"untie_embeddings_and_output_weights": True}, r"exp_avg/head\.weight has no place there"),
    ],
    ids=["width", "deeper", "shallower", "untied"],
)
def test_another_model(checkpoint: Path, overrides: dict[str, object], message: str) -> None:
    model, _ = make(tiny(**overrides), 1)
    before = masters(model)
    with pytest.raises(CheckpointError, match=message):
        load(model, checkpoint)
    assert torch.equal(masters(model), before)


def _load_another_model(directory: Path) -> str:
    """Only the last stage lacks something, yet every rank must say so, or the others would wait."""
    model, _ = make(tiny(pp=2, untie_embeddings_and_output_weights=True), 2)
    with pytest.raises(CheckpointError) as caught:
        load(model, directory)
    return str(caught.value)


def test_another_model_is_refused_by_every_rank_alike(checkpoint: Path) -> None:
    messages = run_ranks(2, _load_another_model, checkpoint)
    assert messages[0] == messages[1]
    assert "exp_avg/head.weight has no place there" in messages[0]


def test_a_run_state_of_another_version(checkpoint: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(checkpoint, copy)
    model, _ = make(tiny(), 1)
    state = copy / "iter_0000003" / "run_state.json"
    content = json.loads(state.read_text())
    state.write_text(json.dumps({**content, "schema_version": 99}))
    with pytest.raises(CheckpointError, match=r"is of schema 99, but this version of memo reads schema 3; use"):
        load(model, copy)


@pytest.mark.parametrize("victim", ["tensors-00000.bin", "index.json", "run_state.json"])
def test_a_damaged_checkpoint(checkpoint: Path, tmp_path: Path, victim: str) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(checkpoint, copy)
    model, _ = make(tiny(), 1)
    for damage in (lambda path: path.write_bytes(path.read_bytes()[:40]), Path.unlink):
        damage(copy / "iter_0000003" / victim)
        with pytest.raises(CheckpointError, match=rf"iter_0000003 cannot be read \({victim}:? .*\): there is no other"):
            load(model, copy)


def test_what_an_interrupted_save_left_is_removed_by_the_next(tmp_path: Path) -> None:
    for name in ("iter_0000001.partial", "iter_0000002.partial"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "garbage").write_text("x")
    assert not has_checkpoint(tmp_path)
    model, _ = make(tiny(), 1)
    save(model, tmp_path, 2)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["iter_0000002", "latest_checkpointed_iteration.txt"]
    assert not (tmp_path / "iter_0000002" / "garbage").exists()


def test_a_directory_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a directory")
    model, _ = make(tiny(), 1)
    with pytest.raises(CheckpointError, match=r"iteration 1 could not be written.*choose another directory"):
        save(model, tmp_path / "file", 1)
