"""One run in a --save directory at a time, none over another's checkpoints, and room for what comes."""

import contextlib
import io
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from layouts import tiny
from ranks import run_ranks
from small_disk import small_disk
from trainers import tiny_trainer

import memo
from memo.checkpoint.directory import latest_checkpoint
from memo.checkpoint.owner import OWNER
from memo.errors import CheckpointError, ConfigError, MemoError, ResourceError
from memo.estimate.state_memory import checkpoint_bytes
from memo.train.outputs import check_writable
from memo.units import format_bytes

RANKS = pytest.mark.parametrize("world_size", [1, 2])
POINTER = "latest_checkpointed_iteration.txt"


def trainer(folder: Path, **overrides: Any) -> memo.Trainer:
    return tiny_trainer(**{"train_iters": 4, "save": str(folder), **overrides})


def _train(folder: Path, **overrides: Any) -> int:
    with trainer(folder, **overrides) as made:
        made.train()
        return made.iteration


def _refusal(folder: Path, **overrides: Any) -> tuple[str, str]:
    with pytest.raises(MemoError) as caught, trainer(folder, **overrides) as made:
        made.train()
    return type(caught.value).__name__, str(caught.value)


def _two_runs(folder: Path) -> list[tuple[str, str]]:
    with trainer(folder, train_iters=2) as first:
        first.step()
        found = [_refusal(folder)]
        first.train()  # the refused one has taken nothing away
    assert first.iteration == 2
    return [*found, _refusal(folder)]


@RANKS
def test_a_second_run_is_refused_while_the_first_lives(tmp_path: Path, world_size: int) -> None:
    results = run_ranks(world_size, _two_runs, tmp_path)
    assert all(result == results[0] for result in results)
    (kind, beside), (_, after) = results[0]
    assert kind == "CheckpointError" and f"--save {tmp_path} belongs to another run, process " in beside
    assert f"--save {tmp_path} holds iter_0000002 of an earlier run" in after  # nobody owns it any more
    assert not (tmp_path / OWNER).exists()
    assert latest_checkpoint(tmp_path).name == "iter_0000002"


def test_a_checkpoint_is_not_trained_over_without_load(tmp_path: Path) -> None:
    world_size = 2
    run_ranks(world_size, _train, tmp_path)
    log = (tmp_path / "log.jsonl").read_text()
    for other in ({}, {"load": str(tmp_path / "other")}):
        if other:
            run_ranks(world_size, _train, tmp_path / "other", train_iters=1)
        for kind, message in run_ranks(world_size, _refusal, tmp_path, train_iters=8, **other):
            assert kind == "ConfigError"
            now = f"is {other['load']}" if other else "is not given"
            assert f"--save {tmp_path} holds iter_0000004 of an earlier run, but --load {now}: give --load" in message
    assert (tmp_path / "log.jsonl").read_text() == log
    assert (tmp_path / POINTER).read_text() == "4\n"
    both = {"load": str(tmp_path), "train_iters": 6}
    assert run_ranks(world_size, _train, tmp_path, **both) == [6] * world_size


def test_a_lost_pointer_does_not_start_anew(tmp_path: Path) -> None:
    run_ranks(1, _train, tmp_path, save_interval=2)
    (tmp_path / POINTER).unlink()
    ((kind, message),) = run_ranks(1, _refusal, tmp_path)
    assert kind == "ConfigError" and "holds iter_0000004 of an earlier run" in message
    printed = run_ranks(1, _go_on, tmp_path, train_iters=5)
    missing = f"loaded checkpoint {tmp_path} at iteration 4, the newest whole one there: {POINTER} is missing"
    assert missing in printed[0].splitlines()
    assert (tmp_path / POINTER).read_text() == "5\n"


def _go_on(folder: Path, **overrides: Any) -> str:
    with contextlib.redirect_stdout(io.StringIO()) as out:
        _train(folder, load=str(folder), **overrides)
    return out.getvalue()


def test_one_checkpoint_of_the_directory_may_be_gone_back_to(tmp_path: Path) -> None:
    _train(tmp_path, save_interval=2)
    older = tmp_path / "iter_0000002"
    assert _train(tmp_path, load=str(older), train_iters=3) == 3
    assert latest_checkpoint(tmp_path).name == "iter_0000003"


