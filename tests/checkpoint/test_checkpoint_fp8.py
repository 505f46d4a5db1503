"""Models in FP8, as Qwen publishes them with a scale for each block and Mistral with one for each matrix: read as the
fp32 numbers that transformers makes of them, bit for bit."""

import json
from pathlib import Path

import pytest
import torch
from hf_directories import CONFIGS, global_tensors, weights_of, write_model
from safetensors.torch import load_file, save_file
from torch import Tensor

from memo.checkpoint.hugging_face.exporter import export_checkpoint
from memo.checkpoint.hugging_face.importer import import_checkpoint
from memo.errors import CheckpointError

pytest.importorskip("transformers")
QUANTISED = {
    "qwen3_moe": {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"},
    "ministral3": {"quant_method": "fp8", "weight_block_size": None, "activation_scheme": "static"},
}
SIZES = {"hidden_size": 160, "head_dim": 40, "intermediate_size": 272, "moe_intermediate_size": 136}
"""No multiples of a block."""
GATE = "model.layers.1.mlp.gate_proj.weight"


def in_fp8(name: str, weight: Tensor, is_whole: bool) -> dict[str, Tensor]:
    """Codes and scales of a matrix, as files hold them."""
    grid = () if is_whole else tuple(-(-size // 128) for size in weight.shape)
    scales = torch.rand(grid, generator=torch.Generator().manual_seed(len(name))) * 1e-2 + 1e-3
    found = {name: (weight / 1e-2).to(torch.float8_e4m3fn), f"{name}_scale_inv": scales}
    return found | ({f"{name.removesuffix('weight')}activation_scale": torch.tensor(0.1)} if is_whole else {})


@pytest.fixture(params=QUANTISED)
def published(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    name: str = request.param
    class_name, fields = CONFIGS[name]
    monkeypatch.setitem(CONFIGS, name, (class_name, {**fields, **SIZES}))
    directory = write_model(name, tmp_path)
    stored = dict[str, Tensor]()
    for key, value in load_file(directory / "model.safetensors").items():
        is_coded = key.endswith("_proj.weight")
        stored |= in_fp8(key, value, name == "ministral3") if is_coded else {key: value}
    save_file(stored, directory / "model.safetensors", {"format": "pt"})
    content = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**content, "quantization_config": QUANTISED[name]}))
    return directory


def decoded(directory: Path) -> dict[str, Tensor]:
    """The tensors that transformers makes of the file."""
    from transformers.integrations.finegrained_fp8 import _dequantize_fp8_weight

    stored = load_file(directory / "model.safetensors")
    block = QUANTISED[directory.name]["weight_block_size"]
    found = {name: value for name, value in stored.items() if not name.endswith(("_scale_inv", "activation_scale"))}
    for name, value in found.items():
        if value.dtype == torch.float8_e4m3fn:
            found[name] = _dequantize_fp8_weight(value, stored[f"{name}_scale_inv"], block, torch.float32)
    return found


def test_numbers_are_those_of_transformers(published: Path, tmp_path: Path) -> None:
    """In fp32, to the bit; and rectangles of them, whose rows and columns begin inside of a block."""
    plain = tmp_path / "plain"
    plain.mkdir()
    save_file(decoded(published), plain / "model.safetensors")
    (plain / "config.json").write_bytes((published / "config.json").read_bytes())
    weights, found = weights_of(published), global_tensors(plain)
    assert found.keys() == weights.shapes.keys()
    for name, values in found.items():
        assert weights.dtype(name) == torch.float32
        assert torch.equal(weights.read_whole(name), values), name
    name = "layers.0.attention.projection.weight"
    assert torch.equal(weights.read(name, (7, 100), (150, 60)), found[name][7:157, 100:160])


def test_an_export_is_not_quantised(published: Path, tmp_path: Path) -> None:
    import_checkpoint(published, tmp_path / "run")
    exported = export_checkpoint(tmp_path / "run", tmp_path / "out")
    found, values = load_file(exported.path / "model.safetensors"), decoded(published)
    assert found.keys() == values.keys()
    assert all(torch.equal(found[name].float(), values[name].to(found[name].dtype).float()) for name in values)
    assert "quantization_config" not in json.loads((exported.path / "config.json").read_text())


@pytest.mark.parametrize("published", ["ministral3"], indirect=True)
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({}, r"gate_proj\.weight_scale_inv is missing, and memo reads FP8 with one scale, or with \(3, 2\)"),
        ({"_scale_inv": torch.ones(3, 3)}, r"gate_proj\.weight_scale_inv has shape \(3, 3\) and dtype F32 there"),
        (
            {"": torch.zeros(9, 160).to(torch.float8_e4m3fn)},
            r"has shape \(9, 160\) there and \(272, 160\) in",
        ),
    ],
)
def test_what_does_not_fit_is_refused(published: Path, change: dict[str, Tensor], message: str) -> None:
    file = published / "model.safetensors"
    tensors = load_file(file)
    if not change:
        del tensors[f"{GATE}_scale_inv"]
    save_file(tensors | {GATE + suffix: value for suffix, value in change.items()}, file, {"format": "pt"})
    with pytest.raises(CheckpointError, match=message):
        weights_of(published)
