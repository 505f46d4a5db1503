"""`memo import` and `memo export`, and what of a Hugging Face directory a run's data need."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from hf_directories import CONFIGS, VOCAB, make_model, write_model
from safetensors.torch import load_file

from memo import Trainer
from memo.checkpoint.hugging_face.exporter import export_checkpoint
from memo.checkpoint.hugging_face.importer import import_checkpoint
from memo.cli.main import main
from memo.config import RunConfig
from memo.config.derived import resolved_lr
from memo.config.flags import parse_run
from memo.data import build_corpus, load_tokenizer, train_bpe
from memo.errors import ConfigError

TEXTS = ["the quick brown fox jumps over the lazy dog", "pack my box with five dozen liquor jugs"] * 20


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of 97 tokens, with 2 x 97 x 32 + 2 x 7744 + 32 = 21,728 weights.

    Beside it a tokenizer of 300 tokens and a corpus of bytes.
    """
    pytest.importorskip("transformers")
    root = tmp_path_factory.mktemp("published")
    write_model("llama", root)
    train_bpe(TEXTS, 300, root / "tokenizer.json")
    (root / "a.txt").write_text(" ".join(TEXTS))
    build_corpus([root / "a.txt"], root / "bytes", tokenizer="byte")
    return root


def test_import_and_export(published: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checkpoint, out = str(tmp_path / "checkpoint"), str(tmp_path / "out")
    assert main(["import", str(published / "llama"), "--out", checkpoint]) == 0
    printed = capsys.readouterr().out
    assert f"{checkpoint}/iter_0000000: 21.73K weights; beside them config.json" in printed
    assert f"memo train --config {checkpoint}/config.toml --load {checkpoint}" in printed
    imported = parse_run(["--config", f"{checkpoint}/config.toml"], prog="memo train")
    assert imported.checkpoint.pretrained_checkpoint == str(published / "llama") and resolved_lr(imported) == 1e-5
    assert main(["export", checkpoint, "--out", out, "--dtype", "bf16", "--max-shard-gib", "2e-5"]) == 0
    assert f"{out}: LlamaForCausalLM, 42.44 KiB in 3 files" in capsys.readouterr().out
    assert json.loads((Path(out) / "config.json").read_text())["torch_dtype"] == "bfloat16"
    files = sorted(Path(out).glob("*.safetensors"))
    assert {str(t.dtype) for file in files for t in load_file(file).values()} == {"torch.bfloat16"}
    resume = ["--config", f"{checkpoint}/config.toml", "--load", checkpoint, "--seed", "9"]
    small = ["--mock-data", "--seq-length", "32", "--train-iters", "1", "--offload-alpha", "off"]
    assert main(["train", *resume, *small]) == 0
    assert "loaded checkpoint" in capsys.readouterr().out


def test_a_tokenizer_goes_along(published: Path, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    model, directory = make_model("gpt2"), tmp_path / "gpt2"
    model.resize_token_embeddings(300)
    model.save_pretrained(directory)
    shutil.copy(published / "tokenizer.json", directory)
    (directory / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    import_checkpoint(directory, tmp_path / "checkpoint")
    exported = export_checkpoint(tmp_path / "checkpoint", tmp_path / "out")
    assert exported.companions == ["tokenizer.json", "tokenizer_config.json", "generation_config.json"]
    for name in exported.companions:
        assert (tmp_path / "out" / name).read_bytes() == (directory / name).read_bytes()

    alone = export_checkpoint(tmp_path / "checkpoint", tmp_path / "alone", tokenizer=published / "tokenizer.json")
    assert alone.companions == ["tokenizer.json", "tokenizer_config.json", "generation_config.json"]
    theirs, ours = transformers.AutoTokenizer.from_pretrained(tmp_path / "alone"), load_tokenizer(published)
    assert not isinstance(theirs, transformers.GPT2Tokenizer)  # which the architecture alone would choose
    text = "  the lazy fox\n jumps"
    assert theirs.encode(text, add_special_tokens=False) == ours.encode(text).tolist()
    assert theirs.eos_token_id == ours.eod


def test_a_run_on_bytes_gets_their_tokenizer(
    published: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    transformers = pytest.importorskip("transformers")
    run, out = str(tmp_path / "run"), str(tmp_path / "out")
    small = ["--model", "llama-tiny", "--seq-length", "32", "--train-iters", "1", "--offload-alpha", "off"]
    assert main(["train", *small, "--data-path", str(published / "bytes"), "--save", run]) == 0
    assert main(["export", run, "--out", out]) == 0
    assert "beside them tokenizer.json, tokenizer_config.json" in capsys.readouterr().out
    theirs = transformers.AutoTokenizer.from_pretrained(out)
    assert theirs.encode("né\n") == list("né\n".encode()) and theirs.eos_token_id == 256
    assert theirs.decode(list("né\n".encode())) == "né\n"


def start(published: Path, **flags: Any) -> Trainer:
    values = {"seq_length": 32, "device": "cpu", "train_iters": 1, "offload_alpha": "off", **flags}
    return Trainer(published / "llama", RunConfig(), **values)


def test_data_that_do_not_suit_the_model(published: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--vocab-size 97 .* tokenizer's 257: build the corpus with the tok"):
        start(published, data_path=str(published / "bytes"))
    shutil.copytree(published / "llama", tmp_path / "llama")
    shutil.copy(published / "tokenizer.json", tmp_path / "llama")
    for suffix in ("bin", "idx"):  # as Megatron-LM writes it: without a tokenizer's name
        shutil.copy(published / f"bytes.{suffix}", tmp_path / f"bare.{suffix}")
    theirs = load_tokenizer(published).vocab_size
    with pytest.raises(ConfigError, match=rf"--vocab-size {VOCAB} is smaller than the tokenizer's {theirs}"):
        start(tmp_path, data_path=str(tmp_path / "bare"))


def test_a_corpus_of_another_tokenizer(published: Path, tmp_path: Path) -> None:
    """Its tokens would mean something else to the model, though all are below its vocabulary."""
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(**{**CONFIGS["llama"][1], "vocab_size": 300})
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "llama")
    shutil.copy(published / "tokenizer.json", tmp_path / "llama")
    with pytest.raises(
        ConfigError, match=r"built with a tokenizer of 257 tokens, .* build the corpus with --tokenizer"
    ):
        start(tmp_path, data_path=str(published / "bytes"))
    with start(tmp_path, data_path=str(published / "bytes"), tokenizer=load_tokenizer("byte")) as trainer:
        assert trainer.config.model.vocab_size == 300
