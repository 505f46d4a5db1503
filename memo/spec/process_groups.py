"""The process groups of a run, and the traffic on each: one list for the mesh, which makes the groups, and for the
account of NCCL's memory.

    group       ranks                          shares a communicator with   passes
    world       all                            -                            collectives
    tp          of the tensor-parallel axis    -                            collectives
    cp          of the context-parallel axis   -                            collectives
    cp_a2a      A consecutive ranks of cp      cp, if A is all of cp        all-to-all
    cp_ring     every A-th rank of cp          cp, if A is 1                messages in a ring, or collectives
    dp          of the data-parallel axis      -                            collectives
    dp_cp       that hold the same weights     dp, if cp is 1               collectives
    pp          of the pipeline                -                            collectives
    embedding   first and last stage           pp, if there are no others   collectives
    pp_*        of the pipeline, each alone    -                            messages to one neighbour

A group of one rank is not made. A communicator is NCCL's name for the state of a group: its buffers and connections.
"""

from functools import lru_cache
from typing import Literal, NamedTuple

from memo.config import RunConfig
from memo.config.derived import resolved_a2a_size
from memo.config.grid import RankGrid, rank_grid

Traffic = Literal["collective", "neighbour", "all_to_all"]
"""collective: all-reduce, all-gather, reduce-scatter; neighbour: messages to one rank and from one; all_to_all:
messages between every two ranks."""


class PlannedGroup(NamedTuple):
    """A process group that each rank of the run is in, or, for `embedding`, only some.

    Attributes:
        name: the attribute of memo.mesh.mesh.Mesh.
        axis: the axis of the mesh under which its messages are shown.
        communicator: groups with the same communicator have the same ranks and share it.
    """

    name: str
    axis: str
    size: int
    communicator: str


@lru_cache(maxsize=256)
def planned_groups(
    grid: RankGrid, a2a_size: int, *, is_interleaved: bool, ties_embedding: bool
) -> tuple[PlannedGroup, ...]:
    """All groups in the order in which every rank makes them, without those of one rank; `world` exists already."""
    ring_size, links = grid.cp // a2a_size, ["pp_forward", "pp_backward"]
    links += ["pp_wrap_forward", "pp_wrap_backward"] if is_interleaved else []
    found = [
        PlannedGroup("world", "world", grid.world_size, "world"),
        PlannedGroup("tp", "tp", grid.tp, "tp"),
        PlannedGroup("cp", "cp", grid.cp, "cp"),
        PlannedGroup("dp", "dp", grid.dp, "dp"),
        PlannedGroup("pp", "pp", grid.pp, "pp"),
        PlannedGroup("dp_cp", "dp", grid.dp * grid.cp, "dp" if grid.cp == 1 else "dp_cp"),
        PlannedGroup("cp_a2a", "cp", a2a_size, "cp" if ring_size == 1 else "cp_a2a"),
        PlannedGroup("cp_ring", "cp", ring_size, "cp" if a2a_size == 1 else "cp_ring"),
    ]
    if ties_embedding and grid.pp > 1:
        found.append(PlannedGroup("embedding", "pp", 2, "pp" if grid.pp == 2 else "embedding"))
    found += [PlannedGroup(link, "pp", grid.pp, link) for link in links]
    return tuple(group for group in found if group.size > 1)


def groups_of(config: RunConfig, world_size: int) -> tuple[PlannedGroup, ...]:
    """The groups of a checked run."""
    return planned_groups(
        rank_grid(config.parallel, world_size),
        resolved_a2a_size(config.model, config.parallel),
        is_interleaved=config.parallel.vpp > 1,
        ties_embedding=not config.model.untie_embeddings_and_output_weights,
    )


def traffic_of(group: PlannedGroup, cp_comm_type: str) -> Traffic:
    """What passes over a group of a run.

    `cp` itself carries only what ranks agree on, which is a collective as well.
    """
    if group.name == "cp_a2a":
        return "all_to_all"
    is_ring = group.name == "cp_ring" and cp_comm_type != "all_gather"
    return "neighbour" if is_ring or group.name.startswith("pp_") else "collective"
