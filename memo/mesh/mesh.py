"""The mesh of one process: its coordinates and the process groups it takes part in.

This is the one context object that carries groups; nothing else in memo keeps them as state.
"""

import contextlib
import os
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.nn.functional  # its default arguments keep the group that exists when torch loads it: none yet
from torch.distributed import ProcessGroup, Store  # type: ignore[attr-defined]

from memo.config.derived import rank_from_env, world_size_from_env
from memo.config.grid import Coordinates, RankGrid
from memo.config.parallel import ParallelConfig
from memo.config.simulated import run_world_size
from memo.errors import EXIT_REFUSED, MemoError
from memo.mesh.group import AxisGroup, Watch
from memo.mesh.roll_call import Member, call_roll, open_store
from memo.mesh.simulated import init_simulated

REFUSAL_PATIENCE = timedelta(seconds=10)
"""How long a rank whose input is refused stays to tell the others, which may still be loading torch."""


class Mesh:
    """Groups by purpose; a group of one rank is None, which every collective of memo takes as 'no-op'.

    Each communicator takes device memory under NCCL. So groups of one axis that hold the same ranks share one, as their
    messages never need to overtake each other, and what a layout does not use is not made. The links of the pipeline do
    overtake each other, and stay apart.

    Args:
        is_interleaved: the last stage sends to the first.
        ties_embedding: the first and the last stage hold one matrix.
        timeout: how long a message of any of these groups may wait for a missing rank, except those of `world`, which
            init_distributed sets; None: as long as torch has it, 10 minutes under NCCL and 30 under gloo.

    Attributes:
        world: all ranks.
        tp, cp, dp, pp: the ranks that differ along that axis alone.
        dp_cp: ranks that hold the same weights and see different tokens: gradients are summed
            and optimizer states sharded over them (ZeRO-1).
        cp_a2a, cp_ring: the two levels of context parallelism, `a2a_size` consecutive ranks and the rest.
        embedding: first and last stage, which share a tied embedding (None elsewhere, and where it is not tied).
        pp_forward, pp_backward: communicators of activations and of their gradients. They are
            apart because NCCL runs the messages of one pair in order: a send queued behind a
            receive of the other direction would deadlock.
        pp_wrap_forward, pp_wrap_backward: the same for the link from the last stage to the first in
            interleaved schedules, else None; with two stages it joins the same pair as the plain links.
        background: all ranks over gloo, for the messages of a thread beside training; None unless asked for.
        watch: who is told of every message over these groups but `world` and `background`.
        is_alone: no other rank of the world exists (--simulate-world), or there is none.
    """

    def __init__(
        self,
        grid: RankGrid,
        rank: int,
        a2a_size: int = 1,
        *,
        is_interleaved: bool = True,
        ties_embedding: bool = True,
        background: bool = False,
        is_simulated: bool = False,
        timeout: timedelta | None = None,
        watch: Watch | None = None,
    ) -> None:
        self.grid, self._timeout = grid, timeout
        self._joined: dict[str, AxisGroup | None] = {}
        self.is_alone = is_simulated or grid.world_size == 1
        self.rank = rank
        self.at: Coordinates = grid.coordinates(rank)
        self.watch = watch or Watch()
        self.world = dist.group.WORLD if grid.world_size > 1 else None
        self.tp = self._join("tp", grid.groups("tp"))
        self.cp = self._join("cp", grid.groups("cp"))
        self.dp = self._join("dp", grid.groups("dp"))
        self.pp = self._join("pp", grid.groups("pp"))
        self.dp_cp = self._join("dp", grid.groups("cp", "dp"))
        cp_sets = grid.groups("cp")
        self.cp_a2a = self._join("cp", [s[i : i + a2a_size] for s in cp_sets for i in range(0, grid.cp, a2a_size)])
        self.cp_ring = self._join("cp", [s[i::a2a_size] for s in cp_sets for i in range(a2a_size)])
        self.embedding = self._join_embedding() if ties_embedding else None
        self.pp_forward = self._start("pp", grid.groups("pp"))
        self.pp_backward = self._start("pp", grid.groups("pp"))
        self.pp_wrap_forward = self._start("pp", grid.groups("pp")) if is_interleaved else None
        self.pp_wrap_backward = self._start("pp", grid.groups("pp")) if is_interleaved else None
        self.background = None
        if background and self.world is not None:
            self.background = dist.new_group(backend="gloo", timeout=timeout)

    @property
    def tells(self) -> bool:
        """Whether this process speaks for all: it prints, and reads and keeps what ranks have in common."""
        return self.rank == 0 or self.is_alone

    @property
    def is_first_stage(self) -> bool:
        return self.at.pp == 0

    @property
    def is_last_stage(self) -> bool:
        return self.at.pp == self.grid.pp - 1

    def _join_embedding(self) -> ProcessGroup | None:
        if self.grid.pp == 1:
            return None
        joined = self._join("pp", [[ranks[0], ranks[-1]] for ranks in self.grid.groups("pp")])
        return joined if self.is_first_stage or self.is_last_stage else None

    def _join(self, axis: str, rank_sets: list[list[int]]) -> AxisGroup | None:
        """Our group of one kind; one that this axis has already is taken again."""
        key = f"{axis} {rank_sets}"
        if key not in self._joined:
            self._joined[key] = self._start(axis, rank_sets)
        return self._joined[key]

    def _start(self, axis: str, rank_sets: list[list[int]]) -> AxisGroup | None:
        """Create all groups of one kind (every rank must call this in the same order), return ours."""
        if len(rank_sets[0]) == 1:
            return None
        group, _ = dist.new_subgroups_by_enumeration(rank_sets, timeout=self._timeout)
        return None if group is None else AxisGroup(group, axis, self.watch)  # None: in no group of this kind


