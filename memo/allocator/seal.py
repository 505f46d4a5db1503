"""The seal that is appended to a built library, so that it is loaded only if it is whole and was built for this key.

The loader maps a library page by page: a truncated file ends the process with SIGBUS, in the middle of a run.

    | ELF, as the linker wrote it | b"memo library\\n" | key, 24 bytes | SHA-256 of all before it, 32 bytes |

The loader ignores bytes behind the ELF's own tables.
"""

import hashlib
import os
from pathlib import Path

_MAGIC = b"memo library\n"
_DIGEST_BYTES = hashlib.sha256().digest_size


def seal(path: Path, key: str) -> None:
    """Append the seal, flush the file to disk, and make it accessible to this user alone. Raises OSError."""
    with open(path, "r+b") as file:
        content = file.read() + _MAGIC + key.encode()
        file.seek(0, os.SEEK_END)
        file.write(_MAGIC + key.encode() + hashlib.sha256(content).digest())
        os.fchmod(file.fileno(), 0o700)
        file.flush()
        os.fsync(file.fileno())


def seal_fault(path: Path, key: str) -> str | None:
    """Return why the library must not be loaded; None if it is whole and was built for `key`. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    with open(descriptor, "rb") as file:
        content = file.read()
    sealed, digest = content[:-_DIGEST_BYTES], content[-_DIGEST_BYTES:]
    if hashlib.sha256(sealed).digest() != digest:
        return "it is not as it was built: damaged, or cut short"
    if not sealed.endswith(_MAGIC + key.encode()):
        return "it was built for another torch or from other sources"
    return None
