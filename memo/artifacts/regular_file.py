"""Opens and creates regular files, safely in folders that other people can write.

Such a folder may have a link, through which a write would change a file elsewhere, or a named pipe, whose opening would
wait for ever. Here neither happens, and a file is replaced as a whole: a reader finds the old content or the new, even
after a crash.
"""

import contextlib
import errno
import os
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

_KINDS = {
    stat.S_IFLNK: "a link",
    stat.S_IFDIR: "a directory",
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def kind_of_file(mode: int) -> str:
    """The kind of a file by its mode of `os.stat`, such as "a named pipe"."""
    return _KINDS.get(stat.S_IFMT(mode), "a regular file")


def other_kind(path: str | Path) -> str | None:
    """The kind of a file that is not regular, such as "a link to /etc/passwd"; None for a regular file or no file.

    Raises OSError, and ValueError for a name that no file can have.
    """
    try:
        mode = os.lstat(path).st_mode
    except (FileNotFoundError, NotADirectoryError):
        return None
    if stat.S_ISLNK(mode):
        return f"a link to {os.readlink(path)}"
    return None if stat.S_ISREG(mode) else kind_of_file(mode)


def open_regular(path: str | Path, flags: int = os.O_RDONLY) -> int:
    """Open a regular file without waiting; returns its descriptor. Writing does not follow links. Raises OSError."""
    is_read = flags & os.O_ACCMODE == os.O_RDONLY
    if not is_read and (kind := other_kind(path)) is not None:
        raise _not_regular(path, kind)
    careful = os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC | (0 if is_read else os.O_NOFOLLOW)
    descriptor = os.open(path, flags | careful, 0o666)
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        os.close(descriptor)
        raise _not_regular(path, kind_of_file(mode))
    return descriptor


def _not_regular(path: str | Path, kind: str) -> OSError:
    return OSError(errno.EINVAL, f"it is {kind}, not a regular file", str(path))


@contextlib.contextmanager
def replacing(path: str | Path) -> Iterator[BinaryIO]:
    """A context with a new file that is renamed to `path` once its content is on disk; an error removes it.

    The folder is made if needed. Raises OSError, also if `path` exists and is not a regular file.
    """
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    if (kind := other_kind(target)) is not None:
        raise _not_regular(target, kind)
    partial = target.parent / f"{target.name}.{os.urandom(4).hex()}.partial"  # two processes may write one file
    descriptor = open_regular(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    try:
        with open(descriptor, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, target)
    except BaseException:
        with contextlib.suppress(OSError):
            partial.unlink()
        raise
    make_durable(target.parent)


def replace_file(path: str | Path, content: str | bytes) -> None:
    """Write a file, text in UTF-8. Raises the OSErrors of `replacing`."""
    with replacing(path) as file:
        file.write(content.encode() if isinstance(content, str) else content)


def copy_file(source: str | Path, target: str | Path) -> None:
    """Copy a regular file to `target`. Raises the OSErrors of `replacing`."""
    with open(open_regular(source), "rb") as theirs, replacing(target) as ours:
        shutil.copyfileobj(theirs, ours)


@contextlib.contextmanager
def removed_if_unused(folder: str | None) -> Iterator[None]:
    """A context whose error removes the folder, and folders in and above it, if they are new and empty.

    So a run that is refused after its folders were made leaves none of them, nor the corpora that it has built in
    FOLDER/data: a run that began has files in FOLDER itself."""
    path = Path(folder or ".").absolute()
    new = [each for each in (path, *path.parents) if not os.path.exists(each)]
    try:
        yield
    except BaseException:
        if new and os.path.isdir(path) and not any(each.is_file() for each in path.iterdir()):
            shutil.rmtree(path / "data", ignore_errors=True)
        if new and os.path.exists(new[-1]):
            for each, _, _ in os.walk(new[-1], topdown=False):
                with contextlib.suppress(OSError):  # it has content
                    os.rmdir(each)
        raise


def make_durable(directory: Path) -> None:
    """Sync the names in a directory; the files themselves are synced when they are written."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
