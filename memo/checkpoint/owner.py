"""Lets only one run at a time use the directory that --save names.

    DIR/owner.json      host, process, user and start of the run that created the file and owns the directory

A run that was killed leaves its file behind. On the same machine its process is looked up by its number and the time of
its start, which no other process shares. An owner on another machine or in another container, or one whose processes
the system hides, cannot be looked up, so the time of its file is watched: an owner renews the file every HEARTBEAT_S,
and counts as dead if the file does not change for STALE_S. A restart by torchrun takes over at once from an earlier
start of the same job. No torch here.
"""

import contextlib
import dataclasses
import fcntl
import getpass
import json
import os
import socket
import threading
import time
import uuid
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from memo.artifacts.fields import build
from memo.artifacts.processes import machine, process_start
from memo.artifacts.reading import Source, read_json
from memo.artifacts.regular_file import open_regular
from memo.errors import CheckpointError
from memo.standard_streams import visible

OWNER = "owner.json"
HEARTBEAT_S = 10.0
STALE_S = 60.0
_MAX_BYTES = 1 << 16


@dataclass(frozen=True)
class Owner:
    """The run that owns a directory."""

    token: str
    """A random name of this start of the run."""
    host: str
    machine: str
    """As memo.artifacts.processes names it; process numbers are unique within one machine."""
    pid: int
    process_start: str
    user: str
    since: str
    job: str = ""
    """torchrun's name of the job; "" without torchrun."""
    restart: int = 0

    @classmethod
    def here(cls) -> "Owner":
        job = os.environ.get("TORCHELASTIC_RUN_ID", "none")
        restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        return cls(
            token=uuid.uuid4().hex,
            host=socket.gethostname(),
            machine=machine(),
            pid=os.getpid(),
            process_start=process_start(os.getpid()) or "",
            user=_user(),
            since=datetime.now().astimezone().isoformat(timespec="seconds"),
            job="" if job == "none" else job,
            restart=int(restart) if restart.isdecimal() else 0,
        )

    def describe(self) -> str:
        return visible(f"process {self.pid} of {self.user} on {self.host}, since {self.since}")


class Ownership:
    """Ownership of a directory, until release(), the end of the process, or the deletion of this object."""

    def __init__(self, path: Path, owner: Owner) -> None:
        self._path, self._owner = path, owner
        stop = threading.Event()
        self.release = weakref.finalize(self, _release, path, owner, stop)
        threading.Thread(target=_renew, args=(path, owner, stop), name="memo-owner", daemon=True).start()

    def check(self) -> None:
        """Raises CheckpointError if another run has taken the directory meanwhile, or the file was removed."""
        theirs = _read(self._path)
        if theirs != self._owner:
            by = "nobody" if theirs is None else theirs.describe()
            raise CheckpointError(
                f"--save {self._path.parent} is no longer this run's: {OWNER} names {by}: this run must not write "
                "there; stop one of the two, and go on with --load"
            )


def claim(directory: str | Path, report: Callable[[str], None]) -> Ownership:
    """Make the directory and take its ownership; `report` is called with a message if that takes long.

    Raises CheckpointError if the directory belongs to a live run, and OSError for a path that cannot be made.
    """
    root = Path(directory)
    root.mkdir(parents=True, exist_ok=True)
    path, mine = root / OWNER, Owner.here()
    while not _create(path, mine):
        theirs = _read(path)
        if not _is_dead(theirs, mine, path, report):
            who = "a run whose owner.json cannot be read" if theirs is None else theirs.describe()
            remedy = "wait for its end, stop it, or give another directory"
            if theirs is not None and (theirs.machine, theirs.pid) == (mine.machine, mine.pid):
                remedy = "that is this process: close() the Trainer that holds it"
            raise CheckpointError(f"--save {root} belongs to another run, {who}: {remedy}")
        _remove(path, theirs)
    return Ownership(path, mine)


def _create(path: Path, owner: Owner) -> bool:
    """Create the file; False if it exists already."""
    try:
        descriptor = open_regular(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    except FileExistsError:
        return False
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(json.dumps(dataclasses.asdict(owner), indent=1) + "\n")
    except OSError:  # a full disk
        path.unlink(missing_ok=True)
        raise
    return True


def _read(path: Path) -> Owner | None:
    """The owner in a file; None if the file does not exist, is being written, or has other content."""
    source = Source(str(path), CheckpointError, "delete it if no run uses this directory")
    try:
        return build(Owner, read_json(path, source, max_bytes=_MAX_BYTES), source)
    except CheckpointError:
        return None


def _is_dead(theirs: Owner | None, mine: Owner, path: Path, report: Callable[[str], None]) -> bool:
    if theirs is not None and theirs.job and theirs.job == mine.job and theirs.restart < mine.restart:
        return True
    if theirs is not None and theirs.machine == mine.machine:
        start = process_start(theirs.pid)
        if start is not None:
            return start != theirs.process_start
    return _is_stale(path, theirs, report)


def _is_stale(path: Path, theirs: Owner | None, report: Callable[[str], None]) -> bool:
    """Watch the file for up to STALE_S; returns whether it is not renewed, or removed."""
    who = "" if theirs is None else f", last of {theirs.describe()}"
    report(f"--save {path.parent} may belong to another run{who}: waiting {STALE_S:.0f} s for a sign of it")
    seen, until_s = _renewed_at(path), time.monotonic() + STALE_S
    while time.monotonic() < until_s:
        time.sleep(min(1.0, STALE_S / 10))
        now = _renewed_at(path)
        if now is None:
            return True
        if now != seen:
            return False
    return True


def _renewed_at(path: Path) -> int | None:
    """The time of the file; it is opened first, because a network file system may otherwise report an older time."""
    try:
        with open(open_regular(path), "rb") as file:
            return os.fstat(file.fileno()).st_mtime_ns
    except OSError:
        return None


def _remove(path: Path, dead: Owner | None) -> None:
    """Remove the file of a dead owner, unless another run has removed it and taken the directory since."""
    with contextlib.suppress(FileNotFoundError), open(open_regular(path, os.O_RDWR), "r+b") as file:
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(file, fcntl.LOCK_EX)
        if os.path.samestat(os.fstat(file.fileno()), os.stat(path)) and _read(path) == dead:
            path.unlink()


def _renew(path: Path, owner: Owner, stop: threading.Event) -> None:
    while not stop.wait(HEARTBEAT_S):
        if _read(path) == owner:
            with contextlib.suppress(OSError):
                os.utime(path)


def _release(path: Path, owner: Owner, stop: threading.Event) -> None:
    stop.set()
    if _read(path) == owner and os.getpid() == owner.pid:  # not in a forked child
        with contextlib.suppress(OSError):
            path.unlink()


def _user() -> str:
    try:
        return getpass.getuser()
    except (OSError, KeyError):  # in containers a user may have no name
        return f"user {os.getuid()}"
