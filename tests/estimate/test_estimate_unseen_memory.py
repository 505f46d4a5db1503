"""What torch does not see of a GPU, held to the published figures that it is made of, and to others."""

from typing import Any

import pytest

from memo.config import RunConfig, preset
from memo.estimate.hardware_files import HARDWARE
from memo.estimate.memory_account import memory_account
from memo.estimate.unseen_memory import (
    CONTEXT,
    FAST_NODE,
    NOTHING,
    Links,
    communicator_memory,
    links_of,
    page_table_bytes,
    unseen_memory,
)
from memo.spec.process_groups import groups_of, traffic_of
from memo.units import GIB, MIB


def run(**layout: Any) -> RunConfig:
    return RunConfig(model=preset("llama-3.1-8b")).override({"device": "cuda", "params_dtype": "bf16", **layout})


def test_one_gpu_has_a_context_and_no_communicator() -> None:
    assert communicator_memory(run(), 1) == NOTHING
    assert unseen_memory(run(), 1) == CONTEXT and CONTEXT.least < CONTEXT.foreseen < CONTEXT.most


def test_the_first_all_to_all_of_eight_h100_takes_what_was_measured() -> None:
    """NCCL issue 1685: 3.28 GB more on each GPU, once ranks of one communicator were connected to one another."""
    by_ring, by_a2a = (communicator_memory(run(cp=8, cp_comm_type=kind), 8) for kind in ("all_gather", "a2a"))
    assert by_a2a.foreseen - by_ring.foreseen == pytest.approx(3.28e9, rel=0.01)
    assert by_a2a.least < by_a2a.foreseen < by_a2a.most


def test_megatron_took_more_with_more_groups() -> None:
    """verl pull 6408: 7 GB of communicators at tp 2, pp 2, dp 2 on 8 H100, of which Megatron-LM makes about ten."""
    found = communicator_memory(run(tp=2, pp=2), 8)
    assert len({group.communicator for group in groups_of(run(tp=2, pp=2), 8)}) == 6
    assert 2 * GIB < found.foreseen < 7e9


@pytest.mark.parametrize(
    ("layout", "gpus", "passes"),
    [
        ({}, 8, {"world": {"collective"}, "dp": {"collective"}}),
        ({"cp": 4}, 4, {"world": {"collective"}, "cp": {"collective", "neighbour"}, "dp_cp": {"collective"}}),
        ({"cp": 4, "cp_comm_type": "a2a"}, 4, {"cp": {"collective", "all_to_all"}}),
        ({"cp": 4, "cp_comm_type": "all_gather"}, 4, {"cp": {"collective"}}),
        (
            {"cp": 4, "cp_comm_type": "a2a+p2p", "cp_a2a_size": 2},
            4,
            {"cp": {"collective"}, "cp_a2a": {"all_to_all"}, "cp_ring": {"neighbour"}},
        ),
        ({"pp": 2}, 2, {"pp": {"collective"}, "pp_forward": {"neighbour"}, "pp_backward": {"neighbour"}}),
    ],
)
def test_what_passes_over_each_communicator(layout: dict[str, Any], gpus: int, passes: dict[str, set[str]]) -> None:
    config = run(**layout)
    found: dict[str, set[str]] = {}
    for group in groups_of(config, gpus):
        found.setdefault(group.communicator, set()).add(traffic_of(group, config.parallel.cp_comm_type))
    assert passes.items() <= found.items()


def test_each_communicator_adds_and_links_and_nodes_count() -> None:
    sizes = [communicator_memory(run(**layout), 8).foreseen for layout in ({"tp": 8}, {"tp": 4}, {"tp": 2, "cp": 2})]
    assert sizes == sorted(sizes) and sizes[0] < sizes[-1]
    config = run(cp=16, cp_comm_type="a2a")
    near, far, slow = (
        communicator_memory(config, 16, links).foreseen for links in (Links(16), FAST_NODE, Links(8, False))
    )
    assert slow < far < near  # of ranks on other nodes there is one buffer for all, and PCIe has few channels
    assert far - communicator_memory(run(cp=8, cp_comm_type="a2a"), 16).foreseen < GIB
    assert links_of(HARDWARE["h100-80"]) == FAST_NODE and not links_of(HARDWARE["rtx-4090"]).are_fast


def test_page_tables_are_two_mib_for_each_gib_of_pinned_memory() -> None:
    assert page_table_bytes(GIB) == 2 * MIB and page_table_bytes(1) == 8
    pinned = unseen_memory(run(), 1, pinned_bytes=1024 * GIB)
    assert pinned.foreseen - CONTEXT.foreseen == 2 * GIB and pinned.least == CONTEXT.least


def test_the_account_has_it_with_its_host_memory() -> None:
    config = run(cp=8, cp_comm_type="a2a", seq_length=1 << 17, offload_alpha=0.5)
    memory = memory_account(config, 8, 0)
    assert memory.host > 0
    assert memory.context == unseen_memory(config, 8, FAST_NODE, memory.host).foreseen
    slow = memory_account(config, 8, 0, links=Links(8, False))
    assert slow.context < memory.context and slow.allocated == memory.allocated
