"""The mesh of one process: its coordinates, and the process groups that it is in.

This is the one context object that carries groups; no other part of memo keeps groups as state.
"""

import contextlib
import os
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.nn.functional  # its default arguments keep the group that exists when torch loads it: none yet
from torch.distributed import Store  # type: ignore[attr-defined]

from memo.config.derived import rank_from_env, world_size_from_env
from memo.config.grid import Coordinates, RankGrid
from memo.config.parallel import ParallelConfig
from memo.config.simulated_world import run_world_size
from memo.errors import EXIT_REFUSED, MemoError, errors_of_files_are_told
from memo.mesh.group import AxisGroup, Watch
from memo.mesh.roll_call import Member, call_roll, open_store
from memo.mesh.simulated import init_simulated
from memo.spec.process_groups import PlannedGroup, planned_groups

REFUSAL_PATIENCE = timedelta(seconds=10)
"""How long a rank that refuses its input waits to tell the other ranks, which may still be importing torch."""


class Mesh:
    """Process groups by purpose. A group of one rank is None, for which every collective of memo does nothing.

    Under NCCL each communicator takes device memory. So groups of one axis with the same ranks share a communicator,
    and groups that the layout does not use are not created (memo.spec.process_groups). The links of the pipeline do
    not share one, because their messages may overtake each other.

    Args:
        is_interleaved: whether the last stage sends to the first.
        ties_embedding: whether the first and the last stage hold the same embedding matrix.
        timeout: how long a message of these groups may wait for a missing rank; None: torch's default, 10 minutes
            under NCCL and 30 under gloo. The timeout of `world` is set by init_distributed.

    Attributes:
        world: all ranks.
        tp, cp, dp, pp: the ranks that differ along that axis alone.
        dp_cp: ranks that hold the same weights and see different tokens: gradients are summed
            and optimizer states sharded over them (ZeRO-1).
        cp_a2a, cp_ring: the two levels of context parallelism: `a2a_size` consecutive ranks, and every a2a_size-th.
        embedding: first and last stage, which share a tied embedding (None elsewhere, and if it is not tied).
        pp_forward, pp_backward: communicators of activations and of their gradients. They are
            separate because NCCL runs the messages of one pair in order: a send queued behind a
            receive of the other direction would deadlock.
        pp_wrap_forward, pp_wrap_backward: communicators for the link from the last stage to the first in
            interleaved schedules, else None; with two stages this link joins the same ranks as the plain links.
        background: all ranks over gloo, for the messages of a thread beside training; None unless asked for.
        watch: is notified of every message over these groups, except over `world` and `background`.
        is_alone: whether no other rank exists, because the world has one rank or is simulated (--simulate-world).
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
        planned = planned_groups(grid, a2a_size, is_interleaved=is_interleaved, ties_embedding=ties_embedding)
        made = {group.name: self._join(group, a2a_size) for group in planned if group.name != "world"}
        self.tp, self.cp, self.dp, self.pp = (made.get(axis) for axis in ("tp", "cp", "dp", "pp"))
        self.dp_cp, self.cp_a2a, self.cp_ring = (made.get(name) for name in ("dp_cp", "cp_a2a", "cp_ring"))
        self.embedding = made.get("embedding")
        self.pp_forward, self.pp_backward = made.get("pp_forward"), made.get("pp_backward")
        self.pp_wrap_forward, self.pp_wrap_backward = made.get("pp_wrap_forward"), made.get("pp_wrap_backward")
        self.background = None
        if background and self.world is not None:
            self.background = dist.new_group(backend="gloo", timeout=timeout)

    @property
    def is_main_rank(self) -> bool:
        """Whether this rank prints, and reads and writes files, for all ranks: it is rank 0, or the only process."""
        return self.rank == 0 or self.is_alone

    @property
    def is_first_stage(self) -> bool:
        return self.at.pp == 0

    def _join(self, group: PlannedGroup, a2a_size: int) -> AxisGroup | None:
        """This rank's group; None if it is in no group of this kind. Groups with one communicator are one object."""
        if group.communicator not in self._joined:
            self._joined[group.communicator] = self._start(group.axis, self._rank_sets(group.name, a2a_size))
        return self._joined[group.communicator]

    def _rank_sets(self, name: str, a2a_size: int) -> list[list[int]]:
        """The ranks of every group of that name; this rank is in at most one of them."""
        grid = self.grid
        if name in ("cp_a2a", "cp_ring"):
            sets, strides = grid.groups("cp"), range(0, grid.cp, a2a_size)
            if name == "cp_a2a":
                return [ranks[i : i + a2a_size] for ranks in sets for i in strides]
            return [ranks[i::a2a_size] for ranks in sets for i in range(a2a_size)]
        if name == "embedding":
            return [[ranks[0], ranks[-1]] for ranks in grid.groups("pp")]
        if name.startswith("pp"):
            return grid.groups("pp")
        return grid.groups("cp", "dp") if name == "dp_cp" else grid.groups(name)

    def _start(self, axis: str, rank_sets: list[list[int]]) -> AxisGroup | None:
        """Create a group for each of `rank_sets`, and return this rank's. All ranks call this in the same order."""
        group, _ = dist.new_subgroups_by_enumeration(rank_sets, timeout=self._timeout)
        return None if group is None else AxisGroup(group, axis, self.watch)  # None: in no group of this kind


def local_device(device_type: str) -> torch.device:
    """This process's device: on CUDA, the one with the number of the rank within its node, which torchrun sets."""
    if device_type == "cuda":
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    return torch.device("cpu")


class World(NamedTuple):
    """The ranks of a run.

    Attributes:
        members: the processes by rank; empty if this process runs alone, or if the process groups existed before.
        store: a part of the store for this run alone; None without members.
    """

    rank: int
    size: int
    members: Sequence[Member] = ()
    store: Store | None = None


def init_distributed(device: torch.device, parallel: ParallelConfig) -> World:
    """Start the default process group from torchrun's environment.

    A single process without torchrun starts no group; under --simulate-world it starts one in which no other rank
    exists. Raises RankLost when a rank does not join in time, or reports that it refuses to run.
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
    """A context for checks before init_distributed that may fail on this rank alone. It reports a failure to the other
    ranks, so that they do not wait for this rank.

    `parallel`: None while the flags themselves are parsed; then the failure is a SystemExit whose message is printed.
    """
    try:
        with errors_of_files_are_told():
            yield
    except (MemoError, SystemExit) as error:
        if isinstance(error, SystemExit) and error.code != EXIT_REFUSED:
            raise
        words = str(error) if isinstance(error, MemoError) else "its flags are refused, look at its own message"
        world_size = world_size_from_env()
        is_simulated = parallel is not None and parallel.simulate_world is not None
        if world_size > 1 and not is_simulated and not dist.is_initialized():
            with contextlib.suppress(MemoError, RuntimeError):  # the others may not have started
                rank = rank_from_env()
                call_roll(open_store(rank, REFUSAL_PATIENCE), rank, world_size, REFUSAL_PATIENCE, words)
        raise
