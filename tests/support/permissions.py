"""Files that this process may not read or write, even if tests run as root, who is not bound by permissions."""

import contextlib
import ctypes
from collections.abc import Iterator
from pathlib import Path

_VERSION_3 = 0x20080522
_IGNORE_PERMISSIONS = 0b1110  # CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH and CAP_FOWNER of linux/capability.h
_GET_SECUREBITS, _SET_SECUREBITS, _NO_ROOT = 27, 28, 1  # of linux/prctl.h and linux/securebits.h
_LIBC = ctypes.CDLL(None, use_errno=True)


class _Header(ctypes.Structure):
    _fields_ = (("version", ctypes.c_uint32), ("pid", ctypes.c_int))


class _Data(ctypes.Structure):
    _fields_ = (("effective", ctypes.c_uint32), ("permitted", ctypes.c_uint32), ("inheritable", ctypes.c_uint32))


@contextlib.contextmanager
def permissions_bind() -> Iterator[None]:
    """Let this thread, and processes that it starts, obey permissions like any other user."""
    header, data = _Header(_VERSION_3, 0), (_Data * 2)()
    _call("capget", header, data)
    before = data[0].effective
    data[0].effective &= ~_IGNORE_PERMISSIONS
    _call("capset", header, data)
    bits = _LIBC.prctl(_GET_SECUREBITS)
    _LIBC.prctl(_SET_SECUREBITS, bits | _NO_ROOT)  # refused to all but root, to whose children alone it matters
    try:
        yield
    finally:
        _LIBC.prctl(_SET_SECUREBITS, bits)
        data[0].effective = before
        _call("capset", header, data)


@contextlib.contextmanager
def forbidden(*paths: Path) -> Iterator[None]:
    """Take all permissions from these files and folders, and let permissions bind."""
    modes = [(path, path.stat().st_mode) for path in paths]
    with permissions_bind():
        try:
            for path, _ in modes:
                path.chmod(0)
            yield
        finally:
            for path, mode in reversed(modes):
                path.chmod(mode)


def _call(name: str, *args: object) -> None:
    if getattr(_LIBC, name)(*(ctypes.byref(each) for each in args)) != 0:  # type: ignore[arg-type]
        raise OSError(ctypes.get_errno(), name)
