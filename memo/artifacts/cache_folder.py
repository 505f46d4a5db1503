"""The user's cache folder, and checks that no other user can write to it."""

import os
import stat
from pathlib import Path

from memo.errors import MemoError, is_reporting_rank, reason_of, warn

_PRIVATE = 0o700
_WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH
_ENTERED_BY_OTHERS = stat.S_IXGRP | stat.S_IXOTH


def cache_folder(name: str) -> Path:
    """$XDG_CACHE_HOME/memo/NAME, or ~/.cache/memo/NAME; it need not exist.

    A relative path is ignored with a warning, as the XDG specification asks. Raises RuntimeError for a user without a
    home directory.
    """
    given = os.environ.get("XDG_CACHE_HOME", "")
    if given and not Path(given).is_absolute() and is_reporting_rank():
        warn(f"XDG_CACHE_HOME is {given!r}, a relative path, which is ignored: give an absolute one")
    base = Path(given) if Path(given).is_absolute() else Path.home() / ".cache"
    if not base.is_absolute():
        raise RuntimeError(f"the home directory {str(Path.home())!r} is a relative path")
    return base / "memo" / name


def private_folder(name: str, what: str, error: type[MemoError]) -> Path:
    """The folder of `cache_folder`, made if needed, for `what`, from which code is loaded. Raises `error` if it cannot
    be made, or if another user could write to it."""
    try:
        folder = cache_folder(name)
        make_private(folder)
        fault = folder_fault(folder)
    except (OSError, RuntimeError) as problem:
        why = reason_of(problem) if isinstance(problem, OSError) else problem
        raise error(
            f"{what} cannot be kept in the cache ({why}): set XDG_CACHE_HOME to a folder that can be written"
        ) from None
    if fault:
        raise error(
            f"{what} cannot be kept in {folder}, where others could exchange it: {fault}; or set XDG_CACHE_HOME to a "
            "folder of your own"
        )
    return folder


def make_private(folder: Path) -> None:
    """Make the missing folders of an absolute path, accessible only to this user. Raises OSError."""
    for path in (*reversed(folder.parents), folder):
        if not path.exists():
            path.mkdir(mode=_PRIVATE, exist_ok=True)  # another rank may have made it meanwhile


def folder_fault(folder: Path) -> str | None:
    """Why another user could replace files in a folder, with a remedy; None if nobody else can.

    The folder must belong to this user, and every folder above it to this user or to root. No other user may have
    permission to write to any of them, with two exceptions. In folders with the sticky bit, such as /tmp, nobody can
    rename other users' files. Below a folder that only this user can enter, such as a closed home directory, folders
    may be writable for a group, as they often are. Raises OSError.
    """
    # Check both the path as written, which may have links, and the path to which it leads.
    for whole in (folder, Path(os.path.realpath(folder))):
        is_private = False
        for path in (*reversed(whole.parents), whole):
            found = path.lstat()
            if fault := _fault(path, found, is_last=path == whole, is_private=is_private):
                return fault
            is_private |= not stat.S_ISLNK(found.st_mode) and not found.st_mode & _ENTERED_BY_OTHERS
    return None


def _fault(path: Path, found: os.stat_result, *, is_last: bool, is_private: bool) -> str | None:
    user = os.geteuid()
    if found.st_uid != user and (is_last or found.st_uid != 0):
        return f"{path} belongs to user {found.st_uid}, not to user {user}, who runs memo"
    if stat.S_ISLNK(found.st_mode):
        return f"{path} is a link: replace it with a folder" if is_last else None
    is_sticky = not is_last and found.st_mode & stat.S_ISVTX
    if found.st_mode & _WRITABLE_BY_OTHERS and not is_sticky and not is_private:
        return f"{path} can be written by other users (mode {stat.S_IMODE(found.st_mode):o}): chmod go-w {path}"
    return None


def file_fault(path: Path) -> str | None:
    """Why a file in a private folder is not this user's own; None if it is. Raises OSError if there is no such file."""
    found = path.lstat()
    if not stat.S_ISREG(found.st_mode):
        return "it is no regular file"
    if found.st_uid != os.geteuid():
        return f"it belongs to user {found.st_uid}"
    if found.st_mode & _WRITABLE_BY_OTHERS:
        return f"other users can write it (mode {stat.S_IMODE(found.st_mode):o})"
    return None
