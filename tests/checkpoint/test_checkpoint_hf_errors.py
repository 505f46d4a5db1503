"""Hugging Face directories that are damaged, or of another model: one message each, and nothing half-written."""

import json
import re
import resource
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hf_directories import write_model
from layouts import make, tiny
from ranks import run_ranks
from safetensors.torch import load_file, save_file

from memo.checkpoint.directory import has_checkpoint
from memo.checkpoint.hugging_face.exporter import export_checkpoint
from memo.checkpoint.hugging_face.importer import import_checkpoint
from memo.checkpoint.run_state import RunState
from memo.checkpoint.store import save_checkpoint
from memo.config.model_name import choose_model
from memo.data import ByteTokenizer
from memo.errors import CheckpointError, ConfigError, MemoError

torch.set_num_threads(1)
INDEX = "model.safetensors.index.json"


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Untied and tied, each in shards; and the first as a checkpoint of memo."""
    pytest.importorskip("transformers")
    root = tmp_path_factory.mktemp("published")
    write_model("llama", root, max_shard="40KB")
    write_model("qwen2", root, max_shard="40KB")
    import_checkpoint(root / "llama", root / "checkpoint")
    return root


def first_shard(directory: Path) -> Path:
    return min(directory.glob("model-00001-of-*.safetensors"))


def change_index(directory: Path, change: Callable[[dict[str, Any]], None]) -> None:
    content = json.loads((directory / INDEX).read_text())
    change(content)
    (directory / INDEX).write_text(json.dumps(content))


def change_config(directory: Path, **fields: Any) -> None:
    content = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**content, **fields}))


def change_tensors(directory: Path, **tensors: torch.Tensor | None) -> None:
    """Add, replace or (None) remove tensors, everything then in one file."""
    found = {name: tensor for file in directory.glob("*.safetensors") for name, tensor in load_file(file).items()}
    for file in directory.glob("model*"):
        file.unlink()
    found |= {name: tensor for name, tensor in tensors.items() if tensor is not None}
    kept = {name: tensor for name, tensor in found.items() if tensors.get(name, tensor) is not None}
    save_file(kept, directory / "model.safetensors")


NORM, Q = "model.layers.1.input_layernorm.weight", "model.layers.0.self_attn.q_proj.weight"
DAMAGES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "shard missing": (
        lambda d: first_shard(d).unlink(),
        r"model-00001-of-\d+.safetensors does not exist, though .*\(1 of \d files are missing\): "
        r"download it with `hf download ORG/NAME --local-dir .*llama`",
    ),
    "shard cut short": (
        lambda d: first_shard(d).write_bytes(first_shard(d).read_bytes()[:-100]),
        r"model-00001-of-\d+.safetensors is damaged or cut short at \d+ bytes \(.*\): download it .* again",
    ),
    "shard empty": (lambda d: first_shard(d).write_bytes(b""), r"is damaged or cut short at 0 bytes"),
    "index names a tensor that is nowhere": (
        lambda d: change_index(d, lambda i: i["weight_map"].update({"model.extra": first_shard(d).name})),
        r"says that 'model.extra' lies in model-00001-of-\d+.safetensors, but it is not there",
    ),
    "index names a file outside": (
        lambda d: change_index(d, lambda i: i["weight_map"].update({"model.extra": "../x.safetensors"})),
        r"is '../x.safetensors': give a string that names a file beside it",
    ),
    "index no JSON": (lambda d: (d / INDEX).write_text("{"), r"index.json: is not JSON"),
    "no safetensors": (
        lambda d: [file.unlink() for file in d.glob("model*")],
        r"has neither model.safetensors nor model.safetensors.index.json: download it with `hf download",
    ),
    "an adapter beside its config.json": (
        lambda d: (
            [file.rename(d / f"adapter_{file.name}") for file in d.glob("model*")]
            + [(d / "adapter_config.json").write_text("{}")]
        ),
        r"has neither model.safetensors nor \S+: that is an adapter of PEFT, .*merge_and_unload",
    ),
    "tensor missing": (
        lambda d: change_tensors(d, **{NORM: None}),
        rf"holds no {NORM}, which this model needs as layers.1.attention_norm.weight",
    ),
    "tensor too many": (
        lambda d: change_tensors(d, **{"model.layers.0.self_attn.q_proj.bias": torch.zeros(32)}),
        r"holds model.layers.0.self_attn.q_proj.bias, which this model lacks",
    ),
    "fewer layers than stored": (
        lambda d: change_config(d, num_hidden_layers=1),
        r"holds model.layers.1.\S+, which this model lacks",
    ),
    "another width": (
        lambda d: change_config(d, intermediate_size=64),
        r"mlp.gate_proj.weight has shape \(48, 32\) there and \(64, 32\) in this model",
    ),
    "quantised": (
        lambda d: change_tensors(d, **{Q: torch.zeros(32, 32, dtype=torch.int8)}),
        rf"{Q} is stored as I8, but memo reads F64, F32, BF16, F16: .* not quantised",
    ),
    "architecture unknown": (lambda d: change_config(d, model_type="mamba"), r"model_type is 'mamba': memo knows"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_directory_that_cannot_be_imported(published: Path, tmp_path: Path, damage: str) -> None:
    directory = shutil.copytree(published / "llama", tmp_path / "llama")
    change, message = DAMAGES[damage]
    change(directory)
    with pytest.raises(MemoError, match=message) as caught:
        import_checkpoint(directory, tmp_path / "out")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_model_flags_that_do_not_suit_the_weights(published: Path) -> None:
    config = choose_model(tiny(dtype="fp32"), published / "llama")
    with pytest.raises(CheckpointError, match=r"model.layers.1.\S+, which this model lacks.*model flags"):
        make(config.override({"num_layers": 1}), 1)
    with pytest.raises(CheckpointError, match=r"has shape \(48, 32\) there and \(40, 32\).*leave out the model flags"):
        make(config.override({"ffn_hidden_size": 40}), 1)
    with pytest.raises(CheckpointError, match=r"models of llama have no mlp.router, which this model needs"):
        make(config.override({"num_experts": 4}), 1)


def test_a_stored_copy_of_a_tied_embedding_must_be_one(published: Path, tmp_path: Path) -> None:
    directory = shutil.copytree(published / "qwen2", tmp_path / "qwen2")
    tensors = {name: t for file in directory.glob("*.safetensors") for name, t in load_file(file).items()}
    embedding = tensors["model.embed_tokens.weight"]
    change_tensors(directory, **{"lm_head.weight": embedding.clone()})
    import_checkpoint(directory, tmp_path / "same")
    other = embedding.clone()
    other[-1, -1] += 1
    change_tensors(directory, **{"lm_head.weight": other})
    with pytest.raises(CheckpointError, match=r"lm_head.weight differs from model.embed_tokens.weight, .*tie_word"):
        import_checkpoint(directory, tmp_path / "other")


def test_nothing_is_overwritten(published: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"--out .*checkpoint holds a checkpoint already"):
        import_checkpoint(published / "llama", published / "checkpoint")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("x")
    with pytest.raises(CheckpointError, match=r"--out .*out exists and is not empty"):
        export_checkpoint(published / "checkpoint", tmp_path / "out")
    (tmp_path / "out" / "mine").unlink()
    export_checkpoint(published / "checkpoint", tmp_path / "out")  # an empty directory will do
    assert (tmp_path / "out" / "model.safetensors").exists()


def test_exports_that_lack_something(published: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"holds no whole checkpoint"):
        export_checkpoint(tmp_path, tmp_path / "out")
    with pytest.raises(ConfigError, match=r"--tokenizer nowhere does not exist"):
        export_checkpoint(published / "checkpoint", tmp_path / "out", tokenizer="nowhere")
    larger = tmp_path / "tokenizer.json"
    larger.write_bytes(ByteTokenizer().definition)
    with pytest.raises(ConfigError, match=r"tokenizer.json has 257 tokens, but the model's vocabulary has 97: give"):
        export_checkpoint(published / "checkpoint", tmp_path / "out", tokenizer=larger)
    copy = shutil.copytree(published / "checkpoint", tmp_path / "copy")
    toml = (copy / "config.toml").read_text()
    (copy / "config.toml").write_text(toml.replace("num_layers = 2", "num_layers = 3"))
    with pytest.raises(
        CheckpointError, match=r"another num_layers than its config.toml says \(2 then, 3 now\): .*--config"
    ):
        export_checkpoint(copy, tmp_path / "out")
    (copy / "config.toml").write_text(re.sub("\nrotary_base = .*", "\nrotary_base = 123.0", toml))
    with pytest.raises(CheckpointError, match=r"another rotary_base than its config.toml says \(\S+ then, 123.0 now\)"):
        export_checkpoint(copy, tmp_path / "out")
    (copy / "config.toml").write_text(toml.replace("vocab_size = 97\n", ""))
    with pytest.raises(ConfigError, match=r"config.toml has no vocab_size"):
        export_checkpoint(copy, tmp_path / "out")
    (copy / "config.toml").unlink()
    with pytest.raises(CheckpointError, match=r"config.toml does not exist, .* --config RUN.TOML"):
        export_checkpoint(copy, tmp_path / "out")
    export_checkpoint(copy, tmp_path / "out", config_file=published / "checkpoint" / "config.toml")


def test_a_model_that_no_architecture_has(tmp_path: Path) -> None:
    config = tiny("llama-tiny", dtype="fp32", normalization="LayerNorm")
    model, _ = make(config, 1)
    save_checkpoint(tmp_path, RunState(1, 4, 7, 1, 0, 0), model.optimizer.segment_states(), model.mesh)
    (tmp_path / "config.toml").write_text(config.to_toml())
    with pytest.raises(ConfigError, match=r"no architecture .*normalization must be RMSNorm, not LayerNorm"):
        export_checkpoint(tmp_path, tmp_path / "out")
    assert not list(tmp_path.glob("out*"))


def _with_little_space(limit_bytes: int, action: Callable[..., object], *args: Any, **kwargs: Any) -> str:
    unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, unlimited[1]))
    try:
        with pytest.raises(CheckpointError) as caught:
            action(*args, **kwargs)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
    return str(caught.value)


@pytest.mark.parametrize("limit_bytes", [0, 20_000])
def test_a_full_disk_leaves_nothing_behind(published: Path, tmp_path: Path, limit_bytes: int) -> None:
    (message,) = run_ranks(
        1, _with_little_space, limit_bytes, export_checkpoint, published / "checkpoint", tmp_path / "out"
    )
    assert message.startswith(f"--out {tmp_path / 'out'} could not be written (") and "free disk space" in message
    assert "File too large" in message
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("limit_bytes", [0, 20_000])
def test_an_import_onto_a_full_disk_is_no_checkpoint(published: Path, tmp_path: Path, limit_bytes: int) -> None:
    (message,) = run_ranks(1, _with_little_space, limit_bytes, import_checkpoint, published / "llama", tmp_path / "out")
    assert message.startswith(f"--out {tmp_path / 'out'}") and "free disk space" in message
    assert not has_checkpoint(tmp_path / "out")
    import_checkpoint(published / "llama", tmp_path / "out")  # and the next one is not disturbed
    assert has_checkpoint(tmp_path / "out")


def test_resuming_reads_no_pretrained_weights(published: Path) -> None:
    config = choose_model(tiny(dtype="fp32"), published / "llama").override({"pretrained_checkpoint": "gone"})
    with pytest.raises(CheckpointError, match=r"gone/config.json: the file does not exist"):
        make(config, 1)
    resumed = replace(config, checkpoint=replace(config.checkpoint, load=str(published / "checkpoint")))
    make(resumed, 1)