def local_device(device_type: str) -> torch.device:
    """This process's device: torchrun numbers the ranks of a node."""
    if device_type == "cuda":
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    return torch.device("cpu")


class World(NamedTuple):
    """The ranks that have met.

    Attributes:
        members: by rank; empty where this process runs alone, or somebody else started the process groups.
        store: of this run alone, where there are members.
    """

    rank: int
    size: int
    members: Sequence[Member] = ()
    store: Store | None = None


def init_distributed(device: torch.device, parallel: ParallelConfig) -> World:
    """Start the default process group from torchrun's environment.

    A single process without torchrun starts no group at all, but for --simulate-world one of which nobody else exists.
    Raises RankLost when a rank does not come, or comes to say that it refuses to run.
    """
    rank, world_size = rank_from_env(), world_size_from_env()
    on_cuda = device.type == "cuda"
    if on_cuda:
        torch.cuda.set_device(device)
    if parallel.simulate_world is not None:
        rank, world_size = parallel.simulate_rank, run_world_size(parallel)
        if world_size > 1 and not dist.is_initialized():
            init_simulated(rank, world_size)
    elif world_size > 1 and not dist.is_initialized():
        timeout = parallel.distributed_timeout
        store, members = call_roll(open_store(rank, timeout), rank, world_size, timeout)
        dist.init_process_group(
            "nccl" if on_cuda else "gloo",
            store=store,
            rank=rank,
            world_size=world_size,
            timeout=timeout,
            device_id=device if on_cuda else None,
        )
        return World(rank, world_size, members, store)
    return World(rank, world_size)


@contextlib.contextmanager
def refusals_are_heard(parallel: ParallelConfig | None = None) -> Iterator[None]:
    """Around what may refuse a run on this rank alone, before init_distributed: the others then do not wait for it.

    `parallel`: None while the flags themselves are read, whose refusal is a SystemExit that has been told.
    """
    try:
        yield
    except (MemoError, SystemExit) as error:
        if isinstance(error, SystemExit) and error.code != EXIT_REFUSED:
            raise
        words = str(error) if isinstance(error, MemoError) else "its flags are refused, look at its own message"
        world_size = world_size_from_env()
        is_simulated = parallel is not None and parallel.simulate_world is not None
        if world_size > 1 and not is_simulated and not dist.is_initialized():
            with contextlib.suppress(MemoError, RuntimeError):  # nobody may have come: there is nothing more to do
                rank = rank_from_env()
                call_roll(open_store(rank, REFUSAL_PATIENCE), rank, world_size, REFUSAL_PATIENCE, words)
        raise
