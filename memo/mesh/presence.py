"""Detects lost ranks: each rank writes signs of life to the store, and the reason why it ends.

    alive/r   a number that rank r increases every PULSE_S
    lost      the first rank that ended too early, and the reason; written once
    done/r    rank r has ended in order, or has read `lost`

A rank reads `lost` and the numbers of its two neighbours, so the store serves a few small requests per second and
rank. A neighbour on the same machine is lost if its process does not exist any more. A neighbour on another machine,
or one whose process is stopped, is lost if its number has not grown for as long as a message may wait.
"""

import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta

from torch.distributed import Store  # type: ignore[attr-defined]

from memo.artifacts.processes import process_start
from memo.mesh.roll_call import Member, is_kept_by_torchrun, keeper

PULSE_S = 1.0
CENSUS_S = 3.5
"""Seconds in which the number of every living rank grows, even on a busy machine."""

_GONE = (
    "its process has gone without a word: it was killed (the kernel's log tells whether for memory, the scheduler's "
    "for what else), or crashed, and then its own output ends with why"
)


@dataclass(frozen=True)
class Loss:
    """The rank that was lost first, and the reason, as text."""

    rank: int
    who: str
    why: str

    def describe(self) -> str:
        return f"{self.who} left first: {self.why}"


class Presence:
    """The entries of one rank in the store. Its methods raise RuntimeError if the store does not answer.

    Args:
        store: a part of the store for this run alone, over its own connection, because a waiting call blocks the
            connection.
        members: all ranks of the run (memo.mesh.roll_call).
        names: their names in messages, by rank.
        timeout: how long a rank may be silent before it counts as lost.
    """

    def __init__(
        self, store: Store, rank: int, members: Sequence[Member], names: Sequence[str], timeout: timedelta
    ) -> None:
        self.store, self.rank, self.members, self.names = store, rank, members, names
        self.timeout_s = timeout.total_seconds()
        size = len(members)
        self._neighbours = sorted({(rank - 1) % size, (rank + 1) % size} - {rank})
        same_place = [n for n in self._neighbours if members[n].place == members[rank].place]
        self._visible = [n for n in same_place if process_start(members[n].pid)]
        self._pulse = 0
        self._heard: dict[int, bytes] = {}
        self._silent_s = dict.fromkeys(self._neighbours, 0.0)

    def beat(self) -> None:
        """Signal that this rank lives; to be called every PULSE_S."""
        self._pulse += 1
        self.store.set(f"alive/{self.rank}", str(self._pulse))

    def leave(self, why: str) -> Loss:
        """Report that this rank ends the run; returns the first report of any rank."""
        return self._tell(self.rank, why)

    def leave_in_order(self) -> None:
        """Report that this rank has ended in order, or has read the report of a lost rank."""
        self.store.set(f"done/{self.rank}", "")

    def wait_for_readers(self, silence_s: float) -> None:
        """If this rank hosts the store, wait until the other ranks do not need it any more.

        Returns when all ranks are done, or when no other rank has given a sign of life for `silence_s`.
        """
        if self.rank != 0 or is_kept_by_torchrun():
            return
        others, heard, heard_s = [*range(len(self.members))], list[bytes](), time.monotonic()
        while others := [rank for rank in others if not self._is_done(rank)]:
            numbers = [self._number(rank) for rank in others]
            if numbers != heard:
                heard, heard_s = numbers, time.monotonic()
            elif time.monotonic() - heard_s > silence_s:
                return
            time.sleep(PULSE_S / 20)

    def lost(self) -> Loss | None:
        """Return the report of the rank that was lost first; None if no rank was lost."""
        return Loss(**json.loads(self.store.get("lost"))) if self.store.check(["lost"]) else None

    def look_around(self, since_s: float) -> Loss | None:
        """Report a neighbour that is lost; `since_s`: seconds since the last call.

        If this process itself was stopped for a while, it could not see the neighbour's pulses. So each call adds at
        most two pulses to a neighbour's silent time.
        """
        for rank in self._neighbours:
            if rank in self._visible and not process_start(self.members[rank].pid):
                if self._is_done(rank):
                    continue
                return self._tell(rank, _GONE)
            number = self._number(rank)
            if number != self._heard.get(rank):
                self._heard[rank], self._silent_s[rank] = number, 0.0
            else:
                self._silent_s[rank] += min(since_s, 2 * PULSE_S)
            if self._silent_s[rank] > self.timeout_s and not self._is_done(rank):
                return self._tell(
                    rank,
                    f"nothing was heard of it for {self.timeout_s:g} s, and --distributed-timeout-minutes "
                    f"{self.timeout_s / 60:g} allows no more: it is stopped, or its machine or network is down",
                )
        return None

    def numbers(self) -> list[bytes]:
        """Return the current numbers of all ranks; the number of a living rank grows within CENSUS_S."""
        return [self._number(rank) for rank in range(len(self.members))]

    def silent_since(self, numbers: Sequence[bytes]) -> Loss | None:
        """Report the ranks whose numbers have not grown since `numbers`; the report is about the first of them."""
        silent = [rank for rank, was in enumerate(numbers) if rank != self.rank and self._number(rank) == was]
        silent = [rank for rank in silent if not self._is_done(rank)]
        if not silent:
            return None
        others = f", and with it ranks {', '.join(map(str, silent[1:9]))}" if silent[1:] else ""
        return self._tell(silent[0], f"{_GONE}{others}")

    def keeper_gone(self, error: BaseException) -> Loss:
        """Return the report for a store that no longer answers."""
        words = (str(error).splitlines() or [""])[0]
        why = f"the store that ranks meet in has gone with it ({words}); look at its own output"
        return Loss(0, keeper() if is_kept_by_torchrun() else self.names[0], why)

    def _tell(self, rank: int, why: str) -> Loss:
        mine = json.dumps(asdict(Loss(rank, self.names[rank], why)))
        return Loss(**json.loads(self.store.compare_set("lost", "", mine)))

    def _number(self, rank: int) -> bytes:
        return self.store.get(f"alive/{rank}") if self.store.check([f"alive/{rank}"]) else b""

    def _is_done(self, rank: int) -> bool:
        return bool(self.store.check([f"done/{rank}"]))
