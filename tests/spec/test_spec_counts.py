"""Parameters and FLOPs against published numbers and against the paper's formulas."""

import pytest

from memo.config import PRESETS, RunConfig, preset
from memo.estimate.admission import EFFICIENCY, estimate_step_s
from memo.spec.flops import matmul_parameters, model_flops_per_token, step_flops
from memo.spec.parameters import count_parameters, shape_of_run, stage_parameters


def run(name: str, **values: object) -> RunConfig:
    config = RunConfig(model=preset(name)).override(values)
    return config if config.model.vocab_size else config.override({"vocab_size": 257})


@pytest.mark.parametrize(
    ("name", "count"),
    [("llama-3.1-8b", 8_030_261_248), ("llama-3.1-70b", 70_553_706_496), ("qwen3-8b", 8_190_735_360)],
)
def test_published_models(name: str, count: int) -> None:
    assert count_parameters(run(name)) == count


def test_the_papers_models() -> None:
    """MEMO counts matrices alone, 12 n h^2 + v h; LayerNorms come on top: 2 x 2 h a layer, 2 h at the end."""
    counts = [matmul_parameters(preset(f"gpt-{size}")) for size in ("7b", "13b", "30b", "65b")]
    assert counts == [6_648_303_616, 12_840_227_840, 29_955_251_200, 64_836_214_784]
    model = preset("gpt-7b")
    assert counts[0] == 12 * model.num_layers * model.hidden_size**2 + model.vocabulary * model.hidden_size
    assert count_parameters(run("gpt-7b")) == counts[0] + 32 * 4 * 4096 + 2 * 4096


def test_gpt2_with_biases_and_positions() -> None:
    """GPT-2 small, as published: 124,439,808."""
    sizes = {"num_layers": 12, "hidden_size": 768, "num_attention_heads": 12, "vocab_size": 50257}
    config = run("gpt2-tiny", **sizes, max_position_embeddings=1024)
    assert count_parameters(config) == 124_439_808
    assert shape_of_run(config).position_table == 1024 * 768


def test_biases_of_qkv_alone() -> None:
    """Qwen2-0.5B, as published: 494,032,768."""
    config = run(
        "llama-tiny",
        num_layers=24,
        hidden_size=896,
        num_attention_heads=14,
        num_query_groups=2,
        ffn_hidden_size=4864,
        vocab_size=151936,
        add_qkv_bias=True,
        untie_embeddings_and_output_weights=False,
    )
    assert count_parameters(config) == 494_032_768


@pytest.mark.parametrize("name", PRESETS)
def test_stages_hold_the_whole_model(name: str) -> None:
    """Without vocabulary padding the stages of a pipeline add up; a tied matrix exists twice then."""
    config = run(name, vocab_size=64 * 100, pp=2)
    count = count_parameters(config)
    twice = 0 if config.model.untie_embeddings_and_output_weights else shape_of_run(config).embedding
    assert sum(stage_parameters(config, stage) for stage in (0, 1)) == count + twice
    assert stage_parameters(config.override({"pp": 1}), 0) == count


@pytest.mark.parametrize("name", ["gpt2-tiny", "llama-tiny"])
def test_tensor_parallel_ranks_split_matrices(name: str) -> None:
    """Two ranks hold the model once, and what is replicated (norms, late biases, positions) once more."""
    config = run(name, vocab_size=128)
    layers, hidden = config.model.num_layers, config.model.hidden_size
    norm = 2 * hidden if name == "gpt2-tiny" else hidden
    replicated = layers * 2 * norm + norm
    if name == "gpt2-tiny":
        replicated += layers * 2 * hidden + shape_of_run(config).position_table
    assert 2 * stage_parameters(config.override({"tp": 2}), 0) == count_parameters(config) + replicated


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
