"""What somebody types in the first hour with memo, and what it shows; test_cli_refusals.py has what is typed wrong."""

import shlex
from pathlib import Path

import pytest
import users_home

from memo.cli.main import main


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("home")
    users_home.fill(folder)
    return folder


@pytest.fixture(autouse=True)
def at_home(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(home)
    for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)


SMALL = "--seq-len 128 --dtype fp32 --num-threads 1 --no-progress"

RIGHT = [
    ("help", "memo COMMAND --help"),
    ("help train", "the flags that everyone needs:"),
    ("train --help", "torchrun --nproc-per-node 8 -m memo train"),
    ("train --help memory", "--offload-alpha off|auto|NUMBER"),
    ("train --help-all", "--numa-binding"),
    ("plan --help", "--seq-len 128K"),
    ("profile --help", "Measure one layer"),
    ("data build --help", "memo data build texts.jsonl data/mine --tokenizer Llama-3.1-8B"),
    ("plan --model llama-3.1-8b --gpus 8 --seq-len 32K --hardware h100-80 --top 1", "32,768 tokens x 8 sequences"),
    ("plan --model llama-3.1-8b --gpus 8 --seq-len 32K --gpu h100-80 --top 1", "8 x h100-80"),
    ("estimate --model llama-3.1-8b --tp 8 --seq-len 64k", "65,536 tokens"),
    ("estimate --model QWEN3-32B --tp 8 --seq-len 8K", "8,192 tokens"),
    ("plan --model Qwen3-32B --gpus 8 --hardware h100-80 --top 1", "-m memo train --model qwen3-32b "),
    ("estimate --model Llama/checkpoint-7 --seq_len=1K", "1,024 tokens"),
    ("hardware h100-80", "peak_tflops"),
    ("data chat chats.jsonl data/chat --tokenizer byte --chat-template chat.jinja", "data/chat: 1 conversations"),
    ("data build list.json.gz data/list --text-column body", ": 8 documents, 2.89K tokens, tokenizer byte"),
    (
        f"train --model llama-tiny --data-path 0.7 data/mine 0.3 data/list --train-iters 2 {SMALL}",
        "a blend of 2 corpora",
    ),
    (
        f"train --model llama-tiny --data-path data/mine --split 6,1,1 --eval-interval 2 --train-iters 2 {SMALL}",
        "test loss ",
    ),
    (f"train --model llama-tiny --mock-data --train-iters 2 {SMALL}", "iteration 2/2 | loss "),
    (f"train --model llama-tiny --data-path data/mine --num-epochs 1 --gbs 8 {SMALL}", "iteration 3/3 | loss "),
]


@pytest.mark.parametrize(("line", "shows"), RIGHT, ids=[line for line, _ in RIGHT])
def test_what_works(line: str, shows: str, capfd: pytest.CaptureFixture[str]) -> None:
    try:
        status = main(shlex.split(line))
    except SystemExit as stopped:
        status = stopped.code if isinstance(stopped.code, int) else 1
    captured = capfd.readouterr()
    assert status == 0, captured.err
    assert shows in captured.out


def test_a_model_that_was_made_for_shorter_sequences_is_told_of_once(capfd: pytest.CaptureFixture[str]) -> None:
    plan = "plan --model Llama/checkpoint-7 --gpus 8 --seq-len 4K --top 1"
    train = f"train --model llama-tiny --mock-data --train-iters 1 --max-position-embeddings 64 {SMALL}"
    yarn = "--rope-scaling-type yarn --rope-scaling-factor 2 --rope-original-max-position-embeddings 64"
    for line, told in ((plan, (4096, 1024, 4)), (train, (128, 64, 2)), (f"{train} {yarn}", None)):
        assert main(shlex.split(line)) == 0
        warnings = [each for each in capfd.readouterr().err.splitlines() if each.startswith("warning: --seq-length")]
        assert len(warnings) == (told is not None)
        if told is not None:
            length, made_for, factor = told
            assert warnings[0].startswith(
                f"warning: --seq-length {length} is more than the {made_for} tokens that the model"
            )
            assert f"--rope-scaling-type yarn --rope-scaling-factor {factor} " in warnings[0]
            assert f"--rope-original-max-position-embeddings {made_for}, or" in warnings[0]
