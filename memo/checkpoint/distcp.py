"""Reads checkpoints of memo's schema 1 and 2, which torch.distributed.checkpoint wrote, without unpickling anything.

Their index, `.metadata`, is a pickle, and every rectangle is a zip file of torch.save within a `.distcp` file:

    __3_0.distcp    | archive/data.pkl  archive/data/0 ... | archive/data.pkl  archive/data/0 ... | ...

A pickle is a program, which could do anything, so none is run here. `.metadata` is parsed into plain data instead:
classes become their names, and objects become the arguments that their constructors would get. Of each zip file only
the directory is read, which has the place of the uncompressed numbers and their CRC-32. The result is an index like
that of a new checkpoint.
"""

import io
import pickletools
import re
import struct
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from memo.artifacts.reading import read_bytes
from memo.checkpoint.files import checkpoint_file, damaged
from memo.checkpoint.index import DTYPES, Shape, StoredRectangle, StoredTensor, check_files, check_rectangles
from memo.errors import CheckpointError

METADATA = ".metadata"
_KNOWN = re.compile(
    r"torch\.(distributed\.checkpoint\..*|serialization\._get_layout|Size|\w+)|pathlib\.\w+|builtins\.getattr"
)
"""Names that such a pickle may contain; any other is refused, although none is ever imported. Python 3.11.2 writes a
member of an enumeration as an attribute of its class."""

_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False, "EMPTY_TUPLE": ()}
_LOCAL_HEADER_BYTES = 30


@dataclass
class _Named:
    """A class or a function by its name, or the object that it would have made, as its arguments and its state."""

    name: str
    arguments: Any = None
    state: Any = None


def read_metadata(final: Path) -> dict[str, StoredTensor]:
    """The index of an old checkpoint. Raises CheckpointError that says what is wrong with it."""
    try:
        found = _fields(written_down(read_bytes(checkpoint_file(final, METADATA), damaged(METADATA))))
        places = {_key(key): _fields(place) for key, place in found["storage_data"]}
        tensors = [(name, _fields(described)) for name, described in found["state_dict_metadata"]]
        files: dict[str, BinaryIO] = {}
        try:
            index = {name: _tensor(final, name, described, places, files) for name, described in tensors}
        finally:
            for file in files.values():
                file.close()
    except (OSError, ValueError, KeyError, IndexError, TypeError, AttributeError, struct.error) as error:
        raise CheckpointError(f"{METADATA} is not as memo wrote it ({type(error).__name__}: {error})") from None
    check_rectangles(index)
    check_files(final, index)
    return index


def written_down(content: bytes) -> Any:
    """The content of a pickle of protocol 4: dictionaries as lists of pairs, and all other objects as _Named.

    Raises ValueError, IndexError, TypeError or AttributeError for what torch.distributed.checkpoint does not write.
    """
    stack: list[Any] = []
    marks: list[int] = []
    memo: list[Any] = []

    argument: Any
    for opcode, argument, _ in pickletools.genops(content):
        match opcode.name:
            case "PROTO" | "FRAME":
                pass
            case "MEMOIZE":
                memo.append(stack[-1])
            case "BINGET" | "LONG_BINGET":
                stack.append(memo[argument])
            case "SHORT_BINUNICODE" | "BINUNICODE" | "BININT" | "BININT1" | "BININT2" | "LONG1":
                stack.append(argument)
            case "NONE" | "NEWTRUE" | "NEWFALSE" | "EMPTY_TUPLE":
                stack.append(_CONSTANTS[opcode.name])
            case "EMPTY_LIST" | "EMPTY_DICT":
                stack.append([])
            case "MARK":
                marks.append(len(stack))
            case "TUPLE":
                stack.append(tuple(_cut(stack, marks.pop())))
            case "TUPLE1" | "TUPLE2" | "TUPLE3":
                count = int(opcode.name[-1])
                stack[-count:] = [tuple(stack[-count:])]
            case "APPEND":
                stack[-2].append(stack.pop())
            case "APPENDS":
                items = _cut(stack, marks.pop())
                stack[-1].extend(items)
            case "SETITEM":
                value = stack.pop()
                stack[-2].append((stack.pop(), value))
            case "SETITEMS":
                items = _cut(stack, marks.pop())
                stack[-1].extend(zip(items[::2], items[1::2], strict=True))
            case "STACK_GLOBAL":
                name = f"{stack[-2]}.{stack[-1]}"
                if not _KNOWN.fullmatch(name):
                    raise ValueError(f"it names {name[:200]}, which has no place in a checkpoint")
                stack[-2:] = [_Named(name)]
            case "NEWOBJ" | "REDUCE":
                stack[-2:] = [_Named(stack[-2].name, stack[-1])]
            case "BUILD":
                state = stack.pop()
                stack[-1].state = state
            case "STOP":
                return stack.pop()
            case _:
                raise ValueError(f"it holds the opcode {opcode.name}, which has no place in a checkpoint")
    raise ValueError("it is cut short")


