"""Process groups on eight ranks: who is in each, and that messages stay inside."""

from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks

from memo.config import RunConfig, preset
from memo.mesh import Mesh, RankGrid
from memo.mesh.group import torch_group
from memo.parallel.collectives import all_reduce, exchange, receive, send
from memo.spec.process_groups import groups_of
from memo.train.build import build_mesh

GROUPS = ("tp", "cp", "dp", "pp", "dp_cp", "cp_a2a", "cp_ring", "pp_forward", "pp_backward")
LINKS = ("pp_forward", "pp_backward", "pp_wrap_forward", "pp_wrap_backward")
ALL = (*GROUPS, "embedding", "pp_wrap_forward", "pp_wrap_backward", "background")
GRIDS = [RankGrid(tp=2, cp=1, dp=2, pp=2), RankGrid(tp=1, cp=4, dp=1, pp=2), RankGrid(tp=2, cp=2, dp=2, pp=1)]

Members = dict[str, list[int] | None]
Views = list[tuple[Members, dict[str, int], bool]]
"""What one rank sees of each grid: members and sum of ranks of each group, is it on the first stage."""


def _members(a2a_size: int) -> Views:
    found: Views = []
    for grid in GRIDS:
        mesh = Mesh(grid, dist.get_rank(), a2a_size=a2a_size if grid.cp > 1 else 1)
        members: Members = {}
        sums: dict[str, int] = {}
        for name in (*GROUPS, "embedding", "pp_wrap_forward", "pp_wrap_backward"):
            group = getattr(mesh, name)
            members[name] = None if group is None else dist.get_process_group_ranks(torch_group(group))
            sums[name] = int(all_reduce(torch.tensor(mesh.rank), group))
        apart = {mesh.pp_forward, mesh.pp_backward, mesh.pp_wrap_forward, mesh.pp_wrap_backward}
        assert mesh.pp is None or len(apart) == 4, "links share a communicator"
        found.append((members, sums, mesh.is_first_stage))
    return found


@pytest.fixture(scope="module")
def results() -> list[Views]:
    return run_ranks(8, _members, 2)


def test_groups_hold_the_ranks_of_the_grid_and_stay_apart(results: list[Views]) -> None:
    for index, grid in enumerate(GRIDS):
        for rank, result in enumerate(results):
            members, sums, first = result[index]
            axes = {name: (name,) for name in ("tp", "cp", "dp", "pp")}
            axes |= {name: ("pp",) for name in members if name.startswith("pp")} | {"dp_cp": ("cp", "dp")}
            for name, along in axes.items():
                ours = next(group for group in grid.groups(*along) if rank in group)
                assert members[name] == (ours if len(ours) > 1 else None), (grid, rank, name)
                assert sums[name] == sum(ours)
            at = grid.coordinates(rank)
            assert first == (at.pp == 0)


