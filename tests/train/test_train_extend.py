"""`memo extend`: what it does to rotary positions, and that it extends a model from end to end."""

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from memo import Trainer
from memo.artifacts.run_log import RunLog
from memo.checkpoint.hugging_face.exporter import export_checkpoint
from memo.cli.main import main
from memo.config import preset
from memo.config.check_model import unscaled_length
from memo.config.extend import extend_context
from memo.config.model import ModelConfig
from memo.data import PackedDataset, build_corpus, build_demo
from memo.data.corpus_builder import python_sources, standard_library
from memo.data.indexed import IndexedDataset
from memo.errors import ConfigError
from memo.model.rope import rope_frequencies

TINY: dict[str, Any] = {
    "num_layers": 2,
    "hidden_size": 64,
    "ffn_hidden_size": 128,
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "lr": 1e-2,
    "num_threads": 1,
    "device": "cpu",
    "progress": False,
    "offload_alpha": "off",
    "log_interval": 1000,
}


def model(**fields: Any) -> ModelConfig:
    return ModelConfig(**{"kv_channels": 16, "max_position_embeddings": 512, **fields})


def test_a_larger_base_spreads_the_slowest_pair_over_the_new_length_and_leaves_the_fastest() -> None:
    before = model()
    after = extend_context(before, 4096, "rope-base")
    assert after.rotary_base == pytest.approx(10000.0 * 8 ** (16 / 14), rel=1e-15)
    assert after.max_position_embeddings == 4096 and after.rope_scaling_type == "none"
    ratio = rope_frequencies(before)[0] / rope_frequencies(after)[0]
    assert ratio[0] == 1.0 and ratio[-1] == pytest.approx(8.0, rel=1e-12)
    assert (ratio.diff() > 0).all()


@pytest.mark.parametrize("name", ["glm-4.5-air", "deepseek-v3"])
def test_a_larger_base_counts_the_rotated_dims_alone(name: str) -> None:
    before = replace(preset(name), rope_scaling_type="none", max_position_embeddings=4096)
    ratio = rope_frequencies(before)[0] / rope_frequencies(extend_context(before, 32768, "rope-base"))[0]
    assert ratio[0] == 1.0 and ratio[-1] == pytest.approx(8.0, rel=1e-12)


def test_a_larger_base_counts_the_channels_that_turn() -> None:
    before = replace(preset("gemma-4-31b"), max_position_embeddings=4096)
    first, then = (
        rope_frequencies(each.of_full_layers)[0] for each in (before, extend_context(before, 32768, "rope-base"))
    )
    turned = 512 // 4 // 2
    assert first[0] == then[0] and (first / then)[turned - 1] == pytest.approx(8.0, rel=1e-12)
    assert not first[turned:].any() and not then[turned:].any()
    with pytest.raises(ConfigError, match=r"--rope-scaling-type proportional: use --method rope-base"):
        extend_context(before, 32768, "yarn")
    assert "give memo extend --method rope-base, or" in unscaled_length(before, 32768)


def test_yarn_is_measured_from_the_length_before_any_scaling() -> None:
    after = extend_context(model(), 4096, "yarn")
    assert (after.rope_scaling_type, after.rope_scaling_factor) == ("yarn", 8.0)
    assert after.rope_original_max_position_embeddings == 512 and after.rotary_base == 10000.0
    llama = preset("llama-3.1-8b")
    assert llama.rope_scaling_type == "llama3" and llama.max_position_embeddings == 131072
    after = extend_context(llama, 1 << 20, "yarn")
    assert after.rope_scaling_factor == 128.0 and after.rope_original_max_position_embeddings == 8192
    assert (after.rope_low_freq_factor, after.rope_high_freq_factor) == (1.0, 4.0)
    based = extend_context(llama, 1 << 20, "rope-base")
    assert based.rope_scaling_type == "llama3" and based.rope_scaling_factor == 8.0
    assert based.rotary_base == pytest.approx(500000 * 8 ** (128 / 126), rel=1e-15)
    linear = model(rope_scaling_type="linear", rope_scaling_factor=4.0, max_position_embeddings=2048)
    after = extend_context(linear, 4096, "yarn")
    assert after.rope_scaling_factor == 8.0 and after.rope_original_max_position_embeddings == 512
    factors = {"rope_short_factor": "1,1", "rope_long_factor": "1,8", "rope_original_max_position_embeddings": 128}
    searched = model(rope_scaling_type="longrope", rope_scaling_factor=4.0, **factors)
    after = extend_context(searched, 4096, "yarn")
    assert after.rope_scaling_factor == 32.0 and not after.rope_short_factor and not after.rope_long_factor
    again = extend_context(extend_context(model(), 2048, "yarn"), 4096, "yarn")
    assert again == extend_context(model(), 4096, "yarn")


def test_positions_that_are_learned_cannot_be_extended() -> None:
    with pytest.raises(ConfigError, match=r"--position-embedding-type is learned_absolute"):
        extend_context(model(position_embedding_type="learned_absolute"), 4096, "yarn")


@pytest.mark.parametrize("kind", ["yarn", "llama3"])
def test_a_length_beyond_what_is_stretched_already_is_told(kind: str) -> None:
    """It is both the length that the model says, and that of the original one times the factor, as either may lag."""
    lengths = {"rope_original_max_position_embeddings": 256, "max_position_embeddings": 512}
    stretched = model(rope_scaling_type=kind, rope_scaling_factor=4.0, **lengths)
    assert not unscaled_length(stretched, 1024)
    told = unscaled_length(stretched, 1025)
    assert told.startswith("--seq-length 1025 is more than the 512 tokens") and "stretched from 256 tokens" in told
    told += unscaled_length(model(max_position_embeddings=512), 1024)  # what commands can follow that do not train
    assert told.count("to use it as it is, give fewer tokens") == 2
    assert not unscaled_length(extend_context(stretched, 2048, "rope-base"), 2048)
    assert not unscaled_length(extend_context(stretched, 2048, "yarn"), 2048)


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("demo")
    build_demo(folder / "demo", split_eval=0.05)
    return folder / "demo"


