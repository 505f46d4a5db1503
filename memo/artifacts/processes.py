"""Which processes of this machine run, by a number and a start that no other process shares."""

import os
import socket
from pathlib import Path


def machine() -> str:
    """A name that is equal for processes that see each other by their number: of a boot of a kernel, and a namespace of
    processes."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return socket.gethostname()


def process_start(pid: int) -> str | None:
    """When a process of this machine started, in units of the system; "" if it does not run, as a zombie does not.

    None for a process that runs, but of another user from whom this one's /proc hides it (its mount option hidepid).
    /proc counts ticks since the boot, which do not depend on the clock.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        return "" if fields[0] in "ZX" else fields[19]
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        pass
    try:
        os.kill(pid, 0)
    except PermissionError:  # which the system says of hidden processes too
        return None
    except (ProcessLookupError, OverflowError):
        pass
    return ""
