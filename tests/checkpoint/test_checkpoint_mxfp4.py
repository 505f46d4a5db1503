"""gpt-oss as it is published: experts in MXFP4, read as the bf16 numbers that transformers unpacks, bit for bit."""

import json
from pathlib import Path

import pytest
import torch
from hf_directories import CONFIGS, global_tensors, make_model, weights_of
from safetensors.torch import save_file
from torch import Tensor

from memo.checkpoint.hugging_face.exporter import export_checkpoint
from memo.checkpoint.hugging_face.importer import import_checkpoint
from memo.errors import CheckpointError

EXPERTS, HIDDEN, FFN = 6, 64, 96
_QUANTISED = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}


@pytest.fixture
def published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, dict[str, Tensor]]:
    """A directory, and what transformers unpacks of its tensors."""
    pytest.importorskip("transformers")
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    name, fields = CONFIGS["gpt_oss"]
    monkeypatch.setitem(CONFIGS, "gpt_oss", (name, {**fields, "hidden_size": HIDDEN, "intermediate_size": FFN}))
    model = make_model("gpt_oss", torch.bfloat16)
    tensors = {key: value.detach().clone() for key, value in model.state_dict().items()}
    generator, stored = torch.Generator().manual_seed(5), dict(tensors)
    for key, outputs, inputs in [("gate_up_proj", 2 * FFN, HIDDEN), ("down_proj", HIDDEN, FFN)]:
        for layer in range(2):
            name = f"model.layers.{layer}.mlp.experts.{key}"
            blocks, scales = ((EXPERTS, outputs, inputs // 32, 16), (EXPERTS, outputs, inputs // 32))
            stored[f"{name}_blocks"] = torch.randint(0, 256, blocks, generator=generator, dtype=torch.uint8)
            stored[f"{name}_scales"] = torch.randint(110, 135, scales, generator=generator, dtype=torch.uint8)
            del stored[name]
            tensors[name] = convert_moe_packed_tensors(stored[f"{name}_blocks"], stored[f"{name}_scales"])
            assert tensors[name].shape == (EXPERTS, inputs, outputs)
    directory = tmp_path / "gpt_oss"
    directory.mkdir()
    save_file({key: value.contiguous() for key, value in stored.items()}, directory / "model.safetensors")
    config = {**model.config.to_dict(), "quantization_config": _QUANTISED}
    (directory / "config.json").write_text(json.dumps(config))
    return directory, tensors


def test_experts_are_what_transformers_unpacks(published: tuple[Path, dict[str, Tensor]], tmp_path: Path) -> None:
    directory, tensors = published
    weights, unpacked = weights_of(directory), tmp_path / "unpacked"
    unpacked.mkdir()
    save_file({key: value.contiguous() for key, value in tensors.items()}, unpacked / "model.safetensors")
    (unpacked / "config.json").write_bytes((directory / "config.json").read_bytes())
    expected = global_tensors(unpacked)
    assert expected.keys() == weights.shapes.keys()
    for name, values in expected.items():
        assert weights.dtype(name) == torch.bfloat16
        assert torch.equal(weights.read_whole(name), values), name


def test_a_rectangle_is_a_part_of_the_whole(published: tuple[Path, dict[str, Tensor]]) -> None:
    weights = weights_of(published[0])
    for name in ("layers.1.mlp.experts.3.up.weight", "layers.0.mlp.experts.5.fc2.weight"):
        whole = weights.read_whole(name)
        assert torch.equal(weights.read(name, (7, 33), (20, 30)), whole[7:27, 33:63])


def test_an_export_has_bf16(published: tuple[Path, dict[str, Tensor]], tmp_path: Path) -> None:
    from safetensors.torch import load_file

    directory, tensors = published
    import_checkpoint(directory, tmp_path / "run")
    exported = export_checkpoint(tmp_path / "run", tmp_path / "out")
    found = load_file(exported.path / "model.safetensors")
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[key], value) for key, value in tensors.items())
    assert "quantization_config" not in json.loads((exported.path / "config.json").read_text())


def test_what_does_not_fit_is_refused(published: tuple[Path, dict[str, Tensor]]) -> None:
    from safetensors.torch import load_file

    directory, _ = published
    file = directory / "model.safetensors"
    stored = load_file(file)
    del stored["model.layers.1.mlp.experts.down_proj_scales"]
    save_file(stored, file)
    with pytest.raises(CheckpointError, match="down_proj_scales is missing, and this model needs"):
        weights_of(directory)
