"""Adapters in PEFT's files that are damaged, or not those of the run: one message each; fused matrices, value by value.

tests/parity/test_parity_lora.py trains with them beside PEFT; here no model of transformers is needed.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from layouts import make, tiny
from refusals import refusal
from safetensors.torch import load_file, save_file
from torch import Tensor

from memo.checkpoint.hugging_face.adapters import (
    ADAPTER_CONFIG,
    ADAPTER_FILE,
    AdaptedMatrix,
    adapted_modules,
    adapter_config,
    read_adapters,
    stand_alone,
)
from memo.checkpoint.hugging_face.companions import keep_companions
from memo.checkpoint.hugging_face.exporter import export_checkpoint
from memo.checkpoint.hugging_face.files import TensorFiles
from memo.checkpoint.run_state import RunState
from memo.checkpoint.store import save_checkpoint
from memo.config import RunConfig
from memo.config.hugging_face import read_config
from memo.config.hugging_face_wrappers import NAMINGS
from memo.config.identity import model_identity
from memo.config.model_name import choose_model
from memo.errors import CheckpointError, ConfigError, MemoError
from memo.train.setup import prepare

torch.set_num_threads(1)
RANK = 4
FLAGS: dict[str, Any] = {"lora_rank": RANK, "lora_alpha": 6.0}
Q, UP = "model.layers.1.self_attn.q_proj", "model.layers.0.mlp.up_proj"
C_ATTN = "transformer.h.1.attn.c_attn"
MERGE_FIRST = "merge it into the model's weights first"


def config_of(model: str, **flags: object) -> RunConfig:
    return tiny(model, dtype="fp32", **{**FLAGS, **flags})


def write_adapter(directory: Path, config: RunConfig, model_type: str, is_shared: bool = False) -> Path:
    """An adapter with random values as memo has it, or with one A for all parts of a fused matrix, as PEFT has it."""
    generator, tensors = torch.Generator().manual_seed(5), dict[str, Tensor]()
    modules = adapted_modules(config, model_type)
    for module, matrix in modules.items():
        count = len(matrix.parts)
        rank = RANK if is_shared else RANK * count
        a = torch.randn(rank, matrix.columns, generator=generator)
        b = torch.zeros(matrix.rows, rank)
        for index in range(count):
            own = slice(None) if is_shared else slice(index * RANK, (index + 1) * RANK)
            for part in matrix.of_b(index, b[:, own]):
                part.values().normal_(generator=generator)
        for kind, values in (("A", a), ("B", b)):
            tensors[f"base_model.model.{module}.lora_{kind}.weight"] = values
    directory.mkdir(parents=True)
    save_file(tensors, directory / ADAPTER_FILE)
    content = adapter_config(config, modules, NAMINGS[0])
    content |= {"rank_pattern": {}, "alpha_pattern": {}} if is_shared else {}
    (directory / ADAPTER_CONFIG).write_text(json.dumps(content))
    return directory


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a model with a module for each matrix, and of one that fuses q, k and v."""
    root = tmp_path_factory.mktemp("adapters")
    write_adapter(root / "llama", config_of("llama-tiny"), "llama")
    write_adapter(root / "gpt2", config_of("gpt2-tiny"), "gpt2")
    write_adapter(root / "gpt2-shared", config_of("gpt2-tiny"), "gpt2", is_shared=True)
    return root


def change_config(**fields: Any) -> Callable[[Path], None]:
    def change(directory: Path) -> None:
        path = directory / ADAPTER_CONFIG
        content = {**json.loads(path.read_text()), **fields}
        path.write_text(json.dumps({key: value for key, value in content.items() if value != "absent"}))

    return change


def change_tensors(**tensors: Callable[[Tensor], Tensor | None]) -> Callable[[Path], None]:
    """Each by the end of its name, or a new one of that whole name."""

    def change(directory: Path) -> None:
        found = load_file(directory / ADAPTER_FILE)
        for end, make_new in tensors.items():
            (name,) = [each for each in found if each.endswith(end)] or [f"base_model.model.{end}"]
            new = make_new(found.pop(name, torch.zeros(1)))
            found |= {} if new is None else {name: new.contiguous()}
        save_file(found, directory / ADAPTER_FILE)

    return change


