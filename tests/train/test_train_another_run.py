"""--load of a run that was another: its model computed something else from equal shapes, or it read other data."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from documents import write_corpus
from layouts import make, tiny
from ranks import run_ranks
from trainers import tiny_trainer

import memo
from memo.checkpoint.directory import latest_checkpoint
from memo.checkpoint.run_state import RunState, read_state
from memo.checkpoint.store import save_checkpoint
from memo.config import RunConfig
from memo.config.evaluation_run import for_evaluation
from memo.config.flags import load_run
from memo.config.identity import DATA_FACTS, MODEL_FACTS, differences, model_identity
from memo.config.model import ModelConfig
from memo.data import PackedDataset
from memo.data.corpus import data_identity
from memo.data.indexed import IndexedDataset
from memo.errors import CheckpointError

STEPS = 2


def corpus(folder: Path, name: str, shift: int = 0) -> str:
    """40 documents of 100 tokens."""
    documents = ([(7 * document + 3 * token + shift) % 60 for token in range(100)] for document in range(40))
    return write_corpus(folder / name, documents)


def trainer(data: str | None = None, **overrides: Any) -> memo.Trainer:
    values: dict[str, Any] = {"train_iters": STEPS, "lr_decay_iters": 10}
    if data is not None:
        values |= {"data_path": data, "mock_data": False}
    return tiny_trainer(**{**values, **overrides})


def _save(folder: Path, data: str) -> None:
    with trainer(data, save=str(folder / "run")) as made:
        made.train()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("another")
    run_ranks(1, _save, folder, corpus(folder, "first"))
    return folder


def _refused(folder: Path, overrides: dict[str, Any]) -> str:
    with pytest.raises(CheckpointError) as caught:
        trainer(str(folder / "first"), load=str(folder / "run"), **overrides)
    return str(caught.value)


def _goes_on(folder: Path, overrides: dict[str, Any]) -> int:
    with trainer(str(folder / "first"), **{"load": str(folder / "run"), "train_iters": 3, **overrides}) as made:
        assert made.iteration == STEPS
        made.train()
        return made.iteration


CHANGES: dict[str, tuple[dict[str, Any], str]] = {
    "heads": (
        {"num_attention_heads": 2, "num_query_groups": 1, "kv_channels": 16},
        "num_attention_heads 4 then, 2 now; num_query_groups 2 then, 1 now; kv_channels 8 then, 16 now",
    ),
    "length": ({"seq_length": 32}, "seq_length 64 then, 32 now"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_changes_no_shape_is_refused_by_name_and_may_be_accepted(folder: Path, name: str) -> None:
    overrides, expected = CHANGES[name]
    message = run_ranks(1, _refused, folder, overrides)[0]
    assert f"--load {folder / 'run'}: its run was another: {expected}" in message
    assert f"give the flags of that run, or accept what changes with --load-accept-changes {expected.split()[0]}" in (
        message
    )
    assert "\n" not in message
    accepted = ",".join(overrides) + (",seq-len" if name == "length" else "")
    assert run_ranks(1, _goes_on, folder, {**overrides, "load_accept_changes": accepted}) == [3]


@pytest.mark.parametrize(
    ("flags", "expected", "accepts"),
    [
        ({"lora_rank": 2}, "lora_rank 0 then, 2 now", True),
        ({"freeze": "layers.0.*"}, "freeze nothing then, layers.0.* now", False),
        ({"train_only": "layers.1.*"}, "train_only nothing then, layers.1.* now", True),
    ],
)
def test_other_trained_parameters_are_never_accepted(
    folder: Path, flags: dict[str, Any], expected: str, accepts: bool
) -> None:
    """Their moments are not there."""
    accepted = {"load_accept_changes": ",".join((*flags, "lora_alpha"))} if accepts else {}
    message = run_ranks(1, _refused, folder, {**flags, **accepted})[0]
    assert message == (
        f"--load {folder / 'run'}: its run trained other parameters: {expected}; a checkpoint has the moments of those "
        f"alone: give the flags of that run, or write its model with `memo export {folder / 'run'} --out DIR` and "
        "start from it with --model DIR"
    )


def test_a_change_of_shapes_cannot_be_accepted(folder: Path) -> None:
    message = run_ranks(1, _refused, folder, {"num_layers": 3})[0]
    assert message.endswith("its run was another: num_layers 2 then, 3 now: give the flags of that run")


def test_every_rank_refuses_alike(folder: Path) -> None:
    first, second = run_ranks(2, _refused, folder, {"rotary_base": 500000.0, "seq_length": 32, "global_batch_size": 4})
    assert first == second and first.endswith("--load-accept-changes rotary_base,seq_length")


def test_another_corpus_is_refused_and_the_same_elsewhere_is_not(folder: Path, tmp_path: Path) -> None:
    message = run_ranks(1, _refused, folder, {"data_path": corpus(tmp_path, "other", shift=1)})[0]
    assert "data_path 40 documents of 4000 tokens, " in message and "--load-accept-changes data_path" in message
    run_ranks(1, _goes_on, folder, {"data_path": corpus(tmp_path, "moved")})


def test_one_of_two_changes_that_is_not_accepted_is_still_refused(folder: Path) -> None:
    overrides = {"rotary_base": 5e5, "norm_epsilon": 1e-6, "load_accept_changes": "rotary_base"}
    message = run_ranks(1, _refused, folder, overrides)[0]
    assert "its run was another: norm_epsilon 1e-05 then, 1e-06 now: give" in message


def _evaluates(folder: Path, other: str) -> bool:
    """Other data and another length, as in `memo evaluate`; another model is still refused."""
    config = tiny("llama-tiny", kv_channels=8).override(
        {"load": str(folder / "run"), "seq_length": 32, "data_path": other, "mock_data": False, "num_threads": 1}
        | {"params_dtype": "fp32", "peak_tflops": 1.0, "progress": False, "offload_alpha": "off", "eval_iters": 1}
    )
    with memo.Trainer(config=for_evaluation(config, 1)) as made:
        assert made.evaluate() > 0
    with pytest.raises(CheckpointError, match=r"rotary_base 10000\.0 then"):
        memo.Trainer(config=for_evaluation(config.override({"rotary_base": 5e5}), 1))
    return True


def test_an_evaluation_may_read_any_data(folder: Path, tmp_path: Path) -> None:
    assert run_ranks(1, _evaluates, folder, corpus(tmp_path, "other", shift=1)) == [True]


def test_a_checkpoint_that_names_nothing_is_taken_as_before(folder: Path, tmp_path: Path) -> None:
    """As versions 1 and 2 of the schema: nobody wrote it down."""
    state = read_state(latest_checkpoint(folder / "run"))
    assert state.data["seq_length"] == 64 and state.model["rotary_base"] == 10000.0
    assert differences({}, state.model) == {} == differences({}, state.data)


def test_a_field_that_a_checkpoint_does_not_know_had_its_default() -> None:
    """So that a new field refuses no older checkpoint, unless it is used."""
    now = model_identity(RunConfig(model=ModelConfig(vocab_size=64)))
    then = {name: value for name, value in now.items() if name != "qk_layernorm"}
    assert differences(then, now) == {}
    assert differences(then, {**now, "qk_layernorm": True}) == {"qk_layernorm": "False then, True now"}


def _other(value: object) -> object:
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return 2 * value or 64
    return {"LayerNorm": "RMSNorm", "gelu": "swiglu"}.get(str(value), 64)


@pytest.mark.parametrize("name", MODEL_FACTS)
def test_every_field_of_the_model_counts_unless_it_is_known_not_to(name: str) -> None:
    """A field that is new is refused here until somebody has thought of it, or counts by itself."""
    ignored = {"init_method_std", "max_position_embeddings", "rope_low_freq_factor", "rope_high_freq_factor"}
    special = {"rope_scaling_type": "llama3", "position_embedding_type": "learned_absolute"}
    special |= {"custom_layer": "layers.py:Mine", "layer_types": "sliding,full", "moe_layer_freq": "[0]+[1]*3"}
    special |= {"moe_router_score_function": "softmax", "no_rope_freq": "[0,0,0,1]"}
    base = {"vocab_size": 64, "rope_scaling_type": "yarn", "rope_scaling_factor": 2.0, "num_experts": 4}
    base |= {"layer_types": "linear,full", "moe_router_score_function": "sigmoid", "lora_rank": 4}
    base |= {"normalization": "RMSNorm", "qk_layernorm": True, "moe_shared_expert_intermediate_size": 64}
    if name in ("q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim"):
        base |= {"multi_latent_attention": True}  # with which the size of heads is not read
    if name in ("rope_short_factor", "rope_long_factor"):
        base |= {"rope_scaling_type": "longrope"}
    model = ModelConfig(**base)  # type: ignore[arg-type]
    changed = dataclasses.replace(model, **{name: special.get(name, _other(getattr(model, name)))})
    before, after = (model_identity(RunConfig(model=m)) for m in (model, changed))
    assert (before == after) == (name in ignored)
    assert (differences(before, after) == {}) == (name in ignored)


def test_defaults_that_are_written_out_are_no_difference() -> None:
    plain = ModelConfig(vocab_size=64, hidden_size=32, num_attention_heads=4)
    spelled = dataclasses.replace(plain, kv_channels=8, num_query_groups=4, ffn_hidden_size=128)
    assert model_identity(RunConfig(model=plain)) == model_identity(RunConfig(model=spelled))
    once, twice = (dataclasses.replace(plain, layer_types=",".join(["sliding,full"] * n)) for n in (1, 2))
    assert model_identity(RunConfig(model=once)) == model_identity(RunConfig(model=twice))


def test_names_of_data_are_those_that_can_be_accepted(folder: Path) -> None:
    dataset = PackedDataset(IndexedDataset(folder / "first"), 64, 7)
    assert data_identity(RunConfig().data, dataset).keys() <= set(DATA_FACTS)


def test_a_state_without_model_and_data_can_still_be_saved(tmp_path: Path) -> None:
    """Tools that save by themselves need not know the run."""
    model, _ = make(tiny(), 1)
    final = save_checkpoint(tmp_path, RunState(1, 4, 7, 1, 0, 0), model.optimizer.segment_states(), model.mesh)
    assert read_state(final).model == {} == read_state(final).data


def test_only_fields_can_be_accepted(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        load_run(["--mock-data", "--load", "x", "--load-accept-changes", "rotary"])
    assert "--load-accept-changes names rotary, which is no field of model or data" in capsys.readouterr().err
