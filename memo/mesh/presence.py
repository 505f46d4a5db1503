"""Which ranks of a run are still there: each tells the store that it lives, and why it leaves.

    alive/r   a number that grows every PULSE_S
    lost      the first rank that left too early, and why: written once
    done/r    rank r has left in order, or has read `lost`

Ranks read `lost` and the numbers of their two neighbours, so the store serves a few small requests a second and rank.
A neighbour on the same machine whose process has gone left without a word; one on another machine, or one that is
stopped, is given up when its number has stood still for as long as a message may wait.
"""

import json
import os
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta

from torch.distributed import Store  # type: ignore[attr-defined]

from memo.mesh.roll_call import Member, is_kept_by_torchrun, keeper

PULSE_S = 1.0
CENSUS_S = 3.5
"""In which every living rank's number grows, even on a machine that is busy."""

_GONE = (
    "its process has gone without a word: it was killed (the kernel's log tells whether for memory, the scheduler's "
    "for what else), or crashed, and then its own output ends with why"
)


@dataclass(frozen=True)
class Loss:
    """The rank that left first, and why, for people."""

    rank: int
    who: str
    why: str

    def describe(self) -> str:
        return f"{self.who} left first: {self.why}"


class Presence:
    """What one rank says and hears; its methods talk to the store, and raise RuntimeError when that is gone.

    Args:
        store: of this run alone, over a connection of its own: a message that waits holds its connection.
        members: all ranks of the run (memo.mesh.roll_call).
        names: what people call them, by rank.
        timeout: how long a silent rank is waited for.
    """

    def __init__(
        self, store: Store, rank: int, members: Sequence[Member], names: Sequence[str], timeout: timedelta
    ) -> None:
        self.store, self.rank, self.members, self.names = store, rank, members, names
        self.timeout_s = timeout.total_seconds()
        size = len(members)
        self._neighbours = sorted({(rank - 1) % size, (rank + 1) % size} - {rank})
        same_place = [n for n in self._neighbours if members[n].place == members[rank].place]
        self._visible = [n for n in same_place if is_running(members[n].pid)]
        self._pulse = 0
        self._heard: dict[int, bytes] = {}
        self._silent_s = dict.fromkeys(self._neighbours, 0.0)

    def beat(self) -> None:
        """To be called every PULSE_S."""
        self._pulse += 1
        self.store.set(f"alive/{self.rank}", str(self._pulse))

    def leave(self, why: str) -> Loss:
        """Tell that this rank ends the run; returns who did so first."""
        return self._tell(self.rank, why)

    def leave_in_order(self) -> None:
        """Tell that this rank is not needed any more, or has heard of the loss."""
        self.store.set(f"done/{self.rank}", "")

    def wait_for_readers(self, silence_s: float) -> None:
        """A store that this rank keeps ends with it: first let the others read what they still need.

        Returns when all are done, or when of those that are not none has been heard of for `silence_s`.
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
        """Who left first, if anybody told of it."""
        return Loss(**json.loads(self.store.get("lost"))) if self.store.check(["lost"]) else None

    def look_around(self, since_s: float) -> Loss | None:
        """Tell of a neighbour that has gone, or has been silent for too long; `since_s`: since the last look.

        A process that was itself stopped for a while has only seen its own silence, so no look counts for more than
        two pulses.
        """
        for rank in self._neighbours:
            if rank in self._visible and not is_running(self.members[rank].pid):
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
        """Of all ranks now; two of them, CENSUS_S apart, tell who still lives."""
        return [self._number(rank) for rank in range(len(self.members))]

    def silent_since(self, numbers: Sequence[bytes]) -> Loss | None:
        """Tell of the ranks whose numbers have not grown, the first of them by name."""
        silent = [rank for rank, was in enumerate(numbers) if rank != self.rank and self._number(rank) == was]
        silent = [rank for rank in silent if not self._is_done(rank)]
        if not silent:
            return None
        others = f", and with it ranks {', '.join(map(str, silent[1:9]))}" if silent[1:] else ""
        return self._tell(silent[0], f"{_GONE}{others}")

    def keeper_gone(self, error: BaseException) -> Loss:
        """What it means that the store does not answer any more."""
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


def is_running(pid: int) -> bool:
    """Whether a process of this machine still runs; one that nobody has waited for yet does not."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            return file.read().rpartition(")")[2].split()[0] not in ("Z", "X")
    except OSError:
        if os.path.exists("/proc/self/stat"):
            return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
