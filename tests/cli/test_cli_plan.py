"""`memo plan`: table, JSON, run file, and drawing."""

import json
from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree

import pytest
from plan_answers import printed

import memo
from memo.config.checks import check
from memo.config.flags import parse_run
from memo.errors import ConfigError
from memo.estimate.hardware_files import HARDWARE
from memo.estimate.memory_errors import FULL_SIZE
from memo.search.plan import Plan
from memo.search.question import Question
from memo.search.ranking import search

Capture = pytest.CaptureFixture[str]
LONG = ["--model", "gpt-7b", "--gpus", "8", "--seq-len", "262144", "--gbs", "16"]

_HEADS = "layout dp activations tok/GPU/s ±% MFU % TFLOP/s step s GPU GiB host GiB verdict"


def test_the_table(tmp_path: Path, capsys: Capture) -> None:
    run = tmp_path / "run.toml"
    shown = printed([*LONG, "--top", "3", "--out", str(run), "--data-path", "data/mine"], capsys)
    lines = shown.splitlines()
    assert lines[0] == "gpt-7b on 8 x a800-80 (80 GiB, host 2,048 GiB a node), 262,144 tokens x 16 sequences"
    assert lines[2].split() == _HEADS.split()
    assert [line.split()[0] for line in lines[3:6]] == ["1=", "2=", "3="]
    assert all(line.endswith("fits") for line in lines[3:6])
    assert (
        "\nbest: tp" in shown and "\nbinding limit: " in shown and "--offload-alpha auto: input and attention" in shown
    )
    command = f"run: torchrun --nproc-per-node 8 -m memo train --config {run} --save RUN --load RUN"
    assert command in lines
    assert "out of GPU memory" in lines[-1] and "--all tells each reason" in lines[-1]
    config = parse_run(["--config", str(run)], prog="memo train")
    check(config, 8)
    assert config.data.data_path == ("data/mine",) and config.memory.offload_alpha == "auto"


EDGE = ["--model", "llama-3.1-8b", "--gpus", "8", "--hardware", "a100-40", "--gbs", "1024", "--gpu-memory-gib", "31.8"]
EDGE += ["--place-states", "never"]


def test_what_may_not_fit_comes_first_with_its_risk_and_a_way_back(tmp_path: Path, capsys: Capture) -> None:
    run, first = tmp_path / "run.toml", tmp_path / "run.first.toml"
    lines = printed([*EDGE, "--top", "2", "--out", str(run)], capsys).splitlines()
    assert [line.split()[-1] for line in lines[3:6]] == ["unsure", "fits", "fits"]
    assert [line.split()[0] for line in lines[3:6]] == ["1", "2", "3"]
    assert lines[6].startswith("±%: errors of the seconds of a step: attention 3%, products 4%, ")
    assert lines[7:9] == [str(FULL_SIZE), ""]
    del lines[6:8]
    assert lines[7].startswith("try first: tp4 cp1 pp1 mbs1: keep everything on the GPU")
    risk = "6.5% faster than what surely fits, but it may not fit: GPU memory: 31.66 GiB needed, 31.13 GiB sure to fit"
    assert lines[8].startswith(risk) and lines[8].endswith("; the first step tells")
    start = "run: torchrun --nproc-per-node 8 -m memo train --config"
    assert lines[9] == f"{start} {first} --data-path DATA --save RUN --load RUN"
    assert lines[11].startswith("surely fits: tp4 cp1 pp2 vpp8 mbs1: keep everything on the GPU")
    assert lines[15].startswith("a step takes 5.7 minutes, a billion tokens ")
    assert lines[16].startswith("--kernels triton, which fuses norms, ") and "would take 4% less time; " in lines[16]
    del lines[16]
    assert lines[16].startswith(
        "CUDA, NCCL and page tables take 4.4 GiB of a GPU beside torch (published figures: 2.8 to 5.8); "
    )
    assert lines[16].endswith("; 3.1 GiB stay free")
    assert lines[17] == "weights: new; by default --lr 0.0003 after a warm-up of 1/100 of the steps"
    assert lines[18] == f"{start} {run} --data-path DATA --save RUN --load RUN"
    assert not any(line.startswith("best:") for line in lines)
    others = lines[lines.index("would be faster, but may not fit:") + 2 : -2]
    assert len(others) == 2 and "tp4 cp2 pp1 mbs2" in others[0]  # not what is to be tried first, again
    assert "# It may not fit: GPU memory: " in first.read_text() and "may not fit" not in run.read_text()
    runs = [parse_run(["--config", str(file)], prog="memo train") for file in (first, run)]
    assert [run.parallel.pp for run in runs] == [1, 2]


