"""Models in 4 bits as bitsandbytes saves them: read as the numbers that it makes of them, and coded again alike."""

import base64
import json
from pathlib import Path

import pytest
import torch
from hf_directories import weights_of, write_model
from layouts import make, tiny
from safetensors.torch import load_file, save_file
from torch import Tensor

from memo.checkpoint.hugging_face.bnb_nf4 import STATE
from memo.config.hugging_face import read_config
from memo.config.model_name import choose_model
from memo.errors import CheckpointError, ConfigError
from memo.parallel.quantized import NF4

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "bitsandbytes_nf4.json").read_text())
QUANTISED = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
UP = "model.layers.0.mlp.up_proj.weight"  # [48, 32] in the tiny Llama, and of half as many numbers as the golden matrix


def tensor(stored: dict[str, object]) -> Tensor:
    flat = torch.frombuffer(bytearray(base64.b64decode(str(stored["bytes"]))), dtype=torch.uint8)
    dtype = getattr(torch, str(stored["dtype"]))
    return flat.view(dtype).view(stored["shape"])  # type: ignore[arg-type]


def golden_values() -> Tensor:
    """What bitsandbytes makes of its matrix, [48, 64]."""
    return torch.frombuffer(bytearray(base64.b64decode(GOLDEN["made_again"])), dtype=torch.float32).view(48, 64)


@pytest.fixture
def published(tmp_path: Path) -> Path:
    """A tiny Llama 64 wide, one of whose matrices is bitsandbytes' own, and another coded without nested scales."""
    from hf_directories import CONFIGS

    name, fields = CONFIGS["llama"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(CONFIGS, "llama", (name, {**fields, "hidden_size": 64, "head_dim": 16}))
        directory = write_model("llama", tmp_path)
    tensors = load_file(directory / "model.safetensors")
    kinds = {kind: tensor(stored) for kind, stored in GOLDEN["tensors"].items()}
    tensors |= {(UP if kind == "weight" else f"{UP}.{kind}"): values for kind, values in kinds.items()}
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    content = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**content, "quantization_config": QUANTISED}))
    return directory


def test_numbers_are_those_that_bitsandbytes_makes(published: Path) -> None:
    """In fp32, with nested scales, to the bit; and rectangles of them, whose rows begin inside of a block or not."""
    weights, name = weights_of(published), "layers.0.mlp.up.weight"
    assert weights.dtype(name) == torch.float32
    assert weights.read_whole(name).equal(golden_values())
    assert weights.read(name, (7, 33), (20, 30)).equal(golden_values()[7:27, 33:63])
    assert weights.dtype("layers.1.mlp.up.weight") == torch.float32  # of a matrix that is not coded, as it is stored


def test_codes_may_be_stored_as_other_numbers(published: Path) -> None:
    """As trainers with FSDP have them, by bnb_4bit_quant_storage: the same bytes."""
    file = published / "model.safetensors"
    tensors = load_file(file)
    save_file({**tensors, UP: tensors[UP].view(1, -1).view(torch.bfloat16).view(-1, 1)}, file, {"format": "pt"})
    assert weights_of(published).read("layers.0.mlp.up.weight", (7, 33), (20, 30)).equal(golden_values()[7:27, 33:63])


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_run_in_4_bits_has_the_same_codes(published: Path, dtype: str) -> None:
    """Scales that are not quantised are exact: so are all numbers, rounded once."""
    config = choose_model(tiny(dtype=dtype), published).override({"lora_rank": 2, "quantize": "nf4"})
    model, _ = make(config, 1)
    assert model.coded is not None
    model.coded.begin("F", 0)
    (fc1,) = (p for name, p in model.data_parallel.parameters.items() if name.endswith("layers.0.mlp.fc1.weight"))
    up = next(piece for piece in fc1.shard.pieces if piece.name == "layers.0.mlp.up.weight")
    assert up.of_local(fc1.data).equal(golden_values().to(fc1.dtype))
    levels = tensor(GOLDEN["tensors"]["quant_map"])
    assert levels.equal(torch.tensor(NF4))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("shape", r"up_proj\.weight has shape \(64, 48\) there and \(48, 64\) in this model"),
        ("absmax", r"holds no .*up_proj\.weight\.absmax: download the model again"),
        ("kind", "which is no matrix in NF4: download the model again, or the one that is not quantised"),
    ],
)
def test_what_does_not_fit_is_refused(published: Path, change: str, message: str) -> None:
    file = published / "model.safetensors"
    tensors, state = load_file(file), f"{UP}{STATE}"
    content = json.loads(bytes(tensors[state].tolist()))
    if change == "absmax":
        del tensors[f"{UP}.absmax"]
    elif change == "shape":
        tensors[state] = coded({**content, "shape": [64, 48]})
    else:
        tensors[state] = coded({**content, "quant_type": "fp4"})
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(CheckpointError, match=message):
        weights_of(published)


def coded(content: dict[str, object]) -> Tensor:
    return torch.tensor(list(json.dumps(content).encode()), dtype=torch.uint8)


def test_other_formats_are_refused(published: Path) -> None:
    path = published / "config.json"
    content = json.loads(path.read_text())
    path.write_text(json.dumps({**content, "quantization_config": {**QUANTISED, "load_in_4bit": False}}))
    with pytest.raises(ConfigError, match="not quantised, or read from NF4 of bitsandbytes"):
        read_config(published)
