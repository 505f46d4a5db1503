"""Frozen matrices in few bits: bitsandbytes' bytes, the bytes that they take, and values that no layout changes."""

import json
from pathlib import Path

import pytest
import torch
from layouts import make, tiny
from ranks import run_ranks
from torch import Tensor

from memo.config.model import Quantization
from memo.parallel.quantized import CodedBucket, Decoder
from memo.spec import quantized
from memo.spec.buckets import BucketPlan, ParameterRange
from memo.train.watching import MemoryUse

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "nf4.json").read_text())
CPU = torch.device("cpu")
WIDE = {"hidden_size": 128, "kv_channels": 32, "ffn_hidden_size": 256, "num_layers": 2, "lora_rank": 4}


def coded(values: Tensor, quantize: Quantization) -> CodedBucket:
    plan = BucketPlan((ParameterRange("w", (len(values),), 0),), len(values), 1, "", frozen=True, coded=True)
    bucket = CodedBucket(plan, quantize, CPU)
    bucket.encode(values)
    return bucket


def made_again(values: Tensor, quantize: Quantization) -> Tensor:
    out = torch.empty_like(values)
    Decoder(len(values), CPU).decode(coded(values, quantize), out)
    return out


def test_nf4_has_the_bytes_of_bitsandbytes() -> None:
    """Codes, scales and what is made of them: three blocks, of small, middling and large numbers."""
    values = torch.tensor(GOLDEN["values"])
    bucket = coded(values, "nf4")
    assert bucket.codes.tolist() == GOLDEN["codes"]
    assert bucket.scales.equal(torch.tensor(GOLDEN["scales"]))
    assert made_again(values, "nf4").equal(torch.tensor(GOLDEN["made_again"]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize(("quantize", "bound"), [("nf4", 0.16), ("int8", 0.008)])
def test_a_number_is_near_in_its_block(quantize: Quantization, bound: float, dtype: torch.dtype) -> None:
    """Within half of the widest step between two codes, of the largest number of the block, and bf16's rounding."""
    values = torch.randn(64 * 40, generator=torch.Generator().manual_seed(1)).to(dtype)
    values[:64] = 0.0
    error = (made_again(values, quantize).float() - values.float()).abs().view(-1, 64).amax(1)
    assert bool((error <= bound * values.float().abs().view(-1, 64).amax(1)).all())


@pytest.mark.parametrize("quantize", ["nf4", "int8"])
def test_parts_change_nothing(quantize: Quantization, monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers are coded and made again a part at a time; what is left at the end is a part as well."""
    values = torch.randn(64 * 21, generator=torch.Generator().manual_seed(2))
    whole, code = made_again(values, quantize), coded(values, quantize).code
    for module in (quantized, __import__("memo.parallel.quantized", fromlist=["CHUNK"])):
        monkeypatch.setattr(module, "CHUNK", 128)
    assert made_again(values, quantize).equal(whole) and coded(values, quantize).code.equal(code)


def weights(quantize: str, **layout: int) -> dict[tuple[str | int, ...], Tensor]:
    """This rank's pieces of the coded weights of its layers, as these multiply with them, by name and offset."""
    model, _ = make(tiny("llama-tiny", "bf16", quantize=quantize, **{**WIDE, **layout}), 2)
    found: dict[tuple[str | int, ...], Tensor] = {}
    assert model.coded is not None
    for layer in model.chunks[0].layer_indices:
        model.coded.begin("F", layer)
        for parameter in model.data_parallel.parameters.values():
            if parameter.shard.coded and not parameter.isnan().any():
                for piece in parameter.shard.pieces:
                    found[piece.name, *piece.offset] = piece.of_local(parameter).detach().clone()
        model.coded.end("F", layer)
    return found


def test_tensor_parallelism_changes_no_value() -> None:
    """Rows and columns of each rank are multiples of 64 here, so blocks are those of the whole matrix."""
    (whole, _), parts = run_ranks(2, weights, "nf4"), run_ranks(2, weights, "nf4", tp=2)
    assert len(whole) == 2 * 7
    for rank in parts:
        for (name, first, second), part in rank.items():
            assert part.equal(whole[name, 0, 0][first : first + part.shape[0], second : second + part.shape[1]])


@pytest.mark.parametrize(("quantize", "most"), [("nf4", 0.6), ("int8", 1.1)])
def test_the_frozen_matrices_take_few_bytes(quantize: str, most: float) -> None:
    """Measured: what is left of the weights of a bf16 model, 2 bytes a parameter, without table and adapters."""
    plain, _ = make(tiny("llama-tiny", "bf16", **WIDE), 1)
    model, _ = make(tiny("llama-tiny", "bf16", quantize=quantize, **WIDE), 1)
    matrices = sum(bucket.plan.numel for unit in model.data_parallel.units for bucket in unit.coded)
    assert matrices == 2 * (4 * 128 * 128 - 2 * 128 * 64 + 3 * 128 * 256)
    saved = MemoryUse.of(plain).weights_bytes - MemoryUse.of(model).weights_bytes
    assert 2 * matrices - saved <= most * matrices
    assert model.coded is not None
    assert MemoryUse.of(model).rounding_buffers_bytes == model.coded.device_bytes
