"""What somebody types in the first hour with memo, right and wrong, and what must happen each time.

Every wrong line ends with status 2 and one line on standard error, which says what to type instead. All run in this
process: a person waits for each of them.
"""

import gzip
import json
import os
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from suggestions import check_parses, suggested

from memo.cli.main import main

LLAMA = (
    '{"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 256,'
    ' "num_key_value_heads": 2, "intermediate_size": 128, "rms_norm_eps": 1e-5, "max_position_embeddings": 1024}'
)
PARAGRAPHS = ["The quick brown fox jumps over the lazy dog. " * 8] * 8


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What lies in the folder of somebody who begins."""
    folder = tmp_path_factory.mktemp("home")
    for name in ("empty", "texts", "Llama/checkpoint-7", "adapter", "gguf", "DeepSeek"):
        (folder / name).mkdir(parents=True)
    (folder / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in PARAGRAPHS))
    (folder / "chats.jsonl").write_text(
        '{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}\n'
    )
    (folder / "numbers.jsonl").write_text('{"text": 5}\n')
    (folder / "both.jsonl").write_text('{"messages": [{"role": "user"}], "conversations": [{"from": "human"}]}\n')
    (folder / "list.json.gz").write_bytes(gzip.compress(json.dumps([{"body": text} for text in PARAGRAPHS]).encode()))
    (folder / "chat.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    (folder / "texts" / "a.txt").write_text("some text")
    (folder / "my texts.txt").write_text("some text")
    (folder / "table.parquet").write_bytes(b"PAR1")
    (folder / "run.toml").write_text('seq_length = "128"\ntrain_iters = 2\n')
    (folder / "Llama" / "checkpoint-7" / "config.json").write_text(LLAMA)
    (folder / "gguf" / "model.gguf").write_bytes(b"GGUF")
    (folder / "adapter" / "adapter_config.json").write_text("{}")
    (folder / "DeepSeek" / "config.json").write_text('{"model_type": "deepseek_v3", "n_routed_experts": 256}')
    (folder / "runs").mkdir()
    (folder / "runs" / "latest_checkpointed_iteration.txt").write_text("2")
    assert main(["data", "build", str(folder / "texts.jsonl"), str(folder / "data" / "mine")]) == 0
    shutil.copy(folder / "data" / "mine.bin", folder / "data" / "half.bin")
    return folder


@pytest.fixture(autouse=True)
def at_home(home: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(home)
    for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    yield


SMALL = "--seq-len 128 --dtype fp32 --num-threads 1 --no-progress"

RIGHT = [
    ("help", "memo COMMAND --help"),
    ("help train", "the flags that everyone needs:"),
    ("train --help", "torchrun --nproc-per-node 8 -m memo train"),
    ("train --help memory", "--offload-alpha off|auto|NUMBER"),
    ("train --help-all", "--numa-binding"),
    ("plan --help", "--seq-len 128K"),
    ("data build --help", "memo data build texts.jsonl data/mine --tokenizer Llama-3.1-8B"),
    ("plan --model llama-3.1-8b --gpus 8 --seq-len 32K --hardware h100-80 --top 1", "32,768 tokens x 8 sequences"),
    ("plan --model llama-3.1-8b --gpus 8 --seq-len 32K --gpu h100-80 --top 1", "8 x h100-80"),
    ("estimate --model llama-3.1-8b --tp 8 --seq-len 64k", "65,536 tokens"),
    ("estimate --model QWEN3-32B --tp 8 --seq-len 8K", "8,192 tokens"),
    ("plan --model Qwen3-32B --gpus 8 --hardware h100-80 --top 1", "qwen3-32b on 8 x h100-80"),
    ("plan --model Qwen3-32B --gpus 8 --hardware h100-80 --top 1", "-m memo train --model qwen3-32b "),
    ("estimate --model Llama/checkpoint-7 --seq_len=1K", "1,024 tokens"),
    ("hardware h100-80", "peak_tflops"),
    ("data chat chats.jsonl data/chat --tokenizer byte --chat-template chat.jinja", "data/chat: 1 conversations"),
    ("data build list.json.gz data/list --text-column body", "data/list: 8 documents"),
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
    Path("chat.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    try:
        status = main(shlex.split(line))
    except SystemExit as stopped:
        status = stopped.code if isinstance(stopped.code, int) else 1
    captured = capfd.readouterr()
    assert status == 0, captured.err
    assert shows in captured.out


WRONG = [
    # Names of commands and flags.
    ("trian --model llama-tiny", "did you mean 'memo train'?"),
    ("sft --model Llama", "memo calls it finetune: `memo finetune --model DIR --train-data chats.jsonl --save OUT`"),
    ("chat --model Llama", "`memo generate --chat --model DIR --prompt TEXT` prints what a model answers"),
    (
        "serve runs",
        "`memo export RUN --out DIR` writes a model for Hugging Face, and `vllm serve DIR` serves it",
    ),
    (
        "convert Llama x",
        "`memo import DIR --out CKPT` reads a model of Hugging Face, `memo export CKPT --out DIR` writes",
    ),
    ("preprocess_data texts.jsonl x", "`memo data build texts.jsonl PREFIX` makes a corpus of texts"),
    ("tokenize texts.jsonl x", "`memo data build texts.jsonl PREFIX` makes a corpus of texts"),
    ("data tokenize texts.jsonl x", "`memo data build texts.jsonl PREFIX` makes a corpus of texts"),
    ("quantize Llama", "there is no command 'quantize': use one of train, "),
    ("import --model Llama --out x", "there is no flag --model: the directory stands alone: `memo import Llama --out"),
    ("export --load runs --out x", "the directory of the run stands alone: `memo export runs --out DIR"),
    (
        "train config.yaml",
        "'config.yaml' belongs to no flag: give the fields of a run as --config config.toml, written",
    ),
    ("train run.toml --mock-data", "'run.toml' belongs to no flag: give the fields of a run as --config run.toml\n"),
    ("train --num-experts 2 --moe-router-topk 4 --mock-data", "--moe-router-topk 4 is above --num-experts 2"),
    (
        "train --num-experts 2 --moe-layer-freq 2 --mock-data",
        "--moe-layer-freq is '2': give a string that is a sum",
    ),
    (
        "train --num-experts 2 --moe-layer-freq [0]+[1]*4 --mock-data",
        "not have one number for each of --num-layers 4",
    ),
    ("train --num-experts 2 --moe-layer-freq [0]*4 --mock-data", "gives no layer any of --num-experts 2"),
    ("train --moe-ffn-hidden-size 64 --mock-data", "has no use where --num-experts is 0: give --num-experts 8, or"),
    ("train --rotary-percent 0.3 --mock-data", "--rotary-percent 0.3 of heads of 32 are 9 channels"),
    ("train --load-in-4bit", "memo calls it --quantize nf4 (4 bits) or int8"),
    ("train --model lama-tiny --mock-data", "--model lama-tiny: no such preset: did you mean 'llama-tiny'?"),
    ("train --learning-rate 1e-4 --mock-data", "there is no flag --learning-rate: memo calls it --lr"),
    ("train --learning_rate=1e-4 --mock-data", "there is no flag --learning-rate: memo calls it --lr"),
    ("train --num_train_epochs 3", "memo calls it --num-epochs: passes over --data-path"),
    ("train --per_device_train_batch_size 4", "memo's --micro-batch-size is the sequences of one forward"),
    ("train --max_seq_length 4096", "memo calls it --seq-length"),
    ("train --gradient-accumulation-steps 4", "give --global-batch-size, which is --micro-batch-size x"),
    ("train --lora-r 8", "memo calls it --lora-rank"),
    ("train --lora-dropout 0.1", "memo has no dropout: leave it out"),
    ("train --tensor-parallel-size 2", "memo calls it --tensor-model-parallel-size, in short --tp"),
    ("train --fp16", "give --params-dtype bf16"),
    ("train --output_dir out", "memo calls it --save"),
    ("train --gpus 8 --model llama-tiny", "`torchrun --nproc-per-node 8 -m memo train ...` starts one rank"),
    ("plan --gpu 8 --model gpt-7b", "did you mean --gpus 8?"),
    ("plan --tp 8 --model gpt-7b --gpus 8", "memo plan chooses it"),
    (
        "plan --learning-rate 1 --model gpt-7b --gpus 8",
        "memo plan does not need it; for memo train, memo calls it --lr",
    ),
    # Values.
    ("train -tp 2", "'-tp' is no flag: flags have two dashes, such as --tp"),
    ("train --tp two --mock-data", "--tp is 'two': give a whole number, such as the default 1"),
    (
        "train --seq-len 128KB --mock-data",
        "--seq-len is '128KB': give a whole number of tokens, such as 131072 or 128K",
    ),
    ("train --vocab-size 32K --mock-data", "--vocab-size is '32K', which may be 32000 or 32768"),
    ("train --lr --mock-data", "--lr is given without a value: give a number"),
    ("train --packing false --mock-data", "a switch takes no value"),
    ("train --activation relu --mock-data", "--activation is 'relu': give one of gelu, gelu_tanh, swiglu"),
    ("plan --model gpt-7b --gpus eight", "--gpus is 'eight': give a whole number, such as 8"),
    ("plan --model gpt-7b --gpus 8 --hardware H1000", "did you mean 'h100-"),
    ("train --save '' --mock-data", "--save is given an empty value: give a string, or leave it out"),
    ("train --model= --mock-data", "--model is given an empty value"),
    ("profile --on-paper 0 --trace-out trace.json", "--on-paper is 0: give a whole number above 0"),
    # Ranks and lengths.
    (
        "train --mock-data --tp 2",
        "this is one process: start them: torchrun --nproc-per-node 2 -m memo train --mock-data --tp 2",
    ),
    (
        "train --mock-data --tp 4 --cp 4",
        "torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint FIRST_NODE:29500 -m memo train "
        "--mock-data --tp 4 --cp 4",
    ),
    (
        "evaluate --model Llama/checkpoint-7 --data-path data/mine --tp 2",
        "torchrun --nproc-per-node 2 -m memo evaluate",
    ),
    ("train --num-epochs 2 --mock-data", "--num-epochs 2.0 fights with --mock-data: mock data never ends"),
    ("train --num-epochs 2 --train-iters 5 --data-path data/mine", "--num-epochs 2.0 fights with --train-iters 5"),
    (
        "train --mock-data --tp 999999999999999999",
        "--tensor-model-parallel-size is 999999999999999999: give a whole number from 1 to 1099511627776",
    ),
    (
        "train --mock-data --simulate-world tp=9999999,cp=9999999",
        "has 99999980000001 ranks: give 1099511627776 or fewer",
    ),
    ("plan --model gpt-tiny --gpus 1 --out .", "--out '.' names no file: give the path of one, such as run.toml"),
    ("estimate --model gpt-tiny --trace-out .", "check the path, its permissions"),
    (
        "evaluate --model Llama/checkpoint-7 --mock-data --tp 0",
        "--tensor-model-parallel-size is 0: give a whole number from 1",
    ),
    ("train --mock-data --pp -2", "--pipeline-model-parallel-size is -2: give a whole number from 1"),
    # Data.
    ("train", "`memo data demo PREFIX` makes a corpus"),
    ("train --data-path texts.jsonl", "`memo data build texts.jsonl data/texts` makes one, for --data-path data/texts"),
    ("train --data-path chats.jsonl", "`memo data chat chats.jsonl data/chats --tokenizer MODEL` makes one"),
    ("train --data-path data/mine.bin", "named by what its files have in common: --data-path data/mine"),
    ("train --data-path data/mine.idx", "named by what its files have in common: --data-path data/mine"),
    ("train --data-path data/half", "data/half.bin is there, but data/half.idx is not"),
    ("train --data-path data", "that is a folder, and a corpus is named without its endings: --data-path data/"),
    ("train --data-path texts", "`memo data build texts data/texts` makes one"),
    (
        "train --data-path 'my texts.txt'",
        "`memo data build 'my texts.txt' 'data/my texts'` makes one, for --data-path 'data/my texts'",
    ),
    (
        "train --data-path empty",
        "that is a folder without a corpus (PREFIX.bin and PREFIX.idx): `memo data demo data/demo`",
    ),
    ("train --data-path data/mind", "did you mean --data-path data/mine?"),
    ("train --data-path elsewhere/corpus", "hf download elsewhere/corpus --repo-type dataset"),
    ("train --data-path table.parquet", "that is a table, not a corpus of tokens: `memo data build table.parquet"),
    ("train --data-path missing.jsonl", "there is no such file"),
    ("train --data-path 0.7 data/mine 0.3", "--data-path has the weight 0.3, but ends after it: give the prefix"),
    ("train --data-path 0.7 data/mine texts", "--data-path gives texts no weight, but there is a weight 0.7"),
    ("train --data-path -1 data/mine 2 data/b", "--data-path gives data/mine the weight -1: give a number from 0 on"),
    ("train --data-path 0 data/mine 0 data/b", "the weight 0, so there is nothing to read"),
    ("train --data-path 0.7", "(one that is called 0.7 is written ./0.7)"),
    ("train --data-path '0.7 data/mine 0.3 data/b'", "write --data-path 0.7 data/mine 0.3 data/b without quotes"),
    ("train --data-path 0.7 data/mine 0.3 data/mind", "--data-path data/mind: there is no data/mind.bin"),
    ("train --data-path 1 data/mine 1 texts.jsonl", "`memo data build texts.jsonl data/texts` makes one"),
    ("train --data-path data/mine --split '9;1'", "--split is 9;1: give the shares of documents to train on"),
    ("train --data-path data/mine --split 1,1 --eval-data-path data/mine", "fights with --eval-data-path data/mine"),
    (
        "train --data-path data/mine --eval-interval 5 --eval-data-path a=data/mine data/b",
        "gives data/b no name, but there is a=data/",
    ),
    ("data build table.parquet x", "table.parquet: cannot be read ("),
    ("data build texts.jsonl x --json-key body", "no string under the key 'body', found ['text']"),
    ("data build chats.jsonl x", "these are conversations, of which `memo data chat` makes a corpus"),
    ("data build numbers.jsonl x", "the key 'text' holds a whole number, not a string"),
    ("data build texts.jsonl x --workers -1", "--workers is -1: give 1 or more"),
    ("data chat both.jsonl x --tokenizer byte --chat-template chat.jinja", "say which with --chat-form messages or"),
    ("train --model Llama/checkpoint-7 --data-path texts.jsonl", "--tokenizer Llama/checkpoint-7` makes one"),
    ("data build texts.jsonl", "needs two paths or more, but got texts.jsonl: give IN... and then OUT"),
    (
        "data build texts.jsonl x --tokenizer meta-llama/Llama-3.1-8B",
        "hf download meta-llama/Llama-3.1-8B tokenizer.json",
    ),
    ("data build texts.jsonl x --tokenizer llama-3.1-8b", "a preset, a shape without a tokenizer"),
    ("data build org/texts x", "hf download org/texts --repo-type dataset --local-dir org/texts"),
    # Models.
    ("train --model . --mock-data", "--model .: it has no config.json"),
    ("train --model Llama --mock-data", "give --model Llama/checkpoint-7"),
    ("train --model texts.jsonl --mock-data", "that is data, not a model: it belongs to --data-path"),
    ("train --model run.toml --mock-data", "give it as --config run.toml"),
    ("train --model Llama/checkpoint-7/config.json --mock-data", "give its directory, --model Llama/checkpoint-7"),
    ("train --model gguf/model.gguf --mock-data", "that is a model in GGUF, which llama.cpp runs"),
    ("train --model gguf --mock-data", "give the model that it was made from, which `hf download"),
    ("import gguf/model.gguf --out x", "that is a model in GGUF"),
    ("train --model adapter --mock-data", "that is an adapter of PEFT, without the weights of its model"),
    (
        "import adapter --out x",
        "from_pretrained('adapter').merge_and_unload().save_pretrained('MERGED'), and give MERGED",
    ),
    ("plan --model adapter --gpus 8", "that is an adapter of PEFT"),
    (
        "train --model DeepSeek --mock-data",
        "'deepseek_v3', a mixture of experts (n_routed_experts 256): memo knows llama",
    ),
    (
        "plan --model DeepSeek --gpus 8",
        "a mixture of experts (n_routed_experts 256), which has no rules here: use llama",
    ),
    ("train --model runs --mock-data", "go on from it with --config runs/config.toml --load runs"),
    (
        "train --model meta-llama/Llama-3.1-8B --mock-data",
        "`hf download meta-llama/Llama-3.1-8B --local-dir meta-llama",
    ),
    (
        "plan --model meta-llama/Llama-3.1-8B --gpus 8",
        "`hf download meta-llama/Llama-3.1-8B config.json --local-dir meta-llama/Llama-3.1-8B`, which is enough",
    ),
    ("estimate --model llama3", "did you mean 'llama-3-8b'?"),
    ("train --model Qwen3-32B --mock-data", "--model Qwen3-32B: no such preset: did you mean 'qwen3-32b'?"),
    (
        "import meta-llama/Llama-3.1-8B --out x",
        "`hf download meta-llama/Llama-3.1-8B --local-dir meta-llama/Llama-3.1-8B`",
    ),
    ("import gpt-7b --out x", "that is a preset, a shape without weights"),
    ("export Llama/checkpoint-7 --out x", "that is a model of Hugging Face already"),
    ("export nowhere --out x", "there is no such directory"),
    ("export runs", "memo export: --out is not given: give it (directory to write; it must not exist or be empty)"),
]


@pytest.mark.parametrize(("line", "says"), WRONG, ids=[line for line, _ in WRONG])
def test_what_is_refused(line: str, says: str, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as refused:
        main(shlex.split(line))
    captured = capfd.readouterr()
    assert refused.value.code == 2 and captured.out == ""
    assert captured.err.startswith("error: ") and captured.err.count("\n") == 1, "one line, no box, no traceback"
    assert says in captured.err
    assert len(captured.err) < 700
    for command in suggested(captured.err):
        check_parses(command, line)


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


def test_there_are_enough_of_them_and_nothing_was_left_behind() -> None:
    assert len(RIGHT) + len(WRONG) > 40 and not os.path.exists("x.bin")
