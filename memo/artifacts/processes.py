"""Identifies processes of this machine by their number and start time, and tells whether they run."""

import os
import socket
from pathlib import Path


def machine() -> str:
    """A name that is equal for processes that share process numbers: the boot of the kernel and the namespace of
    processes."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return socket.gethostname()


def process_start(pid: int) -> str | None:
    """The start time of a process of this machine, in clock ticks since the boot; "" if it does not run or is a zombie.

    None for a running process of another user that /proc hides (mount option hidepid). Ticks since the boot do not
    depend on the clock.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        return "" if fields[0] in "ZX" else fields[19]
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        pass
    try:
        os.kill(pid, 0)
    except PermissionError:  # also raised for hidden processes
        return None
    except (ProcessLookupError, OverflowError):
        pass
    return ""
