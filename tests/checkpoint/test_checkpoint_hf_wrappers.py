"""Models of text in models that see images: the text is trained, and the rest goes along, byte for byte."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from forward import run_once
from hf_wrappers import WRAPPED, make_wrapper, wrapper_class, write_wrapper
from layouts import tiny
from safetensors.torch import load_file, save_file
from torch import Tensor

from memo.checkpoint.hugging_face.companions import COMPANION_DIR, REST_FILE, keep_companions
from memo.checkpoint.hugging_face.exporter import export_checkpoint
from memo.checkpoint.hugging_face.files import TensorFiles
from memo.checkpoint.hugging_face.importer import import_checkpoint
from memo.config.hugging_face import read_config
from memo.config.model_name import choose_model
from memo.config.run import CheckpointConfig, RunConfig
from memo.errors import CheckpointError, ConfigError
from memo.model.transformer import Microbatch

transformers = pytest.importorskip("transformers")
torch.set_num_threads(1)

_TEXT = ("model.language_model.", "language_model.", "lm_head.")


def tensors_of(directory: Path) -> dict[str, Tensor]:
    return {name: tensor for file in directory.glob("model*.safetensors") for name, tensor in load_file(file).items()}


def rest_of(directory: Path) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in sorted(tensors_of(directory).items()) if not name.startswith(_TEXT)}


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor), name


@pytest.mark.parametrize("name", WRAPPED)
def test_transformers_loads_what_went_in_and_out(name: str, tmp_path: Path) -> None:
    source, out = write_wrapper(name, tmp_path, torch.bfloat16), tmp_path / "out"
    imported = import_checkpoint(source, tmp_path / "checkpoint")
    assert REST_FILE in imported.companions
    exported = export_checkpoint(tmp_path / "checkpoint", out)
    assert exported.architecture == wrapper_class(name).__name__
    assert exported.num_bytes == sum(tensor.nbytes for tensor in tensors_of(out).values())
    loaded, told = wrapper_class(name).from_pretrained(out, dtype=torch.bfloat16, output_loading_info=True)
    assert not any(told.values()), told
    assert_same(loaded.state_dict(), make_wrapper(name, torch.bfloat16).state_dict())
    rest, written = (rest_of(path) for path in (source, out))
    assert rest
    assert_same(written, rest)
    before, after = (json.loads((path / "config.json").read_text()) for path in (source, out))
    for content in (before, after):
        assert content.pop("dtype", None) or content.pop("torch_dtype")
    assert before == after


def _as_published(directory: Path) -> dict[str, Tensor]:
    """Rewrites a mixture of experts as it is on the hub: all experts in one tensor, transposed where transformers has
    one too (Qwen3-VL), and layers that predict further tokens, of which one has another dtype."""
    stacked: dict[str, Tensor] = {}
    experts: dict[str, list[dict[str, Tensor]]] = {}
    for name, tensor in tensors_of(directory).items():
        layer, is_expert, rest = name.partition(".mlp.experts.")
        if not is_expert or rest.endswith("_proj"):
            stacked[name] = tensor.mT.contiguous() if is_expert else tensor
            continue
        number, part, _ = rest.split(".")
        experts.setdefault(layer, [{} for _ in range(6)])[int(number)][part] = tensor
    for layer, found in experts.items():
        both = [torch.cat([each["gate_proj"], each["up_proj"]]) for each in found]
        stacked[f"{layer}.mlp.experts.gate_up_proj"] = torch.stack(both)
        stacked[f"{layer}.mlp.experts.down_proj"] = torch.stack([each["down_proj"] for each in found])
    stacked["mtp.fc.weight"], stacked["model.visual.positions"] = torch.randn(3, 5), torch.arange(7)
    save_file(stacked, directory / "model.safetensors")
    return stacked


@pytest.mark.parametrize("name", ["qwen3_5_moe", "qwen3_vl_moe"])
def test_stacked_experts_go_in_and_out_byte_for_byte(name: str, tmp_path: Path) -> None:
    source = write_wrapper(name, tmp_path)
    published = _as_published(source)
    import_checkpoint(source, tmp_path / "checkpoint")
    export_checkpoint(tmp_path / "checkpoint", tmp_path / "out", max_shard_bytes=20_000)
    assert_same(tensors_of(tmp_path / "out"), published)
    assert TensorFiles(tmp_path / "out").tensors.keys() == published.keys()  # the index agrees with the files


@pytest.mark.parametrize("name", WRAPPED)
def test_the_text_has_the_logits_of_the_whole_model(name: str, tmp_path: Path) -> None:
    """fp32, a relative error of 1e-5 in the L2 norm: both round."""
    source = write_wrapper(name, tmp_path)
    ids = torch.randint(0, 97, (64, 1), generator=torch.Generator().manual_seed(3))
    positions = torch.arange(64)[:, None]
    batch = Microbatch(ids, torch.roll(ids, -1, 0), positions, torch.ones(64, 1) / 64, positions, None)
    found = run_once(choose_model(tiny(dtype="fp32", global_batch_size=1), source), batch).logits
    with torch.no_grad():
        expected = make_wrapper(name)(input_ids=ids.t()).logits.transpose(0, 1)
    assert torch.linalg.norm(found - expected) < 1e-5 * torch.linalg.norm(expected)


def _run(save: Path, **checkpoint: Any) -> RunConfig:
    return RunConfig(checkpoint=CheckpointConfig(save=str(save), **checkpoint))


def test_a_run_keeps_the_rest_for_its_export(tmp_path: Path) -> None:
    source = write_wrapper("gemma3", tmp_path)
    first, second = tmp_path / "first", tmp_path / "second"
    config = choose_model(_run(first), source)
    keep_companions(config, str(first))
    kept = load_file(first / COMPANION_DIR / REST_FILE)
    assert_same(kept, rest_of(source))
    import_checkpoint(source, first)  # a checkpoint in its place, from which another run goes on
    keep_companions(_run(second, load=str(first)), str(second))
    assert_same(load_file(second / COMPANION_DIR / REST_FILE), kept)
    keep_companions(_run(second), str(second))  # a run of new weights has no rest
    assert not (second / COMPANION_DIR / REST_FILE).exists()


def test_weights_that_are_not_of_the_text_are_refused_where_they_can_be_no_rest(tmp_path: Path) -> None:
    source = write_wrapper("qwen3_5", tmp_path)
    tensors = tensors_of(source)
    save_file({**tensors, "model.language_model.layers.9.extra": torch.ones(2)}, source / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"holds model.language_model.layers.9.extra, which this model lacks"):
        import_checkpoint(source, tmp_path / "checkpoint")
    save_file(tensors, source / "model.safetensors")
    text = json.loads((source / "config.json").read_text())["text_config"]
    (source / "config.json").write_text(json.dumps(text))
    with pytest.raises(CheckpointError, match=r"holds model.visual.*, which this model lacks"):
        import_checkpoint(source, tmp_path / "checkpoint")


def test_a_rest_that_is_damaged_or_gone_is_refused(tmp_path: Path) -> None:
    source = write_wrapper("mistral3", tmp_path)
    import_checkpoint(source, tmp_path / "checkpoint")
    rest = tmp_path / "checkpoint" / COMPANION_DIR / REST_FILE
    rest.write_bytes(rest.read_bytes()[:-8])
    with pytest.raises(CheckpointError, match=r"rest.safetensors is damaged .*: copy it again from the model"):
        export_checkpoint(tmp_path / "checkpoint", tmp_path / "out")
    rest.unlink()
    with pytest.raises(
        CheckpointError, match=r"rest.safetensors is missing, .*: import the model .*, and copy the file"
    ):
        export_checkpoint(tmp_path / "checkpoint", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_keys_of_the_whole_model_hold_for_its_text(tmp_path: Path) -> None:
    source = write_wrapper("gemma3", tmp_path)
    content = json.loads((source / "config.json").read_text())
    del content["text_config"]["model_type"]
    (source / "config.json").write_text(json.dumps({**content, "tie_word_embeddings": False}))
    assert read_config(source).model.untie_embeddings_and_output_weights
    (source / "config.json").write_text(json.dumps({**content, "quantization_config": {"quant_method": "gptq"}}))
    with pytest.raises(ConfigError, match=r"quantization_config is set, but memo trains weights that are not quantis"):
        read_config(source)
