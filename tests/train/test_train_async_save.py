"""--async-save: training goes on meanwhile, what is written is the state at the save, and errors come out."""

import resource
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from checkpoints import assert_equal_bits, contents
from layouts import assemble, global_pieces
from ranks import run_ranks
from torch import Tensor
from trainers import tiny_trainer

import memo
from memo.checkpoint import store
from memo.checkpoint.directory import has_checkpoint, latest_checkpoint
from memo.errors import CheckpointError

TIMEOUT_S = 20.0


def trainer(folder: Path, **overrides: Any) -> memo.Trainer:
    return tiny_trainer(**{"train_iters": 4, "save": str(folder), "async_save": True, **overrides})


def before_writing(action: Callable[[], None]) -> None:
    """Have this rank's next write of tensors call `action` first; ranks are processes of one test."""
    write = store.write_file

    def wrapped(*args: Any) -> Any:
        store.write_file = write
        action()
        return write(*args)

    store.write_file = wrapped


def _saved_beside_the_next_step(folder: Path, dtype: str) -> dict[str, Tensor]:
    """This rank's masters at the save; nothing of them is read before the next backward is done."""
    backward_done = threading.Event()

    def read_late() -> None:
        assert backward_done.wait(TIMEOUT_S), "the next step did not begin before the write was done"
        time.sleep(0.2)  # the update takes a thousandth of that: it would come first, if it did not wait

    with trainer(folder, params_dtype=dtype) as made:
        made.step()
        optimizer, norm = made.parts.optimizer, made.parts.data_parallel.main_gradients.norm
        expected = {name: value.clone() for name, value in global_pieces(made.parts, "master").items()}

        def gradient_norm() -> Tensor:
            backward_done.set()
            return norm()

        optimizer.data_parallel.main_gradients.norm = gradient_norm  # type: ignore[method-assign]
        before_writing(read_late)
        made.save()
        assert made.step().iteration == 2
        now = global_pieces(made.parts, "master")
        # A rank whose shard is all padding has nothing.
        assert any(not torch.equal(now[name].nan_to_num(), value.nan_to_num()) for name, value in expected.items())
        made.persistence.finish()
    return expected


@pytest.mark.parametrize(("world_size", "dtype"), [(1, "fp32"), (2, "fp32"), (2, "bf16")])
def test_the_next_backward_runs_meanwhile_and_the_update_waits(tmp_path: Path, world_size: int, dtype: str) -> None:
    """fp32 weights are their own masters; bf16 ones have masters beside them."""
    parts = run_ranks(world_size, _saved_beside_the_next_step, tmp_path, dtype)
    state, values = contents(latest_checkpoint(tmp_path))
    assert state.iteration == 1
    for name, value in assemble(parts).items():
        assert torch.equal(values[f"master/{name}"], value), name


def _train(folder: Path, **overrides: Any) -> None:
    with trainer(folder, **overrides) as made:
        made.train()


def test_it_writes_what_a_plain_save_writes(tmp_path: Path) -> None:
    for kind in ("plain", "beside"):
        values = {"pp": 2, "save_interval": 1, "async_save": kind == "beside", "keep_latest_k": 2}
        run_ranks(2, _train, tmp_path / kind, **values)
    for iteration in (3, 4):  # the older two are gone
        assert_equal_bits(*(tmp_path / kind / f"iter_{iteration:07d}" for kind in ("plain", "beside")))
    for kind in ("plain", "beside"):
        assert sorted(path.name for path in (tmp_path / kind).glob("iter_*")) == ["iter_0000003", "iter_0000004"]


def _one_rank_is_late(folder: Path) -> None:
    go = threading.Event()

    def wait() -> None:
        assert go.wait(TIMEOUT_S)

    if dist.get_rank() == 1:
        before_writing(wait)
    with trainer(folder) as made:
        made.step()
        made.save()
        time.sleep(0.3)
        assert not has_checkpoint(folder), "the pointer moved before all ranks had written"
        dist.barrier()
        go.set()
        made.persistence.finish()
        assert has_checkpoint(folder)


def test_the_pointer_moves_when_all_ranks_have_written(tmp_path: Path) -> None:
    run_ranks(2, _one_rank_is_late, tmp_path)


def _disk_fills_up(folder: Path, when: str) -> tuple[str, int]:
    """(message, iteration at which it came), with one save that fits and one that does not fit rank 1's disk."""
    made = trainer(folder)
    made.step()
    made.save()
    made.persistence.finish()
    made.step()
    unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
    if dist.get_rank() == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2048, unlimited[1]))
    with pytest.raises(CheckpointError) as caught, made:
        made.save()
        if when == "at a later step":
            for _ in range(200):
                made.step()
        elif when == "at the next save":
            made.save()
    resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
    made.close()  # it came out once
    return str(caught.value), made.iteration


@pytest.mark.parametrize("when", ["at a later step", "at the next save", "at close"])
def test_a_full_disk_comes_out_on_every_rank_after_the_same_step(tmp_path: Path, when: str) -> None:
    results = run_ranks(2, _disk_fills_up, tmp_path, when)
    assert results[0] == results[1]
    message, iteration = results[0]
    assert f"--save {tmp_path}: iteration 2 could not be written (OSError: [Errno 27] File too large" in message
    assert "\n" not in message and "older checkpoints there are untouched: free disk space" in message
    assert 3 <= iteration < 100 if when == "at a later step" else iteration == 2
    assert contents(latest_checkpoint(tmp_path))[0].iteration == 1
    assert not list(tmp_path.glob("*.partial"))  # the disk is not full of what nobody can load


def _error_of_ones_own(folder: Path) -> None:
    before_writing(_fail)
    with trainer(folder) as made:
        made.step()
        made.save()
        raise KeyError("mine")


def _fail() -> None:
    raise OSError(28, "No space left on device")


def test_the_first_error_is_the_one_that_is_told(tmp_path: Path) -> None:
    with pytest.raises(KeyError, match="mine"):
        _error_of_ones_own(tmp_path)


def test_close_waits_until_the_checkpoint_is_whole(tmp_path: Path) -> None:
    before_writing(lambda: time.sleep(0.3))
    with trainer(tmp_path) as made:
        made.step()
        path = made.save()
        assert not path.exists()
    assert latest_checkpoint(tmp_path) == path