@pytest.mark.parametrize(
    "name", ["x" * 300, "a\0b", "loop/below", "gone"], ids=["long", "no name", "circle", "dangling"]
)
def test_a_path_that_cannot_be_made_is_one_message(tmp_path: Path, name: str) -> None:
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "gone").symlink_to(tmp_path / "nowhere" / "else")
    with pytest.raises(ConfigError, match=r"--save .*: give another path"):
        trainer(tmp_path / name)
    with pytest.raises(CheckpointError, match=r"--load .*: latest_checkpointed_iteration.txt is not there"):
        trainer(tmp_path, load=str(tmp_path / name))
    with pytest.raises(ConfigError, match=r"--log-jsonl .*: give another path"):
        memo.Trainer(config=tiny(), log_jsonl=f"{tmp_path}/{name}/log", num_threads=1, peak_tflops=1.0)


def test_a_log_whose_name_is_a_link_is_refused(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    log.symlink_to(tmp_path / "nowhere" / "log.jsonl")
    with pytest.raises(ConfigError, match=r"--log-jsonl .*cannot be made \(it is a link to .*log.jsonl, through"):
        check_writable("--log-jsonl", str(log), is_directory=False)


def test_all_ranks_of_a_machine_may_look_at_one_log_at_one_time(tmp_path: Path) -> None:
    """Each of them asks whether it could be written, and none must meet what another one tries."""
    log = tmp_path / "run" / "log.jsonl"

    def ask(_: int) -> None:
        for _ in range(300):
            check_writable("--log-jsonl", str(log), is_directory=False)

    with ThreadPoolExecutor(8) as ranks:
        list(ranks.map(ask, range(8)))
    assert list(log.parent.iterdir()) == []


def test_what_a_checkpoint_takes_is_foreseen(tmp_path: Path) -> None:
    made = trainer(tmp_path, train_iters=1, vocab_size=4000, params_dtype="bf16")
    with made:
        made.train()
    taken_bytes = sum(path.stat().st_size for path in latest_checkpoint(tmp_path).iterdir())
    foreseen_bytes = checkpoint_bytes(made.config, 1)
    assert foreseen_bytes <= taken_bytes <= foreseen_bytes + 50_000  # the index


@pytest.fixture
def disk(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Path]:
    """Room for so many checkpoints of the tiny model."""
    with small_disk(tmp_path, int(request.param * checkpoint_bytes(tiny("llama-tiny", "fp32"), 1))) as folder:
        yield folder


@RANKS
@pytest.mark.parametrize("disk", [1.9], indirect=True)
def test_a_disk_for_one_checkpoint_is_refused_before_the_first_step(disk: Path, world_size: int) -> None:
    results = run_ranks(world_size, _refusal, disk)
    assert len(set(results)) == 1
    kind, message = results[0]
    size = checkpoint_bytes(tiny("llama-tiny", "fp32"), 1)
    assert kind == "ResourceError" and f"2 checkpoints of {format_bytes(size)} must fit: " in message
    assert f"--save {disk}: its file system has " in message and " is missing; free disk space" in message
    assert list(disk.iterdir()) == []


@pytest.mark.parametrize("disk", [3.0], indirect=True)
def test_older_checkpoints_that_will_go_make_room(disk: Path) -> None:
    same = {"load": str(disk), "keep_latest_k": 1, "save_interval": 1}
    _train(disk, **same, train_iters=1)
    (disk / "fill").write_bytes(bytes(int(0.6 * checkpoint_bytes(tiny("llama-tiny", "fp32"), 1))))
    with pytest.raises(ResourceError, match="2 checkpoints of"):
        trainer(disk, load=str(disk))
    assert _train(disk, **same, train_iters=4) == 4
    half = disk / "iter_0000009.partial"  # a save that was killed
    half.mkdir()
    (half / "tensors").write_bytes(bytes(int(0.9 * checkpoint_bytes(tiny("llama-tiny", "fp32"), 1))))
    assert _train(disk, **same, train_iters=5) == 5


def test_a_run_that_was_refused_leaves_no_claim(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError):
        trainer(tmp_path / "new", load=str(tmp_path / "missing"))
    with trainer(tmp_path / "new"):
        assert (tmp_path / "new" / OWNER).exists()
    assert not (tmp_path / "new" / OWNER).exists()


def test_a_run_that_was_refused_leaves_no_empty_folder(tmp_path: Path) -> None:
    """It removes the folders that it made, and none that was there before."""
    (tmp_path / "there").mkdir()
    for folder in ("new/run", "there"):
        with pytest.raises(ResourceError):
            trainer(tmp_path / folder, seq_length=1 << 24)
    assert list(tmp_path.iterdir()) == [tmp_path / "there"]
