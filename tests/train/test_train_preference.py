"""Runs with --preference: references from memory and from files, resumption, evaluation, logs, and what is refused."""

import functools
import json
import re
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from chats import write_lines, write_llama
from pairs import open_pairs, some_pairs, write_pairs
from processes import by_hand
from ranks import run_ranks
from trainers import tiny_trainer

import memo
from memo.artifacts.reference_log_probs import ReferenceLogProbs
from memo.artifacts.run_log import RunLog
from memo.cli.main import main as command
from memo.config import TrainingConfig
from memo.errors import ConfigError
from memo.train.metrics import _scalars
from memo.train.preference import preference_losses

torch.set_num_threads(1)

VOCAB, STEPS = 257, 3
FLAGS: dict[str, Any] = {
    "mock_data": False,
    "train_iters": STEPS,
    "lr_decay_iters": 10,
    "params_dtype": "fp64",
    "vocab_size": VOCAB,
}
DPO: dict[str, Any] = {**FLAGS, "preference": "dpo"}
LORA: dict[str, Any] = {**DPO, "lora_rank": 2}


@pytest.fixture(scope="module")
def prefix(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_pairs(tmp_path_factory.mktemp("preference") / "pairs", some_pairs(40, VOCAB), VOCAB)


def _losses(prefix: str, flags: dict[str, Any]) -> list[float]:
    with tiny_trainer(data_path=prefix, **flags) as trainer:
        return [record.lm_loss for record in trainer.train()]


def test_the_loss_begins_at_that_of_equal_models_and_falls(prefix: str) -> None:
    """New adapters change nothing: log 2 for DPO, 1 / (2 beta)^2 for IPO, whatever the pairs are."""
    flags = {**LORA, "train_iters": 6, "lr": 0.1, "lr_warmup_iters": 0}
    (losses,) = run_ranks(1, _losses, prefix, flags)
    assert losses[0] == pytest.approx(torch.tensor(2.0).log().item()) and losses[-1] < 0.685
    (losses,) = run_ranks(1, _losses, prefix, {**flags, "preference": "ipo", "preference_beta": 0.5})
    assert losses[0] == pytest.approx(1.0) and losses[-1] < 0.99


def test_a_file_of_log_probs_is_a_reference_to_the_bit(prefix: str, tmp_path: Path) -> None:
    """New adapters add nothing, so the model before its first step is the model without them. Any layout may write the
    file, and any may read it: 1e-12. Of another model it is refused."""
    file = tmp_path / "reference.json"
    stored = {**LORA, "reference_log_probs": str(file)}
    (plain,) = run_ranks(1, _losses, prefix, LORA)
    (written,) = run_ranks(1, _losses, prefix, stored)
    content = ReferenceLogProbs.load(file)
    assert content.pairs == list(range(40)) and all(value < 0 for value in (*content.chosen, *content.rejected))
    (again,) = run_ranks(1, _losses, prefix, stored)
    assert plain == written == again and len({*plain}) == STEPS
    assert all(each == pytest.approx(plain, rel=1e-12) for each in run_ranks(2, _losses, prefix, {**stored, "tp": 2}))
    with pytest.raises(
        ConfigError, match=r"is of other data or of another model: model of seed 1234 then, of seed 5 now: "
    ):
        tiny_trainer(data_path=prefix, **{**stored, "seed": 5})
    file.unlink()
    run_ranks(2, _losses, prefix, {**stored, "cp": 2})
    wanted = ReferenceLogProbs.load(file)
    assert content.of == wanted.of and content.chosen == pytest.approx(wanted.chosen, rel=1e-12)


def test_all_weights_may_be_trained_beside_a_file(prefix: str, tmp_path: Path) -> None:
    stored = {**DPO, "reference_log_probs": str(tmp_path / "reference.json"), "lr_warmup_iters": 0, "train_iters": 6}
    (alone_,) = run_ranks(1, _losses, prefix, stored)
    assert alone_[0] == pytest.approx(torch.tensor(2.0).log().item()) and alone_[-1] < alone_[0]
    for layout in ({"pp": 2}, {"data_parallel_sharding_strategy": "optim_grads_params"}):
        for found in run_ranks(2, _losses, prefix, {**stored, **layout}):
            assert found == pytest.approx(alone_, rel=1e-9)


def _resumed(prefix: str, folder: Path) -> list[float]:
    saved = {**LORA, "save": str(folder / "run")}
    with tiny_trainer(data_path=prefix, **saved) as trainer:
        trainer.train()
    with tiny_trainer(data_path=prefix, **{**saved, "load": str(folder / "run"), "train_iters": 5}) as trainer:
        found = [record.lm_loss for record in trainer.train()]
    with pytest.raises(
        ConfigError, match=r"reference\.json does not exist, and this run is at iteration 5: its weights"
    ):
        stored = {**LORA, "load": str(folder / "run"), "reference_log_probs": str(folder / "reference.json")}
        with tiny_trainer(data_path=prefix, **{**stored, "train_iters": 6}) as trainer:
            trainer.train()
    return found


def test_a_resumed_run_goes_on_with_the_next_pairs(prefix: str, tmp_path: Path) -> None:
    (whole,) = run_ranks(1, _losses, prefix, {**LORA, "train_iters": 5})
    assert run_ranks(1, _resumed, prefix, tmp_path)[0] == whole[3:]


def test_evaluation_tells_the_loss_of_held_out_pairs(prefix: str, tmp_path: Path) -> None:
    held_out = write_pairs(tmp_path / "eval", some_pairs(9, VOCAB), VOCAB)
    with tiny_trainer(data_path=prefix, eval_data_path=held_out, eval_interval=2, **LORA) as trainer:
        assert trainer.evaluate(iters=2) == pytest.approx(torch.tensor(2.0).log().item())
        before = trainer.log_probs(_one(prefix))
        history = trainer.train()
        assert len(history.evaluations) == 1 and history.evaluations[0][1] != pytest.approx(0.6931, abs=1e-4)
        assert not trainer.log_probs(_one(prefix)).equal(before)


def _one(prefix: str) -> list[Any]:
    return [open_pairs(prefix, 64).sample(0)]


def test_the_log_has_the_rewards_by_their_names(
    prefix: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "log.jsonl"
    with tiny_trainer(data_path=prefix, log_jsonl=str(log), **LORA) as trainer:
        record = trainer.train().last
    assert record is not None and record.rewards_margins is not None and record.rewards_accuracies is not None
    assert record.rewards_margins == pytest.approx((record.rewards_chosen or 0) - (record.rewards_rejected or 0))
    line = f"rewards/margins {record.rewards_margins:.4g} | rewards/accuracies {record.rewards_accuracies:.4g}"
    assert line in capsys.readouterr().out
    assert RunLog.load(log).steps[-1].rewards_margins == record.rewards_margins
    assert _scalars(record)["rewards/accuracies"] == record.rewards_accuracies  # as trackers show it


def test_other_data_and_other_files_are_refused(prefix: str, tmp_path: Path) -> None:
    with (
        pytest.raises(ConfigError, match=r"--preference dpo learns from pairs of answers, but train_data holds none"),
        tiny_trainer(**LORA, train_data=[list(range(50))] * 20) as trainer,
    ):
        trainer.step()
    with (
        tiny_trainer(**{**LORA, "preference": None}, data_path=prefix, eval_data_path=prefix, eval_interval=1) as made,
    ):
        with pytest.raises(ConfigError, match=r"train_data holds pairs of .* texts to imitate: give --preference dpo"):
            made.step()
        with pytest.raises(ConfigError, match="the evaluation data are pairs of a chosen and a rejected answer"):
            made.evaluate()
    file = tmp_path / "reference.json"
    facts = {"seq_length": 32, "data_path": "other", "long_conversations": "truncate"}
    ReferenceLogProbs(facts, [0], [-1.0], [-2.0]).save(file)
    with pytest.raises(
        ConfigError,
        match=r"reference\.json is of other data or of another model: seq_length 32 then, 64 now; data_path other",
    ):
        tiny_trainer(**LORA, data_path=prefix, reference_log_probs=str(file))


def test_evaluation_without_a_reference_in_memory_is_refused(prefix: str, tmp_path: Path) -> None:
    flags = {**DPO, "reference_log_probs": str(tmp_path / "reference.json")}
    with (
        tiny_trainer(data_path=prefix, eval_data=prefix, **flags) as trainer,
        pytest.raises(ConfigError, match="--lora-rank 0 leaves no reference in memory"),
    ):
        trainer.evaluate()


def test_ipo_divides_by_the_lengths_of_answers() -> None:
    zeros = torch.zeros(1, dtype=torch.float64)
    policy, lengths = (zeros + 6.0, zeros - 4.0), (zeros + 3.0, zeros + 2.0)
    training = TrainingConfig(preference="ipo", preference_beta=0.5)
    assert preference_losses(training, policy, (zeros, zeros), lengths).item() == (2.0 + 2.0 - 1.0) ** 2


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama with random weights, and pairs.jsonl beside it."""
    folder = write_llama(tmp_path_factory.mktemp("dpo") / "model")

    def messages(role: str, text: str) -> list[dict[str, str]]:
        return [{"role": role, "content": text}]

    records = [
        {
            "prompt": messages("user", f"{a} or {b}?"),
            "chosen": messages("assistant", "yes please"),
            "rejected": messages("assistant", "no"),
        }
        for a in ("red", "blue", "sun", "moon")
        for b in ("one", "two", "cat")
    ]
    write_lines(folder.parent / "pairs.jsonl", records)
    return folder


def test_the_command_makes_a_corpus_of_a_file_and_learns_it(model: Path, tmp_path: Path) -> None:
    run_folder, adapter = tmp_path / "run", tmp_path / "adapter"
    words = ["train", "--preference", "dpo", "--model", str(model), "--lora-rank", "4", "--save", str(run_folder)]
    words += ["--data-path", str(model.parent / "pairs.jsonl"), "--num-epochs", "5", "--gbs", "2", "--seq-len", "128"]
    words += ["--lr", "1e-2", "--device", "cpu", "--params-dtype", "fp32", "--num-threads", "1"]
    with by_hand(2, tmp_path, ("module", "memo"), words) as run:
        ends = [run.ended(rank) for rank in range(2)]
        output = run.output(0)
    assert [end.status for end in ends] == [0, 0], ends[0].errors[-3000:]
    assert "12 pairs in" in output and "rewards/accuracies 1" in output
    steps = RunLog.load(run_folder).steps
    assert steps[0].lm_loss == pytest.approx(0.6931, abs=1e-3) and steps[-1].lm_loss < 0.4
    assert json.loads((run_folder / "data" / "pairs.json").read_text())["num_pairs"] == 12
    command(["generate", "--load", str(run_folder), "--chat", "--prompt", "red or one?", "--max-new-tokens", "5"])
    command(["export", str(run_folder), "--out", str(adapter)])
    assert (adapter / "adapter_model.safetensors").exists()


ROOT = Path(__file__).parents[2]


def test_the_example_of_the_page_runs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """docs/preference.md; the loss falls from step to step."""
    (example,) = re.findall(
        r"^```python\n(.*?)^```", (ROOT / "docs/preference.md").read_text(), re.DOTALL | re.MULTILINE
    )
    monkeypatch.setattr(
        memo, "Trainer", functools.partial(memo.Trainer, num_threads=1, device="cpu", lr_warmup_iters=0)
    )
    exec(compile(example, "docs/preference.md", "exec"), {"__name__": "__main__"})
    losses = [float(line) for line in capsys.readouterr().out.splitlines()]
    assert len(losses) == 3 and losses[2] < losses[0]


def test_the_example_of_grpo_runs(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Thirty completions in several global batches. In the first step of each batch ratios are 1, so the loss is the
    mean of advantages there, with the sign turned, and what little the model has left the reference."""
    records = [{"prompt": "say yes", "completion": " yes" * (i % 5 + 1), "advantage": 0.5} for i in range(30)]
    file = write_lines(tmp_path / "scored.jsonl", records)
    argv = ["--model", str(model), "--completions", str(file), "--seq-len", "64", "--gbs", "2", "--steps", "2"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["grpo.py", *argv])
        patch.setattr(memo, "Trainer", functools.partial(memo.Trainer, num_threads=1, device="cpu"))
        runpy.run_path(str(ROOT / "examples/grpo.py"), run_name="__main__")
    losses = [float(loss) for loss in re.findall(r"loss (-?[\d.]+)", capsys.readouterr().out)]
    assert len(losses) >= 4 and len(losses) % 2 == 0
    assert losses[0] == -0.5 and losses[::2] == pytest.approx([-0.5] * (len(losses) // 2), abs=1e-3)