def test_context_parallel_levels_and_tied_embedding(results: list[Views]) -> None:
    ring = [result[1][0] for result in results]  # cp 4, pp 2, all-to-all of 2
    assert [members["cp_a2a"] for members in ring] == [[r // 2 * 2, r // 2 * 2 + 1] for r in range(8)]
    assert [members["cp_ring"] for members in ring[:4]] == [[0, 2], [1, 3], [0, 2], [1, 3]]
    assert [members["embedding"] for members in ring] == [[r % 4, r % 4 + 4] for r in range(8)]
    assert results[0][2][0]["embedding"] is None  # one stage has nothing to tie


def _timeouts_s(overrides: dict[str, Any]) -> dict[str, float]:
    """Of each group that this rank is in, as its backend has it: what NCCL's is given comes by the same call."""
    config = RunConfig().override({**overrides, "save": "nowhere", "async_save": True})
    mesh = build_mesh(config, dist.get_rank(), dist.get_world_size())
    groups = {name: getattr(mesh, name) for name in ALL}
    return {
        name: torch_group(group)._get_backend(torch.device("cpu")).options._timeout / timedelta(seconds=1)
        for name, group in groups.items()
        if group is not None
    }


def test_every_group_waits_as_long_as_the_flag_says() -> None:
    for axes in ({"tp": 2, "cp": 2}, {"pp": 2, "cp": 2}):
        for found in run_ranks(4, _timeouts_s, {**axes, "distributed_timeout_minutes": 1.5}):
            assert {"cp", "background"} < found.keys()
            assert found == dict.fromkeys(found, 90.0)


def _communicators() -> tuple[int, int]:
    """(groups, communicators among them) of tp 1, cp 2, dp 1, pp 2."""
    mesh = Mesh(RankGrid(cp=2, pp=2), dist.get_rank())
    groups = [torch_group(group) for group in (getattr(mesh, name) for name in ALL) if group is not None]
    assert mesh.cp is mesh.cp_ring, "two rings of the same ranks"
    assert mesh.dp_cp is not mesh.cp, "gradients on their way would hold up the ring"
    assert len({mesh.pp, *(getattr(mesh, name) for name in LINKS)}) == 5, "links share a communicator"
    return len(groups), len(set(groups))


def test_groups_of_one_axis_and_the_same_ranks_share_a_communicator() -> None:
    assert run_ranks(4, _communicators) == [(9, 7)] * 4


def _made(layouts: list[dict[str, Any]]) -> list[int]:
    """Communicators beside that of all ranks which building each mesh makes, on all ranks together."""
    found, real = [], dist.new_subgroups_by_enumeration
    for layout in layouts:
        made: list[Any] = []

        def counting(ranks: list[list[int]], made: list[Any] = made, **options: Any) -> Any:
            made.append(ranks)
            return real(ranks, **options)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(dist, "new_subgroups_by_enumeration", counting)
            build_mesh(RunConfig(model=preset("llama-tiny")).override(layout), dist.get_rank(), dist.get_world_size())
        found.append(len(made))
    return found


def test_a_layout_makes_the_communicators_that_it_uses() -> None:
    """tp, cp and dp one each, gradients another where there is cp; a pipeline three, with wrapped links two more.

    A tied embedding takes one of its own where the ends are not the whole pipeline.
    """
    tied = {"untie_embeddings_and_output_weights": False}
    numbers = {
        1: {"tp": 4},
        2: {"cp": 4},  # the ring, and gradients, which must not hold it up
        3: {"pp": 4},
        4: {"pp": 4, **tied},
        5: {"pp": 4, "vpp": 2},
    }
    layouts = [*numbers.values(), {"pp": 2, **tied}, {"tp": 2, "cp": 2}, {}]
    made = [*numbers, 4, 3, 1]
    assert run_ranks(4, _made, layouts) == [made] * 4
    assert [_planned(layout) for layout in layouts] == made


def _planned(layout: dict[str, Any]) -> int:
    """Communicators for which the account of memory counts what NCCL takes, beside that of all ranks."""
    config = RunConfig(model=preset("llama-tiny")).override(layout)
    return len({group.communicator for group in groups_of(config, 4)} - {"world"})


def _settled() -> list[list[str]]:
    """What is told of a message to the other rank and one from there, then of both at once: before and after waits."""
    mesh, at = Mesh(RankGrid(pp=2), dist.get_rank()), dist.get_rank()
    out, into, told = torch.full((3,), float(at)), torch.empty(3), []
    names = {out.data_ptr(): "sent", into.data_ptr(): "received"}
    seen = []

    def settle(tensor: torch.Tensor) -> None:
        told.append(names[tensor.data_ptr()])

    for listener in (None, settle):
        mesh.watch.settle = listener
        forward, backward = mesh.pp_forward, mesh.pp_backward
        assert forward is not None and backward is not None
        links = (forward, backward) if at == 0 else (backward, forward)
        works = [send(out, links[0], 1 - at), receive(into, links[1], 1 - at)]
        works += exchange([(out, 1 - at)], [(into, 1 - at)], forward)
        assert not told
        for work in works:
            work.wait()
            seen.append(told[:])
            told.clear()
        assert into.tolist() == [1.0 - at] * 3
    return seen


def test_who_settles_is_told_of_the_tensors_of_each_message_that_was_waited_for() -> None:
    each = [["sent"], ["received"], ["sent"], ["received"]]
    assert run_ranks(2, _settled) == [[[]] * 4 + each] * 2