def _spoiled(b: Tensor) -> Tensor:
    """B of q, k and v with a value where a row of k meets the A of q."""
    b = b.clone()
    b[b.shape[0] // 2, 0] = 1.0
    return b


def nothing(directory: Path) -> None:
    """The flags of the run are others."""


def cut_short(directory: Path) -> None:
    (directory / ADAPTER_FILE).write_bytes((directory / ADAPTER_FILE).read_bytes()[:100])


CONFIG, SAME = "DIR/adapter_config.json: ", "train its adapters with the same"
ONLY, OWN = "and memo reads adapters of LoRA with", "gives matrices ranks or factors of their own"
WITHOUT = change_tensors(**{f"{Q}.lora_A.weight": lambda a: None, f"{Q}.lora_B.weight": lambda b: None})
BUT_UP = {"lora_target_modules": "q_proj,k_proj,v_proj,o_proj,gate_proj,down_proj"}
DAMAGES: dict[str, tuple[str, Callable[[Path], Any], dict[str, Any], str]] = {
    "no tensors": (
        "llama",
        lambda d: (d / ADAPTER_FILE).unlink(),
        {},
        "DIR has no adapter_model.safetensors: give a directory that PEFT's save_pretrained or `memo export` wrote",
    ),
    "no configuration": (
        "llama",
        lambda d: (d / ADAPTER_CONFIG).unlink(),
        {},
        "DIR has no adapter_config.json: copy or download the whole adapter",
    ),
    "cut short": ("llama", cut_short, {}, "DIR/adapter_model.safetensors cannot be read ("),
    "no JSON": ("llama", lambda d: (d / ADAPTER_CONFIG).write_text("{"), {}, f"{CONFIG}is not JSON"),
    "another method": (
        "llama",
        change_config(peft_type="LOHA"),
        {},
        f"{CONFIG}peft_type is 'LOHA', {ONLY} LORA: {MERGE_FIRST}",
    ),
    "DoRA": ("llama", change_config(use_dora=True), {}, f"{CONFIG}use_dora is True, {ONLY} False: {MERGE_FIRST}"),
    "whole modules": (
        "llama",
        change_config(modules_to_save=["lm_head"]),
        {},
        f"{CONFIG}modules_to_save is a list of 1, {ONLY} None: {MERGE_FIRST}",
    ),
    "another rank": ("llama", nothing, {"lora_rank": 8}, f"{CONFIG}r is 4, and --lora-rank makes it 8: {SAME}"),
    "rank of PEFT's default": (
        "llama",
        change_config(r="absent"),
        {},
        f"{CONFIG}r is 8, and --lora-rank makes it 4: {SAME}",
    ),
    "alpha of PEFT's default": (
        "llama",
        change_config(lora_alpha="absent"),
        {},
        f"{CONFIG}lora_alpha is 8, and --lora-alpha makes it 6.0: {SAME}",
    ),
    "another factor": (
        "llama",
        nothing,
        {"lora_use_rslora": True},
        f"{CONFIG}use_rslora is False, and --lora-use-rslora makes it True: {SAME}",
    ),
    "ranks of their own": (
        "llama",
        change_config(rank_pattern={"q_proj": 2}),
        {},
        f"{CONFIG}its rank_pattern {OWN}, and memo's adapters have one of all: {MERGE_FIRST}",
    ),
    "ranks by an expression": (
        "llama",
        change_config(rank_pattern={".*\\.0\\.mlp\\.up_proj": 2}),
        {},
        f"{CONFIG}its rank_pattern {OWN}",
    ),
    "factors": ("gpt2", change_config(alpha_pattern={C_ATTN: 6.0}), {}, f"{CONFIG}its alpha_pattern {OWN}"),
    "a fused rank": ("gpt2", change_config(rank_pattern={"c_attn": 16}), {}, f"{CONFIG}its rank_pattern {OWN}"),
    "a matrix without": (
        "llama",
        WITHOUT,
        {},
        f"DIR has no adapter beside {Q}: name the matrices that have one with --lora-target-modules, or give the "
        "adapter of a run with the same ones",
    ),
    "half of one": (
        "llama",
        change_tensors(**{f"{Q}.lora_B.weight": lambda b: None}),
        {},
        f"DIR has no adapter beside {Q}: name the matrices",
    ),
    "one too many": (
        "llama",
        nothing,
        BUT_UP,
        f"DIR has 'base_model.model.{UP}.lora_A.weight', which this run does not train: name the matrix with "
        "--lora-target-modules, or merge it into the model's weights first",
    ),
    "B of another model": (
        "llama",
        change_tensors(**{f"{UP}.lora_B.weight": lambda b: b[:-8]}),
        {},
        f"DIR: the adapter beside {UP} has matrices of (4, 32) and (40, 4), and this model and --lora-rank 4 need (4, "
        "32) and (48, 4): give the flags of the run that made it",
    ),
    "a fused matrix of one rank, whose pattern says another": (
        "gpt2",
        change_config(rank_pattern={}, alpha_pattern={}),
        {},
        "DIR: the adapter beside transformer.h.0.attn.c_attn has matrices of (12, 32) and (96, 12), and this model and "
        "--lora-rank 4 need (4, 32) and (96, 12)",
    ),
    "a fused matrix whose parts are mixed": (
        "gpt2",
        change_tensors(**{f"{C_ATTN}.lora_B.weight": _spoiled}),
        {},
        f"DIR: the adapter beside {C_ATTN}, a matrix of 3 that are fused, is not one of each of them: {MERGE_FIRST}",
    ),
    "a part of a fused matrix that has none": (
        "gpt2-shared",
        nothing,
        {"lora_target_modules": "q_proj,v_proj,o_proj,up_proj,down_proj"},
        "DIR: the adapter beside transformer.h.0.attn.c_attn, a matrix of 2 that are fused, is not one of each of them",
    ),
}
"""Which adapter, what is done to it, flags of the run, and how the message begins, with DIR for the directory."""


@pytest.mark.parametrize("damage", DAMAGES)
def test_an_adapter_that_is_not_the_runs(adapters: Path, tmp_path: Path, damage: str) -> None:
    family, change, flags, message = DAMAGES[damage]
    directory = shutil.copytree(adapters / family, tmp_path / "adapter")
    family = family.removesuffix("-shared")
    read_adapters(directory, config_of(f"{family}-tiny"), family)
    change(directory)
    with pytest.raises(CheckpointError) as refused:
        read_adapters(directory, config_of(f"{family}-tiny", **flags), family)
    said = str(refused.value)
    assert said.startswith(message.replace("DIR", str(directory))) and "\n" not in said


@pytest.mark.parametrize(
    "fields",
    [
        {"modules_to_save": [], "use_dora": "absent", "bias": "absent"},
        {"rank_pattern": None, "alpha_pattern": {"lm_head": 3.0}},
        {"rank_pattern": {"lm_head": 2}, "lora_alpha": 6},
        {"lora_dropout": 0.1, "target_modules": "all-linear"},
    ],
    ids=str,
)
def test_what_changes_no_adapter_is_no_reason_to_refuse(adapters: Path, tmp_path: Path, fields: dict[str, Any]) -> None:
    directory = shutil.copytree(adapters / "llama", tmp_path / "adapter")
    change_config(**fields)(directory)
    found, whole = (read_adapters(d, config_of("llama-tiny"), "llama") for d in (directory, adapters / "llama"))
    assert found.keys() == whole.keys() and all(found[name].equal(whole[name]) for name in whole)


@pytest.mark.parametrize("naming", ["", "model.language_model."])
def test_names_of_other_forms_of_the_model(adapters: Path, tmp_path: Path, naming: str) -> None:
    """As a model saved without its head has them, and as a text within a model that sees images."""
    whole = load_file(adapters / "llama" / ADAPTER_FILE)
    directory = shutil.copytree(adapters / "llama", tmp_path / "adapter")
    begin = "base_model.model."
    save_file(
        {name.replace(f"{begin}model.", begin + naming): x for name, x in whole.items()}, directory / ADAPTER_FILE
    )
    found, wanted = (read_adapters(d, config_of("llama-tiny"), "llama") for d in (directory, adapters / "llama"))
    assert found.keys() == wanted.keys() and all(found[name].equal(wanted[name]) for name in wanted)


def _as_peft_adds(matrix: AdaptedMatrix, tensors: dict[str, Tensor], module: str) -> Tensor:
    """B A beside a whole matrix, [out, in], without its factor."""
    a, b = (tensors[f"base_model.model.{module}.lora_{kind}.weight"] for kind in "AB")
    assert (b.shape[0], a.shape[1]) == (matrix.rows, matrix.columns)
    return b @ a


@pytest.mark.parametrize("family", ["gpt2", "gpt2-shared"])
def test_a_fused_matrix_becomes_an_adapter_of_each_part(adapters: Path, family: str) -> None:
    """PEFT has one A for q, k and v of GPT-2, which each of them takes; an export of memo has three, below each other.
    Either way the rows of B A are those of q, k and v, to the last bit: a part's zeros add nothing. fp32."""
    config, tensors = config_of("gpt2-tiny"), load_file(adapters / family / ADAPTER_FILE)
    found = read_adapters(adapters / family, config, "gpt2")
    matrix = adapted_modules(config, "gpt2")[C_ATTN]
    whole = _as_peft_adds(matrix, tensors, C_ATTN)
    assert [name for name, _, _ in matrix.parts] == [f"layers.1.attention.{part}.weight" for part in "qkv"]
    firsts = [found[f"layers.1.attention.{part}.lora_A.weight"] for part in "qkv"]
    is_shared = family == "gpt2-shared"
    assert all(a.shape == (RANK, 32) for a in firsts)
    assert firsts[0].equal(firsts[1]) is firsts[1].equal(firsts[2]) is is_shared
    for index, (part, a) in enumerate(zip("qkv", firsts, strict=True)):
        b = found[f"layers.1.attention.{part}.lora_B.weight"]
        own = slice(32 * index, 32 * (index + 1))
        assert b.shape == (32, RANK) and torch.allclose(b @ a, whole[own], rtol=0, atol=1e-5)
        assert not torch.allclose(b @ a, whole.roll(32, 0)[own], rtol=0, atol=1e-2)


def _saved(config: RunConfig, run: Path) -> Path:
    model, _ = make(config, 1)
    base = config.checkpoint.pretrained_checkpoint
    fingerprint = "" if base is None else TensorFiles(base).fingerprint()
    state = RunState(1, 4, 7, 1, 0, 0, model=model_identity(config), base=fingerprint)
    save_checkpoint(run, state, model.optimizer.segment_states(), model.mesh)
    (run / "config.toml").write_text(config.to_toml())
    return run


NOT_ALONE: dict[str, tuple[str, dict[str, Any], str]] = {
    "shared experts": ("glm-4.5-tiny", {"moe_layer_freq": "[1]*2"}, "layers.0.mlp.shared.gate.weight"),
    "dense layers": ("glm-4.5-tiny", {"moe_layer_freq": "[0]+[1]"}, "layers.0.mlp.gate.weight"),
    "experts in one tensor": ("gpt-oss-tiny", {}, "layers.0.mlp.experts.0.gate.weight"),
}
"""What stands beside experts, or how they lie; model, flags, and the first matrix that PEFT cannot name."""


@pytest.mark.parametrize("case", NOT_ALONE)
def test_adapters_that_peft_cannot_name_are_merged_or_nothing(case: str, tmp_path: Path) -> None:
    model, flags, matrix = NOT_ALONE[case]
    run = _saved(config_of(model, **flags), tmp_path / "run")
    with pytest.raises(ConfigError) as refused:
        export_checkpoint(run, tmp_path / "adapter")
    assert str(refused.value) == (
        f"--lora-target-modules all-linear has adapters beside {matrix}, which PEFT cannot name in a model "
        "whose experts are stacked: write the whole model with --merge-adapters, or train the matrices of attention "
        "alone"
    )
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
    assert export_checkpoint(run, tmp_path / "merged", merge_adapters=True).files == ["model.safetensors"]
    run = _saved(config_of(model, **flags, lora_target_modules="q_proj,v_proj"), tmp_path / "attention")
    assert export_checkpoint(run, tmp_path / "adapter").files == [ADAPTER_FILE]


def test_a_run_without_adapters_has_none_to_merge(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = _saved(tiny("llama-tiny", dtype="fp32"), tmp_path / "run")
    said = refusal(["export", str(run), "--out", str(tmp_path / "out"), "--merge-adapters"], capsys)
    assert said == f"--merge-adapters: {run}/iter_0000001 was trained without LoRA: leave the flag out"


def test_more_than_adapters_was_trained(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = _saved(config_of("llama-tiny", train_only="*norm.weight"), tmp_path / "run")
    said = refusal(["export", str(run), "--out", str(tmp_path / "out")], capsys)
    assert said == (
        "--train-only *norm.weight has trained more than adapters, which PEFT's files do not hold: write the whole "
        "model with --merge-adapters"
    )
    assert not list(tmp_path.glob("out*"))
    assert export_checkpoint(run, tmp_path / "out", merge_adapters=True).files == ["model.safetensors"]


def test_adapters_of_a_model_that_was_changed_are_merged_or_nothing(tmp_path: Path) -> None:
    """PEFT would add them to the model as its config.json says: other positions, and nobody would be told."""
    export_checkpoint(_saved(tiny("llama-tiny", dtype="fp32"), tmp_path / "plain"), tmp_path / "model")
    config = choose_model(tiny(dtype="fp32"), tmp_path / "model").override({**FLAGS, "save": str(tmp_path / "run")})
    longer = config.override({"seq_length": 128, "rope_scaling_type": "linear", "rope_scaling_factor": 2.0})
    assert stand_alone(config, read_config(tmp_path / "model"))
    assert not stand_alone(longer, read_config(tmp_path / "model"))
    keep_companions(longer, str(tmp_path / "run"))
    run = _saved(longer, tmp_path / "run")
    with pytest.raises(ConfigError) as refused:
        export_checkpoint(run, tmp_path / "adapter")
    assert str(refused.value) == (
        "the adapters were trained with another --rope-scaling-type than config.json of the model says (none then, "
        "linear now), which PEFT's files do not tell: write the whole model with --merge-adapters"
    )
    export_checkpoint(run, tmp_path / "merged", merge_adapters=True, base=tmp_path / "model")
    assert read_config(tmp_path / "merged").model.rope_scaling_type == "linear"


def test_a_run_refuses_the_adapter_of_another(adapters: Path, tmp_path: Path) -> None:
    """Before anything is trained, and on the rank that reads it; a run that resumes does not read it."""
    plain = tiny("llama-tiny", dtype="fp32")
    export_checkpoint(_saved(plain, tmp_path / "plain"), tmp_path / "model")
    config = choose_model(tiny(dtype="fp32"), tmp_path / "model").override(FLAGS)
    given = config.override({"lora_checkpoint": str(adapters / "llama")})
    make(given, 1)
    other = given.override({"lora_alpha": 8.0})
    for start in (prepare, lambda config: make(config, 1)):
        with pytest.raises(MemoError, match=r"lora_alpha is 6.0, and --lora-alpha makes it 8.0: train its adapters"):
            start(other)
    run = _saved(config, tmp_path / "run")
    prepare(other.override({"lora_alpha": 6.0, "lora_checkpoint": "gone", "load": str(run)}))


def test_the_initial_adapters_are_those_that_are_given(adapters: Path, tmp_path: Path) -> None:
    """And an export of them is the same file, but for the order of its tensors."""
    export_checkpoint(_saved(tiny("llama-tiny", dtype="fp32"), tmp_path / "plain"), tmp_path / "model")
    config = choose_model(tiny(dtype="fp32"), tmp_path / "model").override(FLAGS)
    run = _saved(config.override({"lora_checkpoint": str(adapters / "llama")}), tmp_path / "run")
    export_checkpoint(run, tmp_path / "adapter")
    first, again = (load_file(d / ADAPTER_FILE) for d in (adapters / "llama", tmp_path / "adapter"))
    assert first.keys() == again.keys() and all(first[name].equal(again[name]) for name in first)
