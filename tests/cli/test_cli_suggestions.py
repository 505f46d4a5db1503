"""Every command that a command of memo suggests in its output works: each is run, or parsed where it needs GPUs.

tests/meta/test_docs.py parses those of all messages and of all help.
"""

import importlib.util
import json
import shlex
from pathlib import Path
from types import ModuleType

import pytest
from suggestions import check_parses, suggested

from memo import Trainer
from memo.cli.main import main
from memo.data import build_demo

ROOT = Path(__file__).parents[2]
SMALL = "--model llama-tiny --train-iters 2 --seq-len 128 --dtype fp32 --num-threads 1 --peak-tflops 1 --no-progress"
Capture = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder, and a library of a few files in the place of Python's."""
    library = tmp_path / "library"
    library.mkdir()
    for index in range(40):
        (library / f"{index}.py").write_text(f"number = {index}  # {'a line of text ' * 40}\n")
    monkeypatch.setattr("memo.data.corpus_builder.standard_library", lambda: library)
    monkeypatch.chdir(tmp_path)
    for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def told_by(line: str, capfd: Capture) -> list[str]:
    """Run a command line of memo to its good end; the commands that it suggests."""
    program, *arguments = shlex.split(line.partition(" > ")[0])
    try:
        status = main(arguments)
    except SystemExit as ended:
        status = ended.code if isinstance(ended.code, int) else 1
    captured = capfd.readouterr()
    assert (program, status) == ("memo", 0), f"{line}\n{captured.err}"
    return suggested(captured.out)


def test_from_a_corpus_to_a_model_and_on(capfd: Capture) -> None:
    (train,) = told_by("memo data demo 'my data/demo' --tokenizer bpe --vocab-size 270 --eval-fraction 0.1", capfd)
    assert {path.name for path in Path("my data").iterdir()} >= {"demo-tokenizer.json", "demo-eval.idx"}
    report, export = told_by(f"{train} {SMALL} --save 'my runs'", capfd)
    assert told_by(report, capfd) == [] and Path("my runs", "report", "index.html").exists()
    assert told_by(export.replace("DIR", "hf"), capfd) == [] and Path("hf", "config.json").exists()
    (go_on,) = told_by("memo import hf --out 'my model'", capfd)
    flags = SMALL.replace("--model llama-tiny ", "")
    report, _ = told_by(f"{go_on.replace('PREFIX', shlex.quote('my data/demo'))} {flags} --save b", capfd)
    told_by(report, capfd)


def test_a_trace_becomes_a_plan_and_a_drawing(capfd: Capture) -> None:
    asked = "memo profile --model gpt-tiny --seq-len 64 --offload-alpha off --on-paper 1 --trace-out 'my trace.json'"
    (solve,) = told_by(asked, capfd)
    told_by(solve, capfd)
    told_by("memo report --memory plan.json", capfd)


def test_a_plan_is_run(capfd: Capture) -> None:
    (run,) = told_by("memo plan --model gpt-7b --gpus 8 --top 1 --out run.toml", capfd)
    check_parses(run, "memo plan")
    assert Path("run.toml").exists()


def test_machines_are_shown_and_copied(capfd: Capture) -> None:
    shown = told_by("memo hardware", capfd)
    assert len(shown) == 3
    for line in shown:
        told_by(line.replace("NAME", "h100-80"), capfd)


def test_the_first_page_of_help(capfd: Capture) -> None:
    shown = told_by("memo --help", capfd)
    assert shown == ["memo doctor", "memo train --help"]
    told_by(shown[1], capfd)


def demo() -> ModuleType:
    spec = importlib.util.spec_from_file_location("demo", ROOT / "examples" / "demo.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_demo(home: Path, monkeypatch: pytest.MonkeyPatch, capfd: Capture) -> None:
    """What it prints at its end works as it stands; steps are made few and short, by flags behind where it can be."""
    module = demo()
    monkeypatch.setattr(module, "STEPS", 21)  # more than its warm-up
    monkeypatch.setattr(module, "Trainer", lambda model, **flags: Trainer(model, **{**flags, "seq_length": 64}))
    monkeypatch.setattr(module, "build_demo", lambda out, split_eval: build_demo(out, split_eval=0.2))
    module.main()
    out = capfd.readouterr().out
    report, export = suggested(out)
    told_by(report, capfd)
    told_by(export.replace("DIR", "hf"), capfd)
    assert Path("runs", "demo", "report", "index.html").exists()
    pairs = [{"prompt": f"{n} + 1", "completion": f"{n + 1}"} for n in range(60)]
    (home / "chats.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    commands = [line for line in module.NEXT.replace("\\\n", " ").splitlines() if line.startswith(("python ", "memo "))]
    assert [line.split()[1] for line in commands] == ["finetune", "generate", "plan"]
    for line, more in zip(commands, (" --train-iters 2 --seq-len 64", "", ""), strict=True):
        told_by(line + more, capfd)
