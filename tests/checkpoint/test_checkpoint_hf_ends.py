"""What an exported model brings besides weights: permissions as all files have them, and where its texts end."""

import json
import os
import stat
from pathlib import Path
from typing import Any

import pytest
import torch
from chats import write_tokenizer
from safetensors.torch import load_file
from trainers import SMALL_RUN

from memo import Trainer
from memo.checkpoint.hugging_face.exporter import export_checkpoint
from memo.checkpoint.hugging_face.files import TensorFiles, write_safetensors
from memo.checkpoint.hugging_face.generation import add_token_ids
from memo.data import build_corpus, train_bpe
from memo.errors import CheckpointError, DataError

SIZES: dict[str, Any] = {**SMALL_RUN, "ffn_hidden_size": 48, "vocab_size": 320, "global_batch_size": 2, "lr": 2e-2}
SIZES |= {"offload_alpha": "off"}
WORDS = "abcdefgh"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """DIR/run has learnt documents of eight letters, from new weights; DIR/corpus are they."""
    folder = tmp_path_factory.mktemp("ends")
    (folder / "texts.jsonl").write_text((json.dumps({"text": WORDS}) + "\n") * 300)
    build_corpus([folder / "texts.jsonl"], folder / "corpus")
    steps = {"train_iters": 40, "save": str(folder / "run"), "train_data": folder / "corpus"}
    with Trainer("llama-tiny", **steps, **SIZES) as trainer:
        assert trainer.train().lm_loss < 0.5
    return folder


def ids_of(directory: Path, name: str) -> tuple[Any, Any]:
    content = json.loads((directory / name).read_text())
    return content.get("bos_token_id"), content.get("eos_token_id")


def test_a_model_of_new_weights_ends_its_texts(run: Path, tmp_path: Path) -> None:
    """transformers stops where a document ends, told by nothing but the files."""
    transformers = pytest.importorskip("transformers")
    exported = export_checkpoint(run / "run", tmp_path / "out")
    assert exported.companions == ["tokenizer.json", "tokenizer_config.json", "generation_config.json"]
    assert ids_of(exported.path, "config.json") == ids_of(exported.path, "generation_config.json") == (None, 256)
    model = transformers.AutoModelForCausalLM.from_pretrained(exported.path, dtype=torch.float32)
    out = model.generate(torch.tensor([list(b"abc")]), max_new_tokens=30, do_sample=False)
    assert out[0].tolist() == [*WORDS.encode(), 256]


def test_ids_are_those_of_the_tokenizer_that_the_run_used(run: Path, tmp_path: Path) -> None:
    train_bpe([WORDS] * 20, 260, tmp_path / "tokenizer.json")
    exported = export_checkpoint(run / "run", tmp_path / "bpe", tokenizer=tmp_path / "tokenizer.json")
    assert ids_of(exported.path, "generation_config.json") == (None, 0)  # the first of train_bpe's special tokens
    named = write_tokenizer(tmp_path / "named", "inst", marks=False)
    exported = export_checkpoint(run / "run", tmp_path / "out", tokenizer=named)
    assert ids_of(exported.path, "config.json") == ids_of(exported.path, "generation_config.json") == (7, 8)


def test_what_a_model_says_itself_is_kept(tmp_path: Path) -> None:
    """But for the token that ends the answers that it has learned."""
    folder = write_tokenizer(tmp_path / "model", "chatml", marks=False)
    theirs = {"eos_token_id": 0, "temperature": 0.6}
    (folder / "generation_config.json").write_text(json.dumps(theirs))
    before = (folder / "generation_config.json").read_bytes()
    assert add_token_ids(folder, {"eos_token_id": 5, "bos_token_id": None}, answers=False)["eos_token_id"] == 5
    assert (folder / "generation_config.json").read_bytes() == before
    add_token_ids(folder, {"eos_token_id": 5}, answers=True)
    assert json.loads((folder / "generation_config.json").read_text()) == {**theirs, "eos_token_id": [2, 0]}
    again = (folder / "generation_config.json").read_bytes()
    add_token_ids(folder, {"eos_token_id": 5}, answers=True)
    assert (folder / "generation_config.json").read_bytes() == again


def test_a_model_that_says_null_for_the_end_of_texts_gets_that_of_answers_alone(tmp_path: Path) -> None:
    folder = write_tokenizer(tmp_path / "model", "chatml", marks=False)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": None}))
    add_token_ids(folder, {}, answers=True)
    assert json.loads((folder / "generation_config.json").read_text()) == {"eos_token_id": 2}


def test_a_tokenizer_that_cannot_be_read_is_refused_before_weights_are_written(run: Path, tmp_path: Path) -> None:
    folder = write_tokenizer(tmp_path / "model", "chatml", marks=False)
    (folder / "tokenizer.json").write_text('{"added_tokens": [{"id": "x", "content": "y"}]}')
    with pytest.raises(CheckpointError, match=r"tokenizer.json: id is 'x' .*give a whole number"):
        add_token_ids(folder, {}, answers=False)
    with pytest.raises(DataError, match=r"tokenizer.json cannot be read as a tokenizer.json"):
        export_checkpoint(run / "run", tmp_path / "out", tokenizer=folder)
    assert not list(tmp_path.glob("out*"))


@pytest.mark.parametrize("mask", [0o027, 0o002])
def test_every_file_has_the_permissions_that_the_user_gives_to_new_ones(run: Path, tmp_path: Path, mask: int) -> None:
    before = os.umask(mask)
    try:
        exported = export_checkpoint(run / "run", tmp_path / "out", max_shard_bytes=20_000)
    finally:
        os.umask(before)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in exported.path.iterdir()}
    assert len(exported.files) > 2 and set(exported.files) < set(modes)
    assert set(modes.values()) == {0o666 & ~mask}, modes


def test_a_file_of_tensors_is_read_by_the_library_and_by_memo(tmp_path: Path) -> None:
    """Of several dtypes, without items, and of names that JSON escapes; each tensor at a multiple of its items."""
    tensors = {
        "narrow": torch.arange(3, dtype=torch.bfloat16),
        "wide": torch.randn(2, 3, dtype=torch.float64),
        'a "name" é': torch.randn(5, dtype=torch.float32),
        "empty": torch.empty(0, 4, dtype=torch.float16),
        "turned": torch.randn(3, 4).t(),
    }
    write_safetensors(tmp_path / "model.safetensors", tensors)
    found = load_file(tmp_path / "model.safetensors")
    assert found.keys() == tensors.keys()
    assert all(
        torch.equal(found[name], tensor) and found[name].dtype == tensor.dtype for name, tensor in tensors.items()
    )
    assert TensorFiles(tmp_path).tensors.keys() == tensors.keys()
    content = (tmp_path / "model.safetensors").read_bytes()
    size = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + size])
    assert header.pop("__metadata__") == {"format": "pt"} and size % 8 == 0
    for name, entry in header.items():
        assert entry["data_offsets"][0] % tensors[name].dtype.itemsize == 0
