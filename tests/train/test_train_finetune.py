"""`memo finetune`: from a Hugging Face directory and a file of conversations to a Hugging Face directory."""

import itertools
import json
import math
import re
import shutil
from pathlib import Path

import pytest
import torch
from chats import write_lines, write_llama
from forked import Kind
from processes import alone, by_hand

from memo.artifacts.run_log import RunLog
from memo.cli import finetune as command
from memo.cli.main import main
from memo.config import RunConfig
from memo.data import IndexedDataset, build_chat
from memo.data.corpus import with_epochs
from memo.errors import ConfigError
from memo.report.run_page import run_page
from memo.train.plan_run import gpu_machine, has_own_layout, own_host_gib, plan_run

WORDS = ["red", "blue", "one", "two", "cat", "sun", "moon"]
FLAGS = [
    *("--seq-len", "128", "--gbs", "2", "--lr", "1e-2", "--num-threads", "1"),
    *("--weight-decay", "0", "--eval-fraction", "0.1", "--device", "cpu"),
    *("--params-dtype", "fp64", "--log-interval", "1000"),
]
LOSSES = re.compile(
    r"loss of held-out (?:pairs|answers, nats a token): ([\d.]+) (?:before|at iteration \d+), ([\d.]+) after"
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama with random weights; beside it chat.jsonl: repeat two words, and pairs.jsonl: say red, not blue."""
    folder = write_llama(tmp_path_factory.mktemp("finetune") / "model")
    pairs = list(itertools.product(WORDS, WORDS))
    write_lines(folder.parent / "chat.jsonl", [{"instruction": f"say {a} {b}", "output": f"{a} {b}"} for a, b in pairs])
    says = [{"role": "assistant", "content": said} for said in ("red", "blue")]
    preferred = [{"prompt": f"say {a} {b}", "chosen": says[:1], "rejected": says[1:]} for a, b in pairs]
    write_lines(folder.parent / "pairs.jsonl", preferred)
    return folder


def finetune(
    model: Path, save: Path, *flags: str, epochs: int = 30, ranks: int = 1, data: str = "chat.jsonl"
) -> tuple[float, float, str]:
    """Losses before and after, and all that was printed."""
    places = ["--model", str(model), "--train-data", str(model.parent / data), "--save", str(save)]
    words = ["finetune", *places, *FLAGS, *flags, "--num-epochs", str(epochs)]
    program: tuple[Kind, str] = ("module", "memo")
    folder = save.parent
    with alone(folder, program, words) if ranks == 1 else by_hand(ranks, folder, program, words) as run:
        ends = [run.ended(rank) for rank in range(ranks)]
    assert [end.status for end in ends] == [0] * ranks, ends[0].errors[-3000:]
    found = LOSSES.search(run.output(0))
    assert found, run.output(0)[-3000:]
    return float(found[1]), float(found[2]), run.output(0)


@torch.no_grad()
def loss_of_transformers(folder: Path, corpus: str) -> float:
    """Mean over all answer tokens of a corpus, conversation by conversation, in fp64."""
    from transformers import AutoModelForCausalLM

    loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    tokens, mask = IndexedDataset(corpus), IndexedDataset(f"{corpus}.mask")
    total, count = 0.0, 0
    for i in range(len(tokens)):
        ids = torch.from_numpy(tokens[i].astype("int64"))[None]
        labels = ids.masked_fill(torch.from_numpy(mask[i].astype("int64"))[None] == 0, -100)
        num = int((labels[:, 1:] != -100).sum())
        total += loaded(input_ids=ids, labels=labels).loss.item() * num
        count += num
    return total / count


def answer_of_transformers(folder: Path, question: str) -> str:
    """What follows the question, decoded greedily until a token that the model's own files say ends a text."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer, loaded = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    asked = [{"role": "user", "content": question}]
    ids = tokenizer.apply_chat_template(asked, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    out = loaded.generate(**ids, max_new_tokens=20, do_sample=False)
    text: str = tokenizer.decode(out[0, ids["input_ids"].shape[1] :])
    return text


def test_finetuning_lowers_the_loss_of_answers(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What is printed is what transformers computes of the held-out conversations, before and of the export.

    fp64, so within 6e-5, of which 5e-5 is the last printed digit. The held-out conversations fit one sample, so the
    mean over tokens is that over batches.
    """
    before, after, printed = finetune(model, tmp_path / "one", "--offload-alpha", "off", epochs=20)
    corpus = str(tmp_path / "one" / "data" / "chat-eval")
    assert len(IndexedDataset(corpus)) >= 3 and "in 1 samples" in printed
    assert abs(before - loss_of_transformers(model, corpus)) < 6e-5
    assert abs(after - loss_of_transformers(tmp_path / "one" / "hf", corpus)) < 6e-5
    assert after < before / 2
    assert answer_of_transformers(tmp_path / "one" / "hf", "say moon cat") == "moon cat<|im_end|>"
    exported = tmp_path / "one" / "hf"
    assert "<|im_start|>" in (exported / "chat_template.jinja").read_text()
    assert json.loads((exported / "generation_config.json").read_text())["eos_token_id"] == [2, 0]
    assert (exported / "tokenizer.json").read_bytes() == (model / "tokenizer.json").read_bytes()
    for weights in (["--model", str(exported), "--seq-len", "128"], ["--load", str(tmp_path / "one")]):
        asked = ["--chat", "--prompt", "say moon cat", "--device", "cpu", "--num-threads", "1"]
        assert main(["generate", *weights, *asked]) == 0
        assert capsys.readouterr().out.splitlines()[-1] == "moon cat"
    assert main(["evaluate", "--load", str(tmp_path / "one"), "--device", "cpu", "--num-threads", "1"]) == 0
    assert f" {after:.4f} " in capsys.readouterr().out, "of the held-out conversations"
    log = RunLog.load(tmp_path / "one")
    last = log.steps[-1].iteration
    assert [iteration for iteration, _ in log.evaluations] == [0, last]
    assert [loss for _, loss in log.evaluations] == pytest.approx([before, after], abs=5.1e-5)
    assert f"{before:.4f} (iteration 0) to {after:.4f} (iteration {last})" in run_page({"one": log}, [])


def test_preferences_are_learned_and_told_of_pairs_that_were_held_out(model: Path, tmp_path: Path) -> None:
    """Adapters begin as the reference, where the loss of a pair is ln 2, and are written alone, for PEFT.

    test_train_preference.py has two ranks.
    """
    flags = ["--preference", "dpo", "--lora-rank", "8"]
    before, after, printed = finetune(model, tmp_path / "one", *flags, epochs=3, data="pairs.jsonl")
    assert before == pytest.approx(math.log(2), abs=1e-4) and after < 0.5 * before
    assert re.search(r"held out: \d pairs in ", printed)
    hf = tmp_path / "one" / "hf"
    assert f"exported an adapter of LlamaForCausalLM to {hf}\n" in printed
    written = {each.name for each in hf.iterdir() if "adapter" in each.name or each.suffix == ".safetensors"}
    assert written == {"adapter_config.json", "adapter_model.safetensors"}


@pytest.fixture(scope="module")
def short(model: Path) -> tuple[Path, float, float]:
    """A run of a few steps, and its losses before and after."""
    save = model.parent / "runs" / "short"
    save.parent.mkdir()
    before, after, _ = finetune(model, save, "--offload-alpha", "off", epochs=2)
    return save, before, after


def test_a_run_that_goes_on_says_at_which_iteration_its_first_loss_is(
    model: Path, tmp_path: Path, short: tuple[Path, float, float]
) -> None:
    save, after = tmp_path / "one", short[2]
    shutil.copytree(short[0], save, ignore=shutil.ignore_patterns("hf"))
    last = RunLog.load(save).steps[-1].iteration
    again, _, printed = finetune(model, save, "--offload-alpha", "off", "--load", str(save), epochs=3)
    assert again == after and f"nats a token: {after:.4f} at iteration {last}, " in printed


def test_a_corpus_for_evaluation_leaves_all_data_to_train_on(
    model: Path, tmp_path: Path, short: tuple[Path, float, float]
) -> None:
    save, corpora = tmp_path / "one", [short[0] / "data" / name for name in ("chat", "chat-eval")]
    given = ["--eval-data-path", str(corpora[1]), "--offload-alpha", "off"]
    before, _, _ = finetune(model, save, *given, epochs=1)
    assert before == short[1]
    assert {each.name for each in (save / "data").glob("*.idx")} == {"chat.idx", "chat.mask.idx"}
    all_of_them = sum(len(IndexedDataset(str(corpus))) for corpus in corpora)
    assert len(IndexedDataset(str(save / "data" / "chat"))) == all_of_them


def test_two_ranks_under_a_plan_are_the_same_run(
    model: Path, tmp_path: Path, short: tuple[Path, float, float], capsys: pytest.CaptureFixture[str]
) -> None:
    """To the last printed digit, after few steps: over hundreds even fp64's rounding grows to what is printed."""
    save, before, after = short
    two = finetune(model, tmp_path / "two", "--plan", "auto", "--plan-hardware", "a100-40", epochs=2, ranks=2)
    assert re.search(r"^plan: tp\d cp\d pp\d mbs\d.*, keep$", two[2], re.MULTILINE), two[2][:2000]
    assert after < before - 0.5
    assert abs(two[0] - before) < 1.1e-4 and abs(two[1] - after) < 1.1e-4
    flags = ["--prompt", "say red sun", "--max-new-tokens", "8", "--device", "cpu", "--num-threads", "1"]
    asked = ["generate", "--load", str(save), "--chat", *flags]
    assert main(asked) == 0
    alone_told = capsys.readouterr().out.splitlines()[-1]
    with by_hand(2, tmp_path, ("module", "memo"), [*asked, "--tp", "2"]) as run:
        ends = [run.ended(rank) for rank in range(2)]
    assert [end.status for end in ends] == [0, 0], ends[0].errors[-3000:]
    assert run.output(0).splitlines()[-1] == alone_told, "the first rank alone writes the prompt"


def test_data_that_cannot_be_read_end_every_rank_alike(model: Path, tmp_path: Path) -> None:
    write_lines(tmp_path / "chat.jsonl", [{"nothing": "here"}])
    places = ["--model", str(model), "--train-data", str(tmp_path / "chat.jsonl"), "--save", str(tmp_path / "save")]
    with by_hand(2, tmp_path, ("module", "memo"), ["finetune", *places, *FLAGS]) as run:
        ends = [run.ended(rank) for rank in range(2)]
    assert [end.status for end in ends] == [2, 2]
    for end in ends:
        assert "Traceback" not in end.errors
        assert "chat.jsonl" in end.errors


def test_a_corpus_that_is_already_there(model: Path, tmp_path: Path) -> None:
    """Without --train-data, --data-path is used as it is; epochs count its samples."""
    prefix = tmp_path / "chat"
    build_chat([model.parent / "chat.jsonl"], prefix, tokenizer=str(model), split_eval=0.1)
    config = RunConfig().override(
        {"data_path": str(prefix), "seq_length": 64, "global_batch_size": 4, "num_epochs": 2.5}
    )
    assert command.build_corpus(config, command.Options(), str(model), str(tmp_path / "save")) == str(prefix)
    samples = json.loads(Path(f"{prefix}.json").read_text())["num_tokens"] / 65
    steps = with_epochs(config, world_size=1).training.train_iters
    for file in tmp_path.glob("chat-eval*"):
        file.unlink()
    with pytest.raises(ConfigError, match=r"has no held-out part, .*chat-eval: build both with `memo data chat`"):
        command.build_corpus(config, command.Options(), str(model), str(tmp_path / "save"))
    assert samples * 2.5 / 4 <= steps <= 1.3 * samples * 2.5 / 4 + 1


def test_plan_run_takes_the_plan_and_keeps_the_rest() -> None:
    config = RunConfig().override({"seq_length": 262144, "global_batch_size": 8, "lr": 1e-5, "seed": 3})
    planned, choice = plan_run(config, "gpt-7b", 8, "a800-80")
    assert planned.parallel.tp == choice.layout.tp and planned.parallel.cp == choice.layout.cp
    assert planned.training.micro_batch_size == choice.layout.mbs
    assert planned.memory.offload_alpha == choice.strategy.alpha
    assert (planned.training.lr, planned.training.seed, planned.data) == (1e-5, 3, config.data)
    assert has_own_layout(planned) and not has_own_layout(config)
    with pytest.raises(ConfigError, match="conflicts with flags of layout"):
        plan_run(planned, "gpt-7b", 8, "a800-80")
    with pytest.raises(ConfigError, match=r"nothing fits on 1 x a800-80 with .*: `memo plan` with"):
        plan_run(RunConfig().override({"seq_length": 1 << 24}), "gpt-65b", 1, "a800-80")  # states might go to the host


def test_a_plan_knows_what_is_trained() -> None:
    """64K tokens of an 8B model on one GPU: all of its states do not fit there, those of adapters do."""
    config = RunConfig().override({"seq_length": 65536, "global_batch_size": 1})
    both = config, config.override({"lora_rank": 16})
    whole, adapters = (plan_run(each, "llama-3.1-8b", 1, "h100-80")[0] for each in both)
    assert (whole.memory.offload_states, adapters.memory.offload_states) == ("optimizer", "none")
    assert adapters.model == both[1].model


def test_a_plan_takes_what_changes_its_memory_and_whole_pairs() -> None:
    """Moments in bf16 instead of fp32 leave host memory free; a quicker link would fill it with activations."""
    config = RunConfig().override({"seq_length": 65536, "preference": "dpo"})
    planned, choice = plan_run(config, "llama-3.1-8b", 1, "a800-80")
    assert planned.training.global_batch_size == 2
    narrow = config.override({"exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "bf16"})
    assert plan_run(narrow, "llama-3.1-8b", 1, "a800-80")[1].sized.host_bytes < choice.sized.host_bytes


def test_a_plan_for_this_node_takes_its_host_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of two GPUs gets half of it. All states of an 8B model do not fit on the GPU, nor in 64 GiB beside it."""
    pretend(monkeypatch, "NVIDIA H100 80GB HBM3", 79.18)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    config = RunConfig().override({"seq_length": 65536, "global_batch_size": 1})
    for gib, expected_gib in {1003.3: 496, 128.9: 64}.items():
        monkeypatch.setattr("memo.train.plan_run.total_host_bytes", lambda gib=gib: int(gib * 2**30))
        assert own_host_gib() == expected_gib
        if expected_gib > 64:
            planned, choice = plan_run(config, "llama-3.1-8b", 1)
            assert planned.memory.offload_states == "optimizer" and choice.sized.host_bytes > 64 * 2**30
        else:
            with pytest.raises(
                ConfigError,
                match=r"on 1 x h100-80 with 64 GiB of host memory a node: `memo plan` with --host-memory-gib 64 tells",
            ):
                plan_run(config, "llama-3.1-8b", 1)


def test_a_whole_model_is_written_where_peft_does_not_hold_all_that_was_trained(model: Path, tmp_path: Path) -> None:
    lora = ("--lora-rank", "4", "--offload-alpha", "off", "--train-only", "*norm.weight")
    before, after, printed = finetune(model, tmp_path / "one", *lora, epochs=2)
    assert after < before
    assert f"exported LlamaForCausalLM to {tmp_path / 'one' / 'hf'}\n" in printed
    assert [path.name for path in (tmp_path / "one" / "hf").glob("*.safetensors")] == ["model.safetensors"]


def test_the_machine_is_that_of_the_gpu_and_a_gpu_that_none_has_is_asked_about(monkeypatch: pytest.MonkeyPatch) -> None:
    """test_estimate_machines.py has the names of all."""
    pretend(monkeypatch, "NVIDIA H100 80GB HBM3", 79.18)
    assert gpu_machine().name == "h100-80"
    pretend(monkeypatch, "Tesla T4", 14.6)
    with pytest.raises(ConfigError) as caught:
        plan_run(RunConfig(), "gpt-7b", 8)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="name the machine to plan for with --plan-hardware"):
        plan_run(RunConfig(), "gpt-7b", 8)
    message = str(caught.value)
    assert message.startswith("--plan auto knows no machine with the GPU found here, Tesla T4 with 14.6 GiB: name one")
    assert "--plan-hardware (a10 is nearest in memory)" in message and "--plan-hardware FILE.toml" in message


def pretend(monkeypatch: pytest.MonkeyPatch, name: str, total_gib: float) -> None:
    """That torch finds one such GPU."""

    class Properties:
        total_memory = int(total_gib * 2**30)

    Properties.name = name  # type: ignore[attr-defined]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: Properties)
