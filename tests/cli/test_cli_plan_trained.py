"""memo plan and memo estimate of runs that do not train all weights: LoRA, QLoRA, frozen layers."""

import json

import pytest
from plan_answers import answered

Capture = pytest.CaptureFixture[str]
LLAMA = ["plan", "--model", "llama-3.1-8b", "--gpus", "1", "--hardware", "h100-80", "--host-memory-gib", "512"]
OSS = ["plan", "--model", "gpt-oss-20b", "--gpus", "1", "--hardware", "rtx-4090", "--seq-len", "128K"]


def test_adapters_beside_8b_reach_a_million_tokens_on_one_gpu(capsys: Capture) -> None:
    found = json.loads(answered([*LLAMA, "--seq-len", "1M", "--lora-rank", "16", "--json"], capsys))
    best = found["choices"][0]
    assert best["verdict"] == "fits" and best["tgs"] > 400 and " --lora-rank 16 " in found["command"]
    assert found["trained_parameters"] == 41_943_040 == 32 * 16 * (2 * 4096 + 2 * (4096 + 1024) + 8192 + 3 * 18432)
    without = json.loads(answered([*LLAMA, "--seq-len", "1M", "--json"], capsys))
    assert not without["choices"] or without["choices"][0]["tgs"] < best["tgs"]


def test_4_bits_bring_20b_to_a_card_of_24_gb(capsys: Capture) -> None:
    """In 16 bits its weights must stream from host memory, of which a record of activations has less then."""
    shown = answered([*OSS, "--lora-rank", "16", "--quantize", "nf4"], capsys)
    assert "gpt-oss-20b (21.14B parameters, 4.23B of them a token, 220.30M of them trained) on 1 x rtx-4090" in shown
    assert "  fits" in shown and " --lora-rank 16 --quantize nf4 " in shown
    coded = json.loads(answered([*OSS, "--lora-rank", "16", "--quantize", "nf4", "--json"], capsys))["choices"][0]
    wide = json.loads(answered([*OSS, "--lora-rank", "16", "--json"], capsys))["choices"][0]
    assert coded["states_in_host_memory"] is None and coded["tgs"] > 700
    assert wide["states_in_host_memory"]["weights"] == 24 and wide["host_gib"] > coded["host_gib"]


def test_ways_of_training_are_compared(capsys: Capture) -> None:
    ways = ["--seq-len", "64K", "--train-as", "full,lora,qlora", "--lora-rank", "8"]
    lines = answered([*LLAMA, *ways], capsys).splitlines()
    rows = [line for line in lines if line[:2] in ("1 ", "2 ", "3 ") and line[3:].startswith("1 x h100-80")]
    assert ["1 x h100-80, LoRA of rank 8 beside nf4" in row for row in rows].count(True) == 1
    assert ["1 x h100-80, LoRA of rank 8" in row for row in rows].count(True) == 2 and len(rows) == 3
    found = json.loads(answered([*LLAMA, *ways, "--json"], capsys))
    assert {(way["lora_rank"], way["quantize"]) for way in found} == {(0, "none"), (8, "none"), (8, "nf4")}


def test_an_estimate_counts_what_is_trained(capsys: Capture) -> None:
    case = ["estimate", "--model", "llama-3.1-8b", "--seq-len", "64K", "--hardware", "h100-80", "--json"]
    whole = json.loads(answered(case, capsys))["parts_bytes"]
    lora = json.loads(answered([*case, "--lora-rank", "16"], capsys))["parts_bytes"]
    coded = json.loads(answered([*case, "--lora-rank", "16", "--quantize", "nf4"], capsys))["parts_bytes"]
    half = json.loads(answered([*case, "--freeze", "layers.*[02468].*"], capsys))["parts_bytes"]
    assert lora["gradients"] == 4 * 41_943_040 < 0.01 * whole["gradients"]
    assert 0.25 * whole["weights"] < coded["weights"] < 0.4 * lora["weights"]
    assert whole["weights"] == half["weights"] and 0.5 < half["gradients"] / whole["gradients"] < 0.6
