"""The user's guide cannot rot: flags as generated, commands that parse, messages that memo has, links that lead on."""

import ast
import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from suggestions import check_parses, suggested, words_of

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
)
from memo.config import flags

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


def sentences(with_parts: bool = True) -> Iterator[str]:
    """Every text in memo's sources but docstrings, with … for what is put in; and the parts between these."""
    for path in (ROOT / "memo").rglob("*.py"):
        nodes = list(ast.walk(ast.parse(path.read_text())))
        others = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
        if not with_parts:
            others |= {id(part) for node in nodes if isinstance(node, ast.JoinedStr) for part in node.values}
        for node in nodes:
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in others:
                yield node.value
            elif isinstance(node, ast.JoinedStr):
                yield "".join(str(part.value) if isinstance(part, ast.Constant) else "…" for part in node.values)


def suggested_in_messages() -> Iterator[str]:
    """Commands in texts of memo, with something that exists for what is put in; not those whose name is put in."""
    for text in sentences(with_parts=False):
        for line in suggested(text):
            if not re.match("memo (data )?…", line):
                line = line.replace("--model …", "--model llama-tiny").replace("--config …", "--config run.toml")
                yield line.replace("…", "x")


LINES = [(page, line) for page in PAGES if page != GENERATED for line in commands(page)]
EXAMPLES = [*flags.EXAMPLES, *data.BUILD_EXAMPLES, *data.CHAT_EXAMPLES]
for module in (doctor, estimate, evaluate, export, extend, finetune, generate, hardware, import_, plan, profile):
    EXAMPLES += module.EXAMPLES
EXAMPLES += [*rehearse.EXAMPLES, *report.EXAMPLES, *solve.EXAMPLES]
LINES += [(Path("help"), line) for line in EXAMPLES]


@pytest.mark.parametrize(("page", "line"), LINES, ids=[f"{page.stem}-{i}" for i, (page, _) in enumerate(LINES)])
def test_commands_parse(page: Path, line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(_some_files(tmp_path))
    check_command(line, page.name)


def check_command(line: str, where: str) -> None:
    script = words_of(line)[0][0]
    if script.endswith(".py") and not script.endswith("pretrain_gpt.py"):
        assert (ROOT / script).exists(), line  # its flags are its own
    else:
        check_parses(line, where)


def test_commands_in_messages_parse(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(_some_files(tmp_path))
    lines = set(suggested_in_messages())
    assert len(lines) > 20
    for line in lines:
        try:
            check_command(line, "messages")
        except BaseException as error:
            raise AssertionError(line) from error


def _some_files(folder: Path) -> Path:
    """What the pages' commands read before they start: a run's file and a model's directory."""
    (folder / "run.toml").write_text('train_iters = 100\ndata_path = "data/mine"\n')
    (folder / "runs" / "a").mkdir(parents=True)
    (folder / "runs" / "a" / "config.toml").write_text("num_attention_heads = 8\n")
    models = ("Llama-3.1-8B", "Llama-3.1-8B-512K", "Llama-3.1-8B-Instruct", "Qwen3-0.6B", "Qwen2.5-7B-Instruct")
    for model in (*models, "runs/demo/model", "runs/mine/hf", "runs/c/hf", "runs/chat/hf", "merged"):
        (folder / model).mkdir(parents=True)
        (folder / model / "config.json").write_text(
            '{"model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,'
            ' "num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 128256, "rms_norm_eps": 1e-5,'
            ' "max_position_embeddings": 131072, "rope_theta": 500000.0, "tie_word_embeddings": false}'
        )
    return folder


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
