"""Stop and go on: N + N steps are 2 N steps, to the last bit in one layout and closely in another."""

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from checkpoints import assert_equal_bits
from ranks import run_ranks
from trainers import tiny_trainer

import memo
from memo.checkpoint.directory import latest_checkpoint
from memo.errors import CheckpointError
from memo.train.metrics import StepRecord

STEPS = 2


def _train(layout: dict[str, Any], folder: Path, part: str, stop_at: int = 0, **overrides: Any) -> None:
    """Train under Trainer as a rank of torchrun would, logging to folder/part.jsonl."""
    values = {"lr_decay_iters": 2 * STEPS, "lr_warmup_iters": 1, "train_iters": 2 * STEPS}
    values |= {"log_jsonl": str(folder / f"{part}.jsonl"), **layout, **overrides}

    def stop(record: StepRecord) -> None:
        if record.iteration == stop_at:
            os.kill(os.getpid(), signal.SIGTERM)

    with tiny_trainer(callbacks=[stop], **values) as trainer:
        trainer.train()


def records(folder: Path, part: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / f"{part}.jsonl").read_text().splitlines()]


def losses(folder: Path, part: str) -> list[tuple[int, float, float]]:
    return [(r["iteration"], r["lm_loss"], r["grad_norm"]) for r in records(folder, part)]


def consumed(folder: Path, part: str) -> list[int]:
    return [r["consumed_samples"] for r in records(folder, part)]


def _whole_and_in_two(layout: dict[str, Any], folder: Path, again: bool) -> None:
    """Four steps at once; then one command line, whose first run is stopped after two; `again`: when nothing is left,
    too."""
    _train(layout, folder, "whole", save=str(folder / "whole"))
    same = {"save": str(folder / "parts"), "load": f"{folder / 'parts'}/"}  # two names of one directory
    _train(layout, folder, "first", **same, stop_at=STEPS - 1)
    _train(layout, folder, "second", **same)
    if again:
        _train(layout, folder, "third", **same)


