"""memo unpickles nothing that comes from a file: a pickle is a program, and files come from strangers."""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
MODULES = {
    "pickle",
    "_pickle",
    "cPickle",
    "cloudpickle",
    "dill",
    "joblib",
    "marshal",
    "shelve",
    "torch.distributed.checkpoint",
}
"""Whose readers run what they read."""

CALLS = {"load": {"torch", "np", "numpy", "jit", "yaml"}, "eval": set(), "exec": set(), "full_load": {"yaml"}}
"""By name, and of which modules; of none: wherever it is called by that name alone."""

MESSAGES = {"broadcast_object_list", "all_gather_object", "gather_object", "scatter_object_list", "recv_object_list"}
"""Objects between ranks travel as pickles."""

MAY_SEND = {
    "memo/checkpoint/store.py": "what each rank wrote",
    "memo/mesh/objects.py": "which checkpoint or kept profile all take, how memory is used, and sentences about what "
    "failed or differs",
}
"""Ranks of one run trust each other: they run the same program for one user, over sockets that the launcher opened
(SECURITY.md says what that takes of a network). What they send is made by memo, after files have been checked."""


@cache
def sources() -> list[tuple[str, ast.AST]]:
    found = []
    for folder in ("memo", "kernels"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            found.append((str(path.relative_to(ROOT)), ast.parse(path.read_text())))
    return found


def unpicklers(tree: ast.AST) -> Iterator[str]:
    """What could run the content of a file."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)]
        else:
            names = []
        yield from (name for name in names for module in MODULES if name == module or name.startswith(f"{module}."))
        if isinstance(node, ast.Call) and getattr(node.func, "attr", getattr(node.func, "id", "")) in CALLS:
            *owners, name = ast.unparse(node.func).split(".")
            if CALLS[name] & set(owners) or not (CALLS[name] or owners):
                yield ".".join((*owners, name))


def test_the_scan_sees_what_it_looks_for() -> None:
    for text in (
        "import pickle",
        "from pickle import loads",
        "import torch.distributed.checkpoint as dcp",
        "from torch.distributed.checkpoint.filesystem import FileSystemReader",
        "from torch.distributed import checkpoint",
        "torch.load(path, weights_only=True)",
        "np.load(path)",
        "eval(text)",
    ):
        assert list(unpicklers(ast.parse(text))), text
    for text in ("import pickletools", "json.load(file)", "model.eval()", "self.load(path)"):
        assert not list(unpicklers(ast.parse(text))), text


def test_nothing_unpickles_a_file() -> None:
    found = {path: names for path, tree in sources() if (names := list(unpicklers(tree)))}
    assert found == {}


def test_objects_travel_between_ranks_only_where_it_is_known_why() -> None:
    used = {
        path: {getattr(node, "attr", getattr(node, "id", "")) for node in ast.walk(tree)} for path, tree in sources()
    }
    assert {path for path, names in used.items() if names & MESSAGES} == MAY_SEND.keys()
