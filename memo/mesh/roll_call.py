"""The ranks of a run agree in the store on the processes that take part, before any process group starts.

torchrun's store outlives the processes of a run that is restarted, and ranks can die at any time, so the store may hold
entries from an earlier start. Every process therefore has an identity of its own:

    rank r                                      rank 0
    hello/r = identity            ->            roll = all identities, roll_digest
    ack/r = digest of the roll,   <-
      if it names this process    ->            agreed/digest, once every ack is that digest

Entries of an earlier process are never acknowledged, because the roll holds the new identity of rank 0. The digest
then names the run in the store. A rank that refuses its input takes part as well, and gives the reason, so that no
other rank waits for it.
"""

import hashlib
import json
import os
import time
import uuid
from dataclasses import asdict, dataclass
from datetime import timedelta

from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from memo.artifacts.processes import machine
from memo.errors import ConfigError, RankLost, host_name

_POLL_S = 0.05
_SEEN_S = 5.0
"""How long a rank that hosts the store, and ends, waits for all ranks to read the reason."""


@dataclass(frozen=True)
class Member:
    """One process of a run.

    Attributes:
        place: the machine or container whose process number `pid` is.
        words: the reason why it refuses to run; empty if it runs.
    """

    identity: str
    host: str
    place: str
    pid: int
    words: str = ""

    @classmethod
    def here(cls, words: str = "") -> "Member":
        return cls(uuid.uuid4().hex, host_name(), machine(), os.getpid(), words)


def open_store(rank: int, timeout: timedelta) -> TCPStore:
    """Connect to the store at MASTER_ADDR and MASTER_PORT; without torchrun, rank 0 hosts it.

    Raises ConfigError if they are not a host and a port, and RankLost if nothing answers there within `timeout`.
    """
    host, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT", "")
    if not host or not port.isdecimal() or int(port) >= 2**16:
        raise ConfigError(
            f"MASTER_ADDR is {host} and MASTER_PORT is {port or None}, which name no host and port where the ranks of "
            "WORLD_SIZE meet: start with torchrun, or set both to those of rank 0 on every rank"
        )
    is_keeper = rank == 0 and not is_kept_by_torchrun()
    try:
        return TCPStore(
            host, int(port), is_master=is_keeper, timeout=timeout, wait_for_workers=False, multi_tenant=is_keeper
        )
    except RuntimeError as error:
        if is_keeper:
            raise ConfigError(
                f"MASTER_PORT {port} cannot be opened here ({_first_line(error)}): choose a port that is free"
            ) from None
        raise RankLost(
            f"{keeper()} does not answer at {host}:{port} within {timeout.total_seconds():g} s: it has not started, or "
            "has ended before; look at its own message, and check that the port is open"
        ) from None


def is_kept_by_torchrun() -> bool:
    """Whether torchrun hosts the store, which then outlives every rank."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def keeper() -> str:
    """The name of the process that hosts the store, for messages."""
    return "torchrun on the first node" if is_kept_by_torchrun() else "rank 0"


def call_roll(
    store: Store, rank: int, world_size: int, timeout: timedelta, words: str = ""
) -> tuple[PrefixStore, list[Member]]:
    """Wait for all ranks of this start; returns a part of the store for this run alone, and the members by rank.

    Raises RankLost if some rank does not join within `timeout`, or reports why it refuses to run.
    """
    me, deadline_s = Member.here(words), time.monotonic() + timeout.total_seconds()
    store.set(f"hello/{rank}", json.dumps(asdict(me)))
    roll = _Leader(store, world_size) if rank == 0 else _Follower(store, rank, me.identity)
    try:
        while (text := roll.agreed()) is None:
            if time.monotonic() > deadline_s:
                raise RankLost(_missing(store, world_size, timeout))
            time.sleep(_POLL_S)
        members = [Member(**entry) for entry in json.loads(text)]
        if any(member.words for member in members):
            _let_all_read(store, rank, world_size, _digest(text))
    except RuntimeError as error:
        if isinstance(error, RankLost):
            raise
        raise RankLost(f"{keeper()}, which keeps the store, has gone ({_first_line(error)})") from None
    refusing = next(((r, member) for r, member in enumerate(members) if member.words), None)
    if refusing is not None and not words:
        raise RankLost(f"rank {refusing[0]} ({refusing[1].host}) has not started: {refusing[1].words}")
    return PrefixStore(f"run/{_digest(text)}", store), members


class _Leader:
    """Rank 0: writes the roll again whenever it changes, until all ranks agree."""

    def __init__(self, store: Store, world_size: int) -> None:
        self.store = store
        self.hellos = [f"hello/{rank}" for rank in range(world_size)]
        self.acks = [f"ack/{rank}" for rank in range(1, world_size)]
        self.text = ""

    def agreed(self) -> str | None:
        if not self.store.check(self.hellos):
            return None
        text = "[" + ",".join(x.decode() for x in self.store.multi_get(self.hellos)) + "]"
        if text != self.text:
            self.text = text
            self.store.set("roll", text)
            self.store.set("roll_digest", _digest(text))
        digest = _digest(text)
        if not self.store.check(self.acks) or any(x.decode() != digest for x in self.store.multi_get(self.acks)):
            return None
        self.store.set(f"agreed/{digest}", "")
        return text


class _Follower:
    """Any other rank: agrees to a roll that contains the identity of this process."""

    def __init__(self, store: Store, rank: int, identity: str) -> None:
        self.store, self.rank, self.identity = store, rank, identity
        self.digest, self.text, self.agrees = "", "", False

    def agreed(self) -> str | None:
        if not self.store.check(["roll_digest"]):
            return None
        if self.store.get("roll_digest").decode() != self.digest:  # the roll itself may be long
            self.text = self.store.get("roll").decode()
            self.digest = _digest(self.text)
            self.agrees = json.loads(self.text)[self.rank]["identity"] == self.identity
            if self.agrees:
                self.store.set(f"ack/{self.rank}", self.digest)
        return self.text if self.agrees and self.store.check([f"agreed/{self.digest}"]) else None


def _let_all_read(store: Store, rank: int, world_size: int, digest: str) -> None:
    """Keep the store of rank 0 alive until all ranks have read that this run does not begin."""
    store.set(f"seen/{digest}/{rank}", "")
    seen = [f"seen/{digest}/{other}" for other in range(world_size)]
    deadline_s = time.monotonic() + _SEEN_S
    while rank == 0 and not store.check(seen) and time.monotonic() < deadline_s:
        time.sleep(_POLL_S)


def _missing(store: Store, world_size: int, timeout: timedelta) -> str:
    absent = [str(rank) for rank in range(world_size) if not store.check([f"hello/{rank}"])]
    who = f"ranks {', '.join(absent[:8])} of {world_size}" if absent else f"all {world_size} ranks at one time"
    return (
        f"{who} did not come within --distributed-timeout-minutes {timeout.total_seconds() / 60:g}: look at their own "
        "messages, or give more minutes if they only take long to start"
    )


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