SWAP = {"offload_alpha": 0.5, "offload_tiles": 2, "num_layers": 4}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "bf16 tp2 dp2": (4, {"tp": 2, "params_dtype": "bf16", "async_save": True}),
    "bf16 swap pp2": (2, {"pp": 2, "params_dtype": "bf16", **SWAP}),
    "fp32 cp2": (2, {"cp": 2, "params_dtype": "fp32"}),
    "experts on dp2 with ZeRO-3": (
        2,
        {"num_experts": 5, "moe_aux_loss_coeff": 0.3, "data_parallel_sharding_strategy": "optim_grads_params"},
    ),
    "bf16 adapters, moments in bf16, dp2, half of states in host memory": (
        2,
        {"num_layers": 4, "params_dtype": "bf16", "lora_rank": 3, "lora_alpha": 5.0, "offload_states": "all"}
        | {"optimizer_offload_fraction": 0.5, "exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "bf16", "async_save": True},
    ),
    "bf16 adapters, tp2, ZeRO-3": (
        4,
        {"params_dtype": "bf16", "tp": 2, "lora_rank": 3, "data_parallel_sharding_strategy": "optim_grads_params"},
    ),
    "fp32 frozen layers, swap": (1, {"freeze": "embedding.weight,layers.[02].*", "async_save": True, **SWAP}),
    "bf16 delta nets": (
        1,
        {"num_layers": 2, "layer_types": "linear,full", "linear_num_key_heads": 2, "linear_num_value_heads": 4}
        | {"linear_key_head_dim": 16, "params_dtype": "bf16", "seq_length": 32},
    ),
    "bf16 experts with biases that move": (
        2,
        {"num_experts": 6, "moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True, "tp": 2}
        | {"moe_router_num_groups": 3, "moe_router_group_topk": 2, "moe_router_bias_update_rate": 0.1}
        | {"params_dtype": "bf16", "async_save": True},
    ),
}


IN_FULL = {"bf16 tp2 dp2", "bf16 adapters, tp2, ZeRO-3", "fp32 cp2"}
"""What others show in part each."""


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.full] * (name in IN_FULL)) for name in LAYOUTS])
def test_the_same_command_line_again_and_again_is_one_run_to_the_last_bit(tmp_path: Path, name: str) -> None:
    """Losses and gradient norms of every step; and at the end weights, moments, the sampler's and all counters.

    A stop is agreed on in the step after it is asked for, so the first part has STEPS steps.
    """
    world_size, layout = LAYOUTS[name]
    again = name == "fp32 frozen layers, swap"
    run_ranks(world_size, _whole_and_in_two, layout, tmp_path, again)
    whole = losses(tmp_path, "whole")
    assert len(losses(tmp_path, "first")) == STEPS
    assert losses(tmp_path, "first") + losses(tmp_path, "second") == whole
    assert not again or losses(tmp_path, "third") == []
    assert_equal_bits(latest_checkpoint(tmp_path / "parts"), latest_checkpoint(tmp_path / "whole"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four steps, and a checkpoint after two of them, on two data-parallel ranks in fp32."""
    folder = tmp_path_factory.mktemp("resume")
    layout = {"save": str(folder / "whole"), "save_interval": STEPS, "async_save": True}
    run_ranks(2, _train, layout, folder, "whole")
    (folder / "whole" / "latest_checkpointed_iteration.txt").write_text(f"{STEPS}\n")
    return folder


@pytest.mark.parametrize(
    ("world_size", "layout"),
    [
        (1, {}),
        (2, {"tp": 2, "offload_alpha": 0.5, "offload_tiles": 2}),
        pytest.param(4, {}, marks=pytest.mark.full),
        pytest.param(4, {"pp": 2, "cp": 2}, marks=pytest.mark.full),
    ],
    ids=["one rank", "tp2-swap", "dp4", "pp2-cp2"],
)
def test_another_number_of_ranks_or_layout_goes_on_with_the_same_samples(
    folder: Path, world_size: int, layout: dict[str, Any]
) -> None:
    """fp32: losses within 5e-6, ten roundings of a loss of 4: Adam divides by roots of tiny moments. Measured: 5e-7."""
    part = f"other{world_size}{layout}"
    values = {**layout, "load": str(folder / "whole")}
    run_ranks(world_size, _train, values, folder, part)
    rows = list(zip(losses(folder, part), losses(folder, "whole")[STEPS:], strict=True))
    assert [got[0] for got, _ in rows] == [3, 4]
    worst = max(abs(got[1] - wanted[1]) for got, wanted in rows)
    print(f"{part}: largest difference of a loss {worst:.1e}")
    assert worst <= 5e-6
    assert consumed(folder, part) == [12, 16]


def _refused(folder: Path, **overrides: Any) -> str:
    with pytest.raises(CheckpointError) as caught:
        _train({}, folder, "refused", load=str(folder / "whole"), **overrides)
    return str(caught.value)


def test_another_seed_is_refused(folder: Path) -> None:
    message = run_ranks(1, _refused, folder, seed=5)[0]
    assert "seed = 1234, this run has seed = 5" in message and "set seed = 1234" in message


def test_a_global_batch_that_follows_the_ranks_is_refused_when_it_changes(folder: Path) -> None:
    message = run_ranks(1, _refused, folder, global_batch_size=None)[0]
    assert f"--load {folder / 'whole'}: its run took 4 samples a step, but this one takes 1" in message
    assert "--global-batch-size is not given and follows the number of ranks: give --global-batch-size 4" in message


def test_a_global_batch_that_is_asked_for_may_change(folder: Path) -> None:
    values = {"load": str(folder / "whole"), "global_batch_size": 2, "train_iters": STEPS + 1}
    run_ranks(1, _train, values, folder, "smaller")
    assert consumed(folder, "smaller") == [10]


def _goes_on_with_another_seed(folder: Path) -> int:
    def trainer(load: Path | None, save: Path) -> memo.Trainer:
        return memo.Trainer(
            "gpt-tiny", seed=7 if load else 1234, load=load and str(load), save=str(save), mock_data=True, seq_length=64
        )

    with trainer(None, folder / "untrained") as first:
        first.save()
    with trainer(folder / "untrained", folder / "trained") as second:
        second.step()
        second.save()
    with trainer(folder / "trained", folder / "trained") as third:
        return third.iteration


def test_a_checkpoint_that_has_read_no_data_goes_on_with_any_seed(tmp_path: Path) -> None:
    """Such as that of memo import: what follows it belongs to the seed that read the data."""
    assert run_ranks(1, _goes_on_with_another_seed, tmp_path) == [1]
