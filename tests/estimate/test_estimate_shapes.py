"""Shapes of published models: exact parameters, against printed totals and against transformers itself."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hf_directories import ALONE

from memo.config import PRESETS, RunConfig, preset
from memo.config.hugging_face_counted import COUNTED
from memo.errors import ConfigError
from memo.estimate.hf_config import read_hf_config, shape_from_hf
from memo.spec.parameters import count_parameters
from memo.spec.shapes import shape_of

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "architectures.json").read_text())
OFTEN_IN_DOUBT = {
    "llama-biases": dict(GOLDEN["llama3-8b"]["config"], attention_bias=True, mlp_bias=True, tie_word_embeddings=True),
    "qwen3-bias": dict(GOLDEN["qwen3-8b"]["config"], attention_bias=True),
    "opt-narrow-untied": dict(GOLDEN["opt-350m"]["config"], tie_word_embeddings=False),
    "opt-no-bias": dict(GOLDEN["opt-125m"]["config"], enable_bias=False),
    "neox-no-bias": dict(GOLDEN["pythia-1b"]["config"], attention_bias=False),
    "bigcode-many-heads": dict(GOLDEN["santacoder"]["config"], multi_query=False),
    "starcoder2-no-bias": dict(GOLDEN["starcoder2-3b"]["config"], use_bias=False),
    "gemma-untied-head": dict(GOLDEN["gemma-2b"]["config"], tie_word_embeddings=False),
}
"""Settings of the families that no published model above uses."""


def counted_by_transformers(values: dict[str, Any]) -> int:
    # Imported here: it takes seconds, which every worker that collects this file would spend.
    from transformers import AutoModelForCausalLM
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    fields = {name: value for name, value in values.items() if name != "model_type"}
    ids = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
    config = CONFIG_MAPPING[values["model_type"]](**ids, **fields)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    model.tie_weights()
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("name", GOLDEN)
def test_parameters_are_the_published_ones(name: str) -> None:
    assert shape_from_hf(GOLDEN[name]["config"], name).parameters == GOLDEN[name]["parameters"]


def test_every_family_has_a_published_model() -> None:
    assert {entry["config"]["model_type"] for entry in GOLDEN.values()} == {*ALONE, *COUNTED}


@pytest.mark.parametrize("name", [*GOLDEN, *OFTEN_IN_DOUBT])
def test_parameters_are_those_of_transformers(name: str) -> None:
    values = OFTEN_IN_DOUBT.get(name) or GOLDEN[name]["config"]
    assert shape_from_hf(values, name).parameters == counted_by_transformers(values)


@pytest.mark.parametrize("name", PRESETS)
def test_shapes_of_presets_count_as_their_configuration(name: str) -> None:
    config = RunConfig(model=preset(name)).override({"vocab_size": 50257, "seq_length": 512})
    assert shape_of(config.model, name, 512).parameters == count_parameters(config)


@pytest.mark.parametrize("name", ["gpt2", "llama3-8b", "mistral-7b", "qwen2-7b", "qwen3-8b", "starcoder2-3b"])
def test_models_that_memo_runs_keep_their_parameters(name: str) -> None:
    shape = shape_from_hf(GOLDEN[name]["config"], name)
    assert count_parameters(RunConfig(model=shape.nearest)) == shape.parameters


def test_a_directory_or_a_file(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(GOLDEN["gpt2"]["config"]))
    assert read_hf_config(tmp_path) == read_hf_config(file) == shape_from_hf(GOLDEN["gpt2"]["config"], str(file))


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.json: the file does not exist: give the path of a config\.json"):
        read_hf_config("nowhere.json")
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="is not JSON"):
        read_hf_config(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ConfigError, match="holds a list, not an object"):
        read_hf_config(tmp_path)
