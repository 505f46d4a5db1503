"""Makes damaged copies of a file, each from a seed: in bits, bytes, lines, values of JSON, or the kind of file."""

import gzip
import json
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

Mutation = Callable[[random.Random, bytes], bytes]

_DEEP = 5000
_VALUES = [
    "null",
    "true",
    "-1",
    "0",
    "1e999",
    "-Infinity",
    "NaN",
    "1.5",
    "9223372036854775807",
    "9223372036854775808",
    "1" + "0" * 30,
    "1" + "0" * 300,
    "1" * 5000,
    '""',
    '"no"',
    '"\\ud800"',
    '"../../etc/passwd"',
    '"a\\u0000b"',
    '"' + "x" * 5000 + '"',
    "[]",
    "{}",
    "[1, 2, 3]",
    '[["a"], {}]',
    '{"a": {"b": [null]}}',
    "[" * 50 + "]" * 50,
    "[" * _DEEP + "]" * _DEEP,
    "[" * _DEEP,
    '{"a":' * _DEEP + "1" + "}" * _DEEP,
]
_WORDS = [
    b"\xff\xfe",
    b"\x00",
    b'"',
    b"\n",
    b"[",
    b"{",
    b",",
    b"=",
    b".",
    b"-",
    b"nan",
    b"inf",
    b"true",
    b"[" * _DEEP,
    b"1" * 5000,
    b"1" + b"0" * 40,
    b"a." * 5000,
    b"0x" + b"f" * 500,
    b"\xff" * 8,
    b"\x00" * 8,
    b"\x7f" + b"\xff" * 7,
    b"{% for i in range(10**9) %}x{% endfor %}",
    "\u2028\ud7ff\U0010ffff".encode(),
]


def mutated(content: bytes, name: str, seed: int) -> bytes:
    """Return `content` with one to three damages, which depend only on the arguments."""
    chance = random.Random(f"{name}:{seed}")
    ways: list[Mutation] = [_flip, _delete, _double, _insert, _cut, _overwrite]
    if _documents(content) is not None:
        ways = [*ways, *[_value] * 9, *[_key] * 3]
    for _ in range(chance.choice((1, 1, 2, 3))):
        content = chance.choice(ways)(chance, content)
    return content


def replace(path: Path, whole: bytes, name: str, seed: int) -> None:
    """Put a damaged copy of `whole` under `path`; each eighth copy is another kind of file, or a file that expands."""
    if path.is_dir() and not path.is_symlink():
        path.rmdir()
    path.unlink(missing_ok=True)
    if seed % 8 == 7:
        _KINDS[seed // 8 % len(_KINDS)](path, whole)
    else:
        path.write_bytes(mutated(whole, name, seed))


def _linked(path: Path, whole: bytes) -> None:
    elsewhere = path.with_name("elsewhere")
    elsewhere.write_bytes(whole)
    path.symlink_to(elsewhere)


def _sparse(path: Path, begin: bytes) -> None:
    path.write_bytes(begin)
    os.truncate(path, 200 << 30)


def _expanding(path: Path, whole: bytes) -> None:
    """Write a hundred MiB packed in half a MiB for readers that unpack, else many values of three bytes."""
    is_packed = whole.startswith(b"\x1f\x8b")
    path.write_bytes(gzip.compress(b"," * (100 << 20), 1) if is_packed else b"[" + b"[]," * (10 << 20))


_KINDS: list[Callable[[Path, bytes], object]] = [
    lambda path, _: os.mkfifo(path),
    lambda path, _: path.symlink_to("nothing"),
    _sparse,
    _expanding,
    lambda path, _: path.mkdir(),
    _linked,
    lambda path, _: _sparse(path, b""),
    lambda path, _: path.symlink_to("/dev/zero"),
]


def _flip(chance: random.Random, content: bytes) -> bytes:
    if not content:
        return b"\x80"
    at = chance.randrange(len(content))
    return content[:at] + bytes([content[at] ^ 1 << chance.randrange(8)]) + content[at + 1 :]


def _span(chance: random.Random, content: bytes) -> tuple[int, int]:
    begin = chance.randrange(len(content) + 1)
    return begin, min(len(content), begin + chance.choice((1, 2, 8, 100)))


def _delete(chance: random.Random, content: bytes) -> bytes:
    begin, end = _span(chance, content)
    return content[:begin] + content[end:]


def _double(chance: random.Random, content: bytes) -> bytes:
    begin, end = _span(chance, content)
    return content[:end] + content[begin:end] * chance.choice((1, 2, 50)) + content[end:]


def _insert(chance: random.Random, content: bytes) -> bytes:
    at = chance.randrange(len(content) + 1)
    return content[:at] + chance.choice(_WORDS) + content[at:]


def _overwrite(chance: random.Random, content: bytes) -> bytes:
    word = chance.choice(_WORDS)
    at = chance.randrange(min(len(content), 64) + 1) if chance.random() < 0.5 else chance.randrange(len(content) + 1)
    return content[:at] + word + content[at + len(word) :]


def _cut(chance: random.Random, content: bytes) -> bytes:
    return content[: chance.choice((0, chance.randrange(len(content) + 1)))]


def _documents(content: bytes) -> list[Any] | None:
    """Parse one value of JSON, or one value a line; return None for other content."""
    for parts in ([content], content.splitlines()):
        try:
            return [json.loads(part) for part in parts]
        except (ValueError, RecursionError):
            continue
    return None


_MARK = "\ufdd0value\ufdd0"


def _value(chance: random.Random, content: bytes) -> bytes:
    """Replace the value at one place of a document."""
    return _with_mark(chance, content, _place)


def _key(chance: random.Random, content: bytes) -> bytes:
    """Add or remove a key."""
    return _with_mark(chance, content, _rename)


def _with_mark(chance: random.Random, content: bytes, change: Callable[[random.Random, list[Any]], None]) -> bytes:
    documents = _documents(content)
    if not documents:
        return content
    change(chance, documents)
    text = "\n".join(json.dumps(document) for document in documents)
    return text.replace(json.dumps(_MARK), chance.choice(_VALUES)).encode()


def _places(outer: Any) -> list[tuple[Any, Any]]:
    """Return (list or object, index or key) of every value inside."""
    found, level = [], [outer]
    while level:
        inner = level.pop()
        keys = list(inner) if isinstance(inner, dict) else range(len(inner)) if isinstance(inner, list) else ()
        found += [(inner, key) for key in keys]
        level += [inner[key] for key in keys]
    return found


def _place(chance: random.Random, documents: list[Any]) -> None:
    outer, key = chance.choice(_places(documents))
    outer[key] = _MARK


def _rename(chance: random.Random, documents: list[Any]) -> None:
    objects = [outer for outer, _ in _places(documents) if isinstance(outer, dict)]
    if objects:
        outer = chance.choice(objects)
        key = chance.choice(list(outer))
        if chance.random() < 0.5:
            del outer[key]
        else:
            outer[chance.choice(("", "x" * 1000, "\ud800", "colour"))] = _MARK
