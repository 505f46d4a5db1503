"""The example as torchrun starts it: ranks that are killed cost time, and not one bit.

They are forked with the variables that torchrun gives its ranks, and a store such as it keeps. torchrun itself starts
and restarts some in the full tests, and two ranks that train like one process in test_two_nodes.py.
"""

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from checkpoints import assert_equal_bits
from forked import ROOT, Process, finish, fork, own_store, world
from processes import by_hand, by_torchrun
from ranks import run_ranks

from memo.checkpoint.directory import latest_checkpoint
from memo.errors import EXIT_FAILED
from memo.train.entry import main

EXAMPLE = ROOT / "examples" / "pretrain_gpt.py"
FLAGS = [
    *("--model", "llama-tiny", "--num-layers", "2", "--hidden-size", "32", "--num-attention-heads", "4"),
    *("--num-query-groups", "2", "--ffn-hidden-size", "64", "--vocab-size", "64", "--mock-data"),
    *("--seq-len", "64", "--global-batch-size", "2", "--train-iters", "20", "--lr", "1e-2"),
    *("--lr-warmup-iters", "4", "--device", "cpu", "--num-threads", "1", "--peak-tflops", "1"),
]


def arguments_of(folder: Path, flags: list[str]) -> list[str]:
    return [*FLAGS, *flags, "--log-jsonl", str(folder / "log.jsonl")]


def start(folder: Path, name: str, arguments: list[str], world: dict[str, str], script: Path = EXAMPLE) -> Process:
    environment = {**os.environ, **world, "OMP_NUM_THREADS": "1"}
    return fork("file", script, arguments, environment, folder / f"{name}.out", folder / f"{name}.err")


DIES = """
import os, signal, sys, time
from pathlib import Path

from memo.checkpoint.directory import has_checkpoint
from memo.checkpoint import writer
from memo.parallel.main_gradients import MainGradients
from memo.train.entry import main

folder = Path(sys.argv[1])


def rank_1_dies_at(moment, call, owner, name):
    inner, calls = getattr(owner, name), 0

    def wrapped(*args, **kwargs):
        nonlocal calls
        calls += 1
        if os.environ["RANK"] == "1" and calls == call:
            while not has_checkpoint(folder / "killed"):  # of step 2, which a thread may be about to finish
                time.sleep(0.01)
            (folder / moment).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return inner(*args, **kwargs)

    setattr(owner, name, wrapped)


if not (folder / "in a step").exists():
    rank_1_dies_at("in a step", 3, MainGradients, "finish_reduction")
elif not (folder / "in a save").exists():
    rank_1_dies_at("in a save", 20, writer, "write_values")
raise SystemExit(main(sys.argv[2:]))
"""
MOMENTS = ("in a step", "in a save")
"""Of the first two lives: in step 3, after its backward; amid the file that is written after step 4."""
SAVING = (
    *("--params-dtype", "bf16", "--train-iters", "6", "--save-interval", "2", "--async-save"),
    *("--offload-alpha", "off"),
)
TwoLives = Callable[[Path, Path, list[str]], None]


def _uninterrupted(flags: list[str]) -> None:
    assert main(flags) == 0


def two_lives_of_torchrun(folder: Path, script: Path, arguments: list[str]) -> None:
    with by_torchrun(2, folder, [str(script), *arguments], "--max-restarts", "1") as ranks:
        end = ranks.ended(0)
    assert end.status == 0, end.errors[:6000]  # the ranks' own words; torchrun sums up at the end


def two_lives_like_torchruns(folder: Path, script: Path, arguments: list[str]) -> None:
    """Both lives of the ranks have one store, and the first rank is asked to end when the other has died."""
    store = own_store()
    for life in ("0", "1"):
        variables = [{**its, "TORCHELASTIC_RESTART_COUNT": life} for its in world(2, store)]
        ranks = [start(folder, f"life {life} {its['RANK']}", arguments, its, script) for its in variables]
        if life == "0":
            assert ranks[1].wait() == -signal.SIGKILL
            ranks[0].send_signal(signal.SIGTERM)
            ranks[0].wait()
    finish(ranks)


@pytest.mark.parametrize(
    "two_lives", [two_lives_like_torchruns, pytest.param(two_lives_of_torchrun, marks=pytest.mark.full)]
)
def test_ranks_that_are_killed_cost_time_alone(two_lives: TwoLives, tmp_path: Path) -> None:
    """One command line for three lives: --load, the same as --save, finds the way.

    The first is two processes started by hand, which end; the second is torchrun's or like its, and the third its
    restart.
    """
    script, saved = tmp_path / "dies.py", tmp_path / "killed"
    script.write_text(DIES)

    def flags(folder: Path) -> list[str]:
        where = ["--save", str(folder), "--load", str(folder), "--log-jsonl", str(folder / "log.jsonl")]
        return [*FLAGS, *SAVING, *where, "--no-progress"]

    arguments = [str(tmp_path), *flags(saved)]
    with by_hand(2, tmp_path, ("file", str(script)), arguments) as ranks:
        assert ranks.ended(1).status == -signal.SIGKILL
        assert ranks.ended(0).status == EXIT_FAILED
    two_lives(tmp_path, script, arguments)
    assert all((tmp_path / moment).exists() for moment in MOMENTS)
    run_ranks(2, _uninterrupted, flags(tmp_path / "whole"))

    def records(folder: Path) -> list[tuple[int, float, float]]:
        rows = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
        return [(row["iteration"], row["lm_loss"], row["grad_norm"]) for row in rows]

    whole, killed = records(tmp_path / "whole"), records(saved)
    assert set(killed) == set(whole)  # what is computed again comes out the same
    iterations = [iteration for iteration, _, _ in killed]
    assert iterations == [1, 2, 3, 4, 3, 4, 5, 6]  # the second and third life began after step 2
    assert_equal_bits(latest_checkpoint(saved), latest_checkpoint(tmp_path / "whole"))
    assert not list(saved.glob("*.partial"))
