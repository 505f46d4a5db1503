"""The user's guide cannot rot: flags as generated, commands that parse, messages that memo has, links that lead on."""

import ast
import importlib.util
import re
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from memo import errors
from memo.cli import (
    data,
    doctor,
    estimate,
    evaluate,
    export,
    extend,
    finetune,
    generate,
    hardware,
    import_,
    plan,
    profile,
    rehearse,
    report,
    solve,
    train,
)
from memo.cli.main import main
from memo.config import command_line, flags
from memo.config.flag_table import CommandLine
from memo.config.flags import parse_run

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
FRONT = [ROOT / name for name in ("AGENTS.md", "BENCHMARKS.md", "CONTRIBUTING.md", "SECURITY.md")]
"""Pages beside the README."""
GENERATED = ROOT / "docs" / "flags.md"
TROUBLES = ROOT / "docs" / "troubleshooting.md"


def test_flags_page_is_what_the_flags_say() -> None:
    spec = importlib.util.spec_from_file_location("make_flags", ROOT / "docs" / "make_flags.py")
    assert spec is not None and spec.loader is not None
    generator = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(generator)
    assert GENERATED.read_text() == generator.page(), "docs/flags.md is not up to date: run `make docs`"


def commands(page: Path) -> Iterator[str]:
    """Command lines in fenced blocks of a page, continuations joined."""
    for block in re.findall(r"^```\w*\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE):
        for line in block.replace("\\\n", " ").splitlines():
            if re.match(r"(\w+=\S+ )*(memo|torchrun|python -m memo|python examples/\w+\.py) ", line):
                yield line


def words_of(line: str) -> tuple[list[str], int]:
    """The arguments of memo in a command line, and how many ranks it starts."""
    words, ranks = shlex.split(line.partition(" > ")[0], comments=True), 1
    while "=" in words[0]:
        words.pop(0)
    if words[0] == "torchrun":
        for flag in ("--nproc-per-node", "--nnodes"):
            ranks *= int(words[words.index(flag) + 1]) if flag in words else 1
    if "-m" in words:
        return words[words.index("memo") + 1 :], ranks
    script = next((i for i, word in enumerate(words) if word.endswith(".py")), None)
    return words[1:] if script is None else [words[script], *words[script + 1 :]], ranks


class _Parsed(Exception):
    pass


@pytest.fixture
def parse_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands stop once their flags are parsed, by the parsers that they always have."""
    real = command_line.read_values

    def read(line: CommandLine, argv: Sequence[str]) -> dict[str, Any]:
        values = real(line, argv)
        if len(line.groups) > 1:
            return values  # parse_command still looks at the model and the file that are named
        raise _Parsed

    def stop(*args: Any, **options: Any) -> Any:
        raise _Parsed

    monkeypatch.setattr(command_line, "read_values", read)
    monkeypatch.setattr(profile, "check_ranks", stop)
    monkeypatch.setattr(evaluate, "check_ranks", stop)
    monkeypatch.setattr(generate, "check_ranks", stop)
    monkeypatch.setattr(extend, "_checked", stop)
    monkeypatch.setattr(finetune, "require_started", stop)
    monkeypatch.setattr(profile, "_trace_on_paper", stop)
    monkeypatch.setattr(rehearse, "checked_run", stop)


LINES = [(page, line) for page in PAGES if page != GENERATED for line in commands(page)]
EXAMPLES = [*flags.EXAMPLES, *data.BUILD_EXAMPLES, *data.CHAT_EXAMPLES]
for module in (doctor, estimate, evaluate, export, extend, finetune, generate, hardware, import_, plan, profile):
    EXAMPLES += module.EXAMPLES
EXAMPLES += [*rehearse.EXAMPLES, *report.EXAMPLES, *solve.EXAMPLES]
LINES += [(Path("help"), line) for line in EXAMPLES]


@pytest.mark.parametrize(("page", "line"), LINES, ids=[f"{page.stem}-{i}" for i, (page, _) in enumerate(LINES)])
@pytest.mark.usefixtures("parse_only")
def test_commands_parse(page: Path, line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments, ranks = words_of(line)
    monkeypatch.chdir(_some_files(tmp_path))
    monkeypatch.setenv("WORLD_SIZE", str(ranks))
    shortened = "..." in arguments
    arguments = [word for word in arguments if word != "..."]
    if arguments[0].endswith("pretrain_gpt.py"):
        arguments[0] = "train"
    if arguments == ["--help"]:
        assert main(arguments) == 0
    elif arguments[0].endswith(".py"):
        assert (ROOT / arguments[0]).exists(), line
    elif arguments[0] == "train":
        mock = ["--mock-data"] if not {"--data-path", "--mock-data", "--config"} & set(arguments) else []
        (parse_run if shortened else _load_run)([*arguments[1:], *mock], prog=f"{page.name}: {line}")
    else:
        with pytest.raises(_Parsed):
            main(arguments)


_load_run = train.load_run


def _some_files(folder: Path) -> Path:
    """What the pages' commands read before they start: a run's file and a model's directory."""
    (folder / "run.toml").write_text('train_iters = 100\ndata_path = "data/mine"\n')
    (folder / "runs" / "a").mkdir(parents=True)
    (folder / "runs" / "a" / "config.toml").write_text("num_attention_heads = 8\n")
    models = ("Llama-3.1-8B", "Llama-3.1-8B-512K", "Llama-3.1-8B-Instruct", "Qwen3-0.6B", "Qwen2.5-7B-Instruct")
    for model in (*models, "runs/demo/model", "runs/mine/hf", "runs/c/hf", "runs/chat/hf"):
        (folder / model).mkdir(parents=True)
        (folder / model / "config.json").write_text(
            '{"model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,'
            ' "num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 128256, "rms_norm_eps": 1e-5,'
            ' "max_position_embeddings": 131072, "rope_theta": 500000.0, "tie_word_embeddings": false}'
        )
    return folder


def sentences() -> Iterator[str]:
    """Every text in memo's sources but docstrings, with … for what is put in."""
    for path in (ROOT / "memo").rglob("*.py"):
        nodes = list(ast.walk(ast.parse(path.read_text())))
        docstrings = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
        for node in nodes:
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
                yield node.value
            elif isinstance(node, ast.JoinedStr):
                yield "".join(str(part.value) if isinstance(part, ast.Constant) else "…" for part in node.values)


def quoted(section: str) -> list[str]:
    """First cells of the tables of a section, without their quotes."""
    rows = re.findall(r"^\| `(.+?)` ?(?:\([^)]*\) )?\|", section, re.MULTILINE)
    return [row.replace("\\|", "|") for row in rows]


def test_every_quoted_message_is_memos() -> None:
    known = list(sentences())
    ours = TROUBLES.read_text().split("\n## What memo does not say itself")[0]
    messages = quoted(ours)
    assert len(messages) > 30
    for message in messages:
        pattern = re.compile(".*?".join(re.escape(part) for part in message.split("…")), re.DOTALL)
        assert any(pattern.match(text) for text in known), f"{TROUBLES.name} quotes {message!r}, which nothing says"


def test_every_family_of_errors_has_a_section() -> None:
    headings = " ".join(re.findall(r"^## (.+)$", TROUBLES.read_text(), re.MULTILINE))
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, errors.MemoError)]
    missing = sorted({kind.__name__ for kind in kinds} - {"MemoError"} - set(re.findall(r"\w+", headings)))
    assert len(kinds) > 10
    assert not missing, f"{TROUBLES.name} has no section on {missing}"


def anchors(page: Path) -> set[str]:
    """What `#` may name in a page: its headings, as GitHub and mkdocs.yml spell them."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    return {
        re.sub(r"[^\w\- ]", "", re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)).strip().lower().replace(" ", "-")
        for heading in re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    }


@pytest.mark.parametrize("page", [*PAGES, *FRONT], ids=lambda page: page.stem)
def test_links_lead_somewhere(page: Path) -> None:
    broken = []
    for link, anchor in re.findall(r"\]\(([^)#:]*)(?:#([^)]*))?\)", page.read_text()):
        target = page.parent / link if link else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            broken.append(f"{link}#{anchor}" if anchor else link)
    assert not broken, f"{page.name}: {broken}"


@pytest.mark.parametrize("page", [*PAGES, *FRONT], ids=lambda page: page.stem)
def test_a_list_begins_after_an_empty_line(page: Path) -> None:
    """GitHub shows one that does not as a list, too, but the site as a part of the paragraph."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    found = re.findall(r"^(?![-*>|#\d\s]).+\n(?:[-*]|\d+\.) .+", text, re.MULTILINE)
    wrong = [each for each in found if not each.startswith(("- ", "* "))]
    assert not wrong, f"{page.name}: {wrong}"