def test_json_of_what_to_try_first(capsys: Capture) -> None:
    found = json.loads(printed([*EDGE, "--top", "2", "--json"], capsys))
    assert found["trial"]["verdict"] == "unsure" and found["trial"] == found["unsure"][0]
    assert found["choices"][0]["verdict"] == "fits"
    assert " --tp 4 --offload-alpha off " in found["trial_command"] and " --pp 2 " in found["command"]
    without = json.loads(printed([*LONG, "--json", "--top", "3"], capsys))
    assert without["trial"] is without["trial_command"] is None


def test_it_says_to_keep_everything_on_the_gpu(capsys: Capture) -> None:
    shown = printed(["--model", "llama-3.1-8b", "--gpus", "8", "--hardware", "h200", "--seq-len", "2048"], capsys)
    assert "keep everything on the GPU: no swapping, no recomputation" in shown
    assert "binding limit: nothing: all activations stay on the GPU" in shown


def test_all_gives_each_reason(capsys: Capture) -> None:
    argv = ["--model", "gpt-7b", "--gpus", "2", "--seq-len", "131072", "--gbs", "2"]
    shown = printed([*argv, "--all"], capsys)
    assert "  tp1 cp2 pp1 mbs2 all_gather: out of GPU memory: GPU memory: " in shown and " alpha 0.25 " in shown
    found = json.loads(printed([*argv, "--all", "--json"], capsys))
    assert len(found["refusals"]) == sum(found["refused"].values()) > 0
    assert len(found["choices"]) == found["num_fitting"]


def test_json(capsys: Capture) -> None:
    found = json.loads(printed([*LONG, "--json", "--top", "3"], capsys))
    assert set(found) == {
        "model", "parameters", "trained_parameters", "runnable", "gpus", "hardware", "gpu_memory_gib",
        "host_memory_gib", "seq_len",
        "nvme_gib", "nvme_gb_per_s", "global_batch_size", "longest", "largest", "trial", "choices", "unsure",
        "refused", "refusals",
        "num_candidates", "num_fitting", "command", "trial_command", "dollars_per_gpu_hour",
        "would_fit", "ties", "node_share", "price", "pretrained_checkpoint", "has_weights", "foreseen_kernels",
    }  # fmt: skip
    assert (found["seq_len"], found["runnable"], found["longest"], found["refusals"]) == (262144, True, None, [])
    assert (found["pretrained_checkpoint"], found["has_weights"]) == (None, False)
    best = found["choices"][0]
    assert set(best) == {
        "tp", "cp", "pp", "vpp", "mbs", "cp_comm_type", "dp", "alpha", "recompute", "swept_tiles",
        "recompute_attention_layers", "hidden_states_in_host_memory", "moved_tiles", "limit", "verdict",
        "total_gib", "host_gib", "nvme_gib", "parts_gib", "tgs",
        "tgs_error_percent", "tgs_error_parts_percent", "mfu_percent",
        "tflops_per_gpu", "step_time_s", "bubble_share", "hidden_share", "seconds",
        "resources", "binding_resource", "tight", "room_gib", "sharding", "order", "states_in_host_memory",
        "dollars_per_billion_tokens",
    }  # fmt: skip
    assert best["tp"] * best["cp"] * best["pp"] * best["dp"] == 8
    assert sum(best["parts_gib"].values()) == pytest.approx(best["total_gib"])
    assert sum(best["seconds"].values()) == pytest.approx(best["step_time_s"])
    assert 1 <= found["ties"] <= 3
    assert best["tgs_error_percent"] == pytest.approx(sum(best["tgs_error_parts_percent"].values()))
    assert 3 < best["tgs_error_percent"] < 7
    assert best["tgs"] == pytest.approx(262144 * 16 / 8 / best["step_time_s"])
    assert best["mfu_percent"] == pytest.approx(100 * best["tflops_per_gpu"] / 312)


