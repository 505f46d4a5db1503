"""Makes a site of the pages that GitHub shows, for mkdocs.yml, which names this file as a hook.

README.md and its neighbours become pages too, and the reference of the Python API is made of docstrings.
A link of a page leads to where its target is in the site; one to a file that is no page stays as text, or leads to the
repository where mkdocs.yml gives its `repo_url`. Long command lines go on behind backslashes, and no line ends within a
flag.
"""

import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

import memo
from memo import errors

ROOT = Path(__file__).parents[1]
DOCS = "docs/"
PAGES = {
    "README.md": "index.md",
    "BENCHMARKS.md": "benchmarks.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "docs/README.md": "pages.md",
}
"""Files of the repository by the page that each becomes; the others of docs/ keep their name."""
SOURCES = {page: source for source, page in PAGES.items()}
LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)#\s]+)(#[^)\s]*)?\)")
CODE_COLUMNS = 92
"""Characters of a line of code that a page shows beside both of its menus, on a screen of 1,280 pixels."""
BLOCK = re.compile(r"^```\w*\n.*?^```", re.DOTALL | re.MULTILINE)
COMMAND = re.compile(r" +--|(\w+=\S+ )*(memo|torchrun|python|pip|hf|lm-eval|bash) ")
"""A command line, or one that goes on."""
INLINE = re.compile(r"<code>([^<]*)</code>")
FLAG = re.compile(r"(?<![\w-])--[a-z][\w-]*")
API = """# Python API

Made of the docstrings. [In Python](python.md) has an example of each.

"""
FIRST = ("Trainer", "plan")
"""What a reader looks for; the other public names follow in their order."""


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are not in docs/."""
    inside = files.get_file_from_path("README.md")
    assert inside is not None
    files.remove(inside)
    for source, page in PAGES.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text()))
    files.append(File.generated(config, "api.md", content=api_page()))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Let links lead to where their targets are in the site."""
    source = SOURCES.get(page.file.src_uri, DOCS + page.file.src_uri)

    def rewritten(link: re.Match[str]) -> str:
        image, text, target, anchor = link.groups()
        if ":" in target or page.file.src_uri == "api.md":
            return link[0]
        path = posixpath.normpath(posixpath.join(posixpath.dirname(source), target))
        found = PAGES.get(path, path.removeprefix(DOCS) if path.startswith(DOCS) else None)
        if found is not None:
            return f"{image}[{text}]({found}{anchor or ''})"
        return f"[{text}]({config.repo_url.rstrip('/')}/blob/main/{path})" if config.repo_url else text

    return BLOCK.sub(lambda block: "\n".join(map(wrapped, block[0].splitlines())), LINK.sub(rewritten, markdown))


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Mark flags in sentences and tables, which a browser would break at their hyphens (site.css)."""

    def marked(code: re.Match[str]) -> str:
        text = FLAG.sub(lambda flag: f'<span class="flag">{flag[0]}</span>', code[1])
        return f"<code>{text}</code>"

    return INLINE.sub(marked, html)


def wrapped(line: str) -> str:
    """A line of code; a long command breaks before flags, and what is said behind it stands above."""
    if len(line) <= CODE_COLUMNS or not COMMAND.match(line):
        return line
    command, _, remark = line.partition("  # ")
    first, *others = re.split(r" (?=--)", command.rstrip())
    lines = [first]
    for part in others:
        if len(f"{lines[-1]} {part} \\") > CODE_COLUMNS:
            lines.append(f"    {part}")
        else:
            lines[-1] += f" {part}"
    return "\n".join([*([f"# {remark}"] if remark else []), " \\\n".join(lines)])


def api_page() -> str:
    """Each public name of memo, and the errors that a user can meet."""
    names = [*FIRST, *(name for name in memo.__all__ if name not in FIRST and not name.startswith("_"))]
    kinds = [
        name for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, errors.MemoError)
    ]
    shown = f"::: memo.errors\n    options:\n      members: [{', '.join(kinds)}]\n"
    return API + "".join(f"::: memo.{name}\n{_of_bases(name)}\n" for name in names) + shown


def _of_bases(name: str) -> str:
    """Options with which a class shows what it has of its bases too, behind its own."""
    kind = getattr(memo, name)
    bases = [base for base in kind.__mro__ if base.__module__.startswith("memo.")] if isinstance(kind, type) else []
    members = [member for base in bases for member in vars(base) if not member.startswith("_")]
    if len(bases) < 2 or not members:
        return ""
    return f"    options:\n      inherited_members: true\n      members: [{', '.join(dict.fromkeys(members))}]\n"
