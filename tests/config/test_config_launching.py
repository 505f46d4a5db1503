"""What to type where several ranks are asked for and nothing has started them."""

import pytest

from memo.config import RunConfig
from memo.config.flags import parse_run
from memo.config.launching import check_ranks, torchrun, wanted_ranks
from memo.errors import ConfigError


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)


@pytest.mark.parametrize(
    ("ranks", "start"),
    [
        (1, "torchrun --nproc-per-node 1 "),
        (8, "torchrun --nproc-per-node 8 "),
        (12, "torchrun --nnodes 2 --nproc-per-node 6 --rdzv-backend c10d --rdzv-endpoint FIRST_NODE:29500 "),
        (64, "torchrun --nnodes 8 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint FIRST_NODE:29500 "),
    ],
)
def test_nodes_of_at_most_eight(ranks: int, start: str) -> None:
    assert torchrun("memo train", ["--tp", "2"], ranks) == f"{start}-m memo train --tp 2"
    script = "examples/pretrain_gpt.py"
    assert torchrun(script, ["--save", "my run"], ranks) == f"{start}{script} --save 'my run'"


def run(flags: str) -> RunConfig:
    return parse_run(["--mock-data", *flags.split()], prog="memo train")


def test_what_else_is_wrong_is_told_first() -> None:
    with pytest.raises(ConfigError, match="--num-attention-heads 4 does not divide by --tp 8"):
        check_ranks(run("--tp 8"), "memo train", [])


def test_one_rank_needs_no_launcher_and_a_simulated_world_none_either() -> None:
    check_ranks(run(""), "memo train", [])
    assert wanted_ranks(run("--tp 2 --simulate-world tp=2,pp=2").parallel) == 4