def test_where_nothing_fits_it_says_what_would(capsys: Capture) -> None:
    asked = {"--model": "llama-3.1-8b", "--gpus": "1", "--hardware": "rtx-4090", "--seq-len": "262144", "--gbs": "1"}
    asked |= {"--host-memory-gib": "176"}
    argv = [word for pair in asked.items() for word in pair]
    found = json.loads(printed([*argv, "--json"], capsys))
    shorter, host, gpus = (flags.split() for flags in found["would_fit"])
    assert found["choices"] == [] and [shorter[0], host[0], gpus[0]] == ["--seq-len", "--host-memory-gib", "--gpus"]
    shown = printed(argv, capsys)
    assert "\nnothing fits\nnearest: " in shown
    assert f"\nwould fit: {' '.join(shorter)}, or {' '.join(host)}, or {' '.join(gpus)}\n" in shown
    for flag, value in (shorter, host, gpus):
        changed = asked | {flag: value} | ({"--gbs": value} if flag == "--gpus" else {})
        fits = json.loads(printed([*(word for pair in changed.items() for word in pair), "--json"], capsys))
        assert fits["choices"], f"{flag} {value} does not suffice"


def test_the_longest_sequence(capsys: Capture) -> None:
    argv = ["--model", "llama-3.1-8b", "--gpus", "2", "--hardware", "h100-80", "--objective", "max-seq-len"]
    found = json.loads(printed([*argv, "--json"], capsys))
    assert found["seq_len"] == found["longest"]["seq_len"] > 100_000 and found["choices"]
    shown = printed(argv, capsys)
    assert (
        f"longest sequence that fits: {found['seq_len']:,} tokens (in steps of 16,384); by definition it is near "
        in shown
    )
    assert f"beyond it: {found['longest']['limit']}" in shown
    argv = ["--model", "llama-3.1-70b", "--gpus", "1", "--objective", "max-seq-len", "--place-states", "never"]
    shown = printed(argv, capsys)
    assert "longest sequence that fits: 0 tokens" in shown and "best:" not in shown


def test_the_largest_model(capsys: Capture) -> None:
    """At least 15B on one H200 with 128 GiB of host memory."""
    argv = ["--family", "gpt", "--gpus", "1", "--hardware", "h200", "--host-memory-gib", "128", "--seq-len", "4096"]
    shown = printed([*argv, "--objective", "max-model-size"], capsys)
    assert "largest gpt that fits: 15." in shown and "parameters with masters in fp32 (" in shown
    assert "; by definition it is near the line of what fits\nbeyond it: host memory binds" in shown
    assert "assumed: 1 of a node's 8 GPUs, with 128 of its 2,048 GiB" in shown and "--clip-grad 0 would add 2." in shown
    assert " --offload-states all --optimizer-offload-fraction 0." in shown and "\nbusiest: " in shown


def test_one_layout_explained(capsys: Capture) -> None:
    shown = printed([*LONG, "--explain", "tp4 cp2 pp1 mbs1"], capsys)
    assert "\nkeep: GPU GiB: weights " in shown and "\n  oom: GPU memory: " in shown
    assert (
        "\nalpha auto: GPU GiB: " in shown and "rounding_buffers" in shown and "seconds of a step: attention" in shown
    )
    shown = printed([*LONG, "--explain", "tp=64"], capsys)
    assert shown.startswith("tp64 cp1 pp1 mbs1: cannot be laid out: 8 ranks (world size) cannot hold")


def test_nothing_fits(capsys: Capture) -> None:
    shown = printed(["--model", "llama-3.1-70b", "--gpus", "2", "--place-states", "never"], capsys)
    assert "\nnothing fits\n" in shown and "out of GPU memory" in shown


def test_a_family_that_can_only_be_planned_for(tmp_path: Path, capsys: Capture) -> None:
    values = {"hidden_size": 2048, "num_hidden_layers": 24, "num_attention_heads": 32, "ffn_dim": 8192}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "opt", "vocab_size": 50272, **values}))
    argv = ["--model", str(tmp_path), "--gpus", "4", "--seq-len", "2048"]
    shown = printed(argv, capsys)
    assert "memo cannot train this model, only plan for it: " in shown and "run: " not in shown
    found = json.loads(printed([*argv, "--json"], capsys))
    assert (found["runnable"], found["command"], found["parameters"]) == (False, None, 1_315_758_080)


