"""Parameters and FLOPs against published numbers and against the paper's formulas."""

import pytest

from memo.config import RunConfig, preset
from memo.estimate.admission import EFFICIENCY, estimate_step_s
from memo.spec.flops import matmul_parameters, model_flops_per_token, step_flops
from memo.spec.parameters import count_parameters


def run(name: str, **values: object) -> RunConfig:
    config = RunConfig(model=preset(name)).override(values)
    return config if config.model.vocab_size else config.override({"vocab_size": 257})


def test_the_papers_models() -> None:
    """MEMO counts matrices alone, 12 n h^2 + v h; LayerNorms come on top: 2 x 2 h a layer, 2 h at the end."""
    counts = [matmul_parameters(preset(f"gpt-{size}")) for size in ("7b", "13b", "30b", "65b")]
    assert counts == [6_648_303_616, 12_840_227_840, 29_955_251_200, 64_836_214_784]
    model = preset("gpt-7b")
    assert counts[0] == 12 * model.num_layers * model.hidden_size**2 + model.vocabulary * model.hidden_size
    assert count_parameters(run("gpt-7b")) == counts[0] + 32 * 4 * 4096 + 2 * 4096


def test_flops_of_the_paper() -> None:
    """6 s P + 6 n h s^2 a sample (7B at 1M tokens)."""
    s = 1 << 20
    assert s * model_flops_per_token(preset("gpt-7b"), s) == 6 * s * 6_648_303_616 + 6 * 32 * 4096 * s**2


def test_flops_of_llama_count_the_head_once_and_no_lookup() -> None:
    model = preset("llama-3.1-8b")
    norms = (2 * 32 + 1) * 4096
    matrices = 8_030_261_248 - norms - 128256 * 4096  # the embedding is a table
    assert matmul_parameters(model) == matrices
    assert model_flops_per_token(model, 8192) == 6 * matrices + 6 * 32 * 4096 * 8192


def test_step_time() -> None:
    config = run("gpt-7b", gbs=8, seq_length=65536)
    alone = step_flops(config, 8) / (8 * EFFICIENCY * 1e15)
    assert step_flops(config, 8) == 8 * 65536 * model_flops_per_token(config.model, 65536)
    assert estimate_step_s(config, 8, 1e15) == pytest.approx(alone)
    # pp 4, 4 microbatches a copy: three quarters of the working time are lost.
    assert estimate_step_s(config.override({"pp": 4}), 8, 1e15) == pytest.approx(alone * 1.75)
    assert estimate_step_s(config.override({"pp": 4, "vpp": 2}), 8, 1e15) == pytest.approx(alone * 1.375)