def _cut(stack: list[Any], start: int) -> list[Any]:
    """Remove and return the items of a stack from `start` on."""
    items = stack[start:]
    del stack[start:]
    return items


def _fields(described: _Named) -> dict[str, Any]:
    return dict(described.state)


def _size(described: _Named) -> Shape:
    (numbers,) = described.arguments
    if not all(type(number) is int and number >= 0 for number in numbers):
        raise ValueError("a size or an offset is no number from 0 on")
    return tuple(numbers)


def _key(described: _Named) -> tuple[str, Shape]:
    fields = _fields(described)
    return str(fields["fqn"]), _size(fields["offset"])


def _tensor(
    final: Path,
    name: str,
    described: dict[str, Any],
    places: dict[tuple[str, Shape], dict[str, Any]],
    files: dict[str, BinaryIO],
) -> StoredTensor:
    dtype = DTYPES[described["properties"].state[0].name.removeprefix("torch.")]
    rectangles = []
    for chunk in described["chunks"]:
        fields = _fields(chunk)
        offset, shape = _size(fields["offsets"]), _size(fields["sizes"])
        place = places[name, offset]
        path = str(place["relative_path"])
        if path not in files:
            files[path] = open(checkpoint_file(final, path), "rb")  # noqa: SIM115  closed by read_metadata
        at_byte, num_bytes, crc32 = _stored(files[path], place["offset"], place["length"])
        rectangle = StoredRectangle(offset, shape, path, at_byte, crc32, "crc32")
        if rectangle.num_bytes(dtype) != num_bytes:
            raise ValueError(f"{name} takes {rectangle.num_bytes(dtype)} bytes, but {path} holds {num_bytes} of it")
        rectangles.append(rectangle)
    return StoredTensor(_size(described["size"]), dtype, tuple(rectangles))


def _stored(file: BinaryIO, offset: int, length: int) -> tuple[int, int, str]:
    """(offset in the file, number of bytes, CRC-32) of the numbers in a zip file that is part of `file`."""
    try:
        with zipfile.ZipFile(_Slice(file, offset, length)) as archive:
            (member,) = [entry for entry in archive.infolist() if re.fullmatch(r"[^/]+/data/\d+", entry.filename)]
    except (zipfile.BadZipFile, NotImplementedError) as error:
        raise ValueError(f"{Path(file.name).name} at byte {offset}: {error}") from None
    if member.compress_type != zipfile.ZIP_STORED:
        raise ValueError(f"{Path(file.name).name} at byte {offset} is compressed")
    file.seek(offset + member.header_offset)
    name_bytes, extra_bytes = struct.unpack_from("<HH", file.read(_LOCAL_HEADER_BYTES), 26)
    at_byte = offset + member.header_offset + _LOCAL_HEADER_BYTES + name_bytes + extra_bytes
    return at_byte, member.file_size, f"{member.CRC:08x}"


class _Slice(io.RawIOBase):
    """Part of a file, read as a file of its own."""

    def __init__(self, file: BinaryIO, offset: int, length: int) -> None:
        self.file, self.offset, self.length, self.position = file, offset, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self.position, io.SEEK_END: self.length}[whence]
        if start + offset < 0:
            raise OSError("a place before the beginning")
        self.position = start + offset
        return self.position

    def tell(self) -> int:
        return self.position

    def readinto(self, buffer: Any) -> int:
        count = max(0, min(len(buffer), self.length - self.position))
        self.file.seek(self.offset + self.position)
        data = self.file.read(count)
        buffer[: len(data)] = data
        self.position += len(data)
        return len(data)