@pytest.fixture(scope="module")
def few(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A corpus of forty files."""
    folder = tmp_path_factory.mktemp("few")
    build_corpus(python_sources(standard_library())[:40], folder / "few", split_eval=0.1)
    return folder / "few"


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Any:
    """Runs the command on a corpus with flags; returns what it printed."""

    def with_flags(corpus: Path, *switches: str, **flags: Any) -> str:
        data = {"data_path": corpus, "eval_data_path": f"{corpus}-eval", "tokenizer": "byte"}
        common = {"device": "cpu", "num_threads": 1, "offload_alpha": "off", "lr": 3e-3, **data, **flags}
        words = [f"--{name.replace('_', '-')}={value}" for name, value in common.items()]
        assert main(["extend", *words, *switches]) == 0
        out, err = capsys.readouterr()
        assert "that the model was made for" not in err
        return out

    return with_flags


def trained(folder: Path, demo: Path, seq_length: int, steps: int, **overrides: Any) -> Path:
    """A Llama in Hugging Face's format, trained on the demo corpus at `seq_length`."""
    values = {**TINY, "seq_length": seq_length, "max_position_embeddings": seq_length, "train_iters": steps}
    with Trainer("llama-tiny", train_data=demo, save=str(folder / "first"), **{**values, **overrides}) as trainer:
        trainer.train()
    return export_checkpoint(folder / "first", folder / "model").path


def perplexities(printed: str) -> dict[str, list[float]]:
    """The last table: of each bucket, of the model as it is, stretched and trained."""
    lines = printed[printed.index("perplexity  as it is") :].splitlines()[1:]
    rows = [line.split() for line in lines if len(line.split()) in (4, 6)]
    return {"".join(row[:-3]): [float(value) for value in row[-3:]] for row in rows if row[-1][0].isdigit()}


@pytest.mark.full
def test_a_model_of_512_tokens_learns_4096(run: Callable[..., str], demo: Path, tmp_path: Path) -> None:
    """The perplexity falls at every position, those past the old length too; the export says what it is.

    Ten steps leave most of the corpus to learn: 24 more take 40 % off, of which the bound asks half. Rounding, which
    differs from CPU to CPU, moves such figures by a hundredth.
    """
    batch = {"micro_batch_size": 8, "global_batch_size": 8, "loss_chunk_size": 4096}
    directory = trained(tmp_path, demo, 512, 10, **batch)
    out = tmp_path / "out"
    training = {"train_iters": 24, "lr": 1e-2, "lr_warmup_iters": 4, "eval_iters": 4, "log_interval": 100}
    printed = run(demo, model=directory, seq_len=4096, **training, save=tmp_path / "run", out=out)
    found = perplexities(printed)
    assert list(found) == ["0-512", "512-1K", "1K-2K", "2K-4K", "all"]
    for as_it_is, stretched, after in found.values():
        assert after < 0.8 * min(as_it_is, stretched), found
    config = json.loads((out / "config.json").read_text())
    assert config["max_position_embeddings"] == 4096 and config["rope_scaling"] is None
    assert config["rope_theta"] == pytest.approx(10000 * 8 ** (16 / 14), rel=1e-15)
    assert f"{out}: LlamaForCausalLM for 4096 tokens" in printed


@pytest.mark.parametrize(("method", "more"), [("rope-base", {}), ("yarn", {}), ("yarn", {"lora_rank": 4})], ids=str)
def test_the_exported_model_is_the_trained_one(
    method: str, more: dict[str, int], run: Callable[..., str], few: Path, tmp_path: Path
) -> None:
    """transformers' perplexity of the export, past the old length too, is what the example printed; fp32. Adapters are
    merged into it, since theirs would not tell how positions are stretched."""
    transformers = pytest.importorskip("transformers")
    directory = trained(tmp_path, few, 32, 2)
    out = tmp_path / "out"
    flags = {"model": directory, "seq_len": 256, "train_iters": 4, "eval_iters": 3, "method": method, **more}
    printed = run(few, "--no-packing", **flags, save=tmp_path / "run", out=out)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(out, torch_dtype=torch.float32).eval()
    assert theirs.config.max_position_embeddings == 256
    data = PackedDataset(IndexedDataset(f"{few}-eval"), 256, 1234, packing=False)
    losses = []
    for index in range(3):
        sample = data.sample(index)
        with torch.no_grad():
            logits = theirs(torch.from_numpy(sample.tokens)[None]).logits[0]
        losses.append(torch.nn.functional.cross_entropy(logits, torch.from_numpy(sample.labels)).item())
    expected = math.exp(sum(losses) / 3)
    _, stretched, after = perplexities(printed)["all"]
    assert after == pytest.approx(expected, rel=6e-4)  # four digits are printed
    told = RunLog.load(tmp_path / "run").evaluations
    assert [iteration for iteration, _ in told] == [0, 4]
    assert [math.exp(loss) for _, loss in told] == pytest.approx([stretched, after], rel=6e-4)
    if not more:
        printed = run(few, "--no-packing", **{**flags, "train_iters": 5}, save=tmp_path / "run", load=tmp_path / "run")
        assert "perplexity  as it is  at iteration 4  trained" in printed  # weights that are not the stretched ones