def test_the_drawing(tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    def some_lengths(question: Question, tell: Callable[[str], None]) -> list[Plan]:
        return [search(question.at_length(tokens)) for tokens in (8192, 262144)]

    monkeypatch.setattr("memo.cli.plan.plans_by_length", some_lengths)
    picture = tmp_path / "plan.svg"
    printed(["--model", "gpt-7b", "--gpus", "4", "--gbs", "4", "--plot", str(picture)], capsys)
    shown = [element.text or "" for element in ElementTree.parse(picture).iter() if element.tag.endswith("text")]
    assert {"8K", "256K", "rounding buffers", "optimizer", "keep", "alpha auto"} <= set(shown)


def test_the_page(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[tuple[object, ...]] = []
    monkeypatch.setattr("memo.report.plan_page.write_plan_page", lambda *given: written.append(given))
    printed([*LONG, "--top", "3", "--html", "plan.html"], capsys)
    ((plan, commands, path, tell),) = written
    assert isinstance(plan, Plan) and path == "plan.html" and "torchrun" in commands.best
    assert callable(tell)


def test_in_python() -> None:
    found = memo.plan("gpt-7b", 8, seq_len=1 << 18, global_batch_size=16, hardware=HARDWARE["h200"], top=2)
    assert isinstance(found, Plan) and len(found.choices) == 2 and found.question.hardware.name == "h200"
    shown = repr(found)
    assert len(shown) < 300 and "gpt-7b on 8 x h200, 262,144 tokens x 16 sequences" in shown
    table = ElementTree.fromstring(found._repr_html_())
    assert [len(row) for row in table.iter("tr")] == [9] * (3 + (found.trial is not None))
    assert table.findtext("caption") == "gpt-7b on 8 x h200, 262,144 tokens x 16 sequences"
    assert str(found.choices[0].layout) in [cell.text for cell in table.iter("td")]
    with pytest.raises(ConfigError, match="--objective is 'mfu': use tgs or max-seq-len"):
        memo.plan("gpt-7b", 8, objective="mfu")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("keywords", "says"),
    [
        (
            {"learning_rate": 1e-4},
            "there is no argument 'learning_rate': memo.plan does not need it; for memo train, memo",
        ),
        ({"max_seq_length": 4096}, "there is no argument 'max_seq_length': memo calls it seq_length"),
        ({"num_gpus": 8}, "there is no argument 'num_gpus': memo calls it gpus"),
        ({"tensor_model_parallel_size": 8}, "there is no argument 'tensor_model_parallel_size': memo.plan chooses it"),
        ({"lora_r": 8}, "there is no argument 'lora_r': memo calls it lora_rank"),
        ({"hardwar": "h200"}, "there is no argument 'hardwar': did you mean 'hardware'?"),
        ({"seq_len": "long"}, "seq_len is 'long': give a whole number of tokens, such as 131072 or 128K"),
    ],
)
def test_names_of_other_trainers_in_python(keywords: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigError) as refused:
        memo.plan("gpt-7b", 8, **keywords)  # type: ignore[arg-type]
    assert says in str(refused.value)


def test_lengths_in_python_may_be_written_as_on_the_command_line() -> None:
    found = memo.plan("gpt-7b", 8, seq_length="32K", gbs=8, top=1)  # type: ignore[call-arg]
    assert (found.question.seq_len, found.question.global_batch_size) == (32768, 8)


def opt_2_7b(folder: Path) -> list[str]:
    """Of LLMem's table 3: on four V100s."""
    sizes = {"hidden_size": 2560, "num_hidden_layers": 32, "num_attention_heads": 32, "ffn_dim": 10240}
    (folder / "config.json").write_text(json.dumps({"model_type": "opt", "vocab_size": 50272, **sizes}))
    machine = ["--gpus", "4", "--seq-len", "512", "--gpu-memory-gib", "16"]
    return ["--method", "llmem", "--model", str(folder / "config.json"), *machine]


def test_llmem_chooses_a_method_of_fine_tuning(tmp_path: Path, capsys: Capture) -> None:
    """As table 3 prints it with the corrected formulas; the literal ones take ADP to fit."""
    asked = opt_2_7b(tmp_path)
    shown = printed([*asked, "--llmem-corrected"], capsys)
    assert "\nchosen: TP, " in shown and "Algorithm 1, corrected formulas" in shown
    found = json.loads(printed([*asked, "--json"], capsys))
    assert found["choice"] == "ADP" and found["batch"] == found["methods"]["ADP"]["batch"] > 0
    assert found["methods"]["CDP"]["score"] == 0.0 and found["methods"]["CDP"]["gpu_gib"] > 16
    small = [*asked[:-1], "4"]
    assert "chosen: CPU offloading: one sequence does not fit by any method" in printed(small, capsys)
