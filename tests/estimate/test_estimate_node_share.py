"""The part of a node that a run gets which does not fill it."""

import pytest

from memo.estimate.cases import read_case
from memo.estimate.hardware_files import HARDWARE
from memo.estimate.node_share import part_of_node, share_of_node, share_text, with_lone_link
from memo.search import ask

NODE = HARDWARE["h100-80"]


@pytest.mark.parametrize(
    ("gpus", "given_gib", "share", "host_gib", "cores"),
    [
        (1, None, 1 / 8, 256, 14),
        (2, None, 1 / 4, 512, 28),
        (8, None, 1.0, 2048, 112),
        (64, None, 1.0, 2048, 112),
        (1, 1024, 1 / 2, 1024, 56),  # half of the memory comes with half of the cores
        (1, 64, 1 / 8, 64, 14),
        (1, 4096, 1.0, 4096, 112),
        (8, 512, 1.0, 512, 112),
    ],
)
def test_gpus_get_their_part_of_a_node(
    gpus: int, given_gib: float | None, share: float, host_gib: float, cores: int
) -> None:
    part = part_of_node(NODE, gpus, given_gib)
    assert share_of_node(NODE, gpus, given_gib) == share
    assert (part.host_memory_gib, part.host_cores) == (host_gib, cores)
    assert part.host_memory_gb_per_s == pytest.approx(share * NODE.host_memory_gb_per_s)
    link_gb_per_s = NODE.alone_gb_per_s if gpus == 1 else NODE.offload_gb_per_s
    assert (part.offload_gb_per_s, part.node_gb_per_s) == (link_gb_per_s, NODE.node_gb_per_s)
    assert bool(share_text(NODE, gpus, given_gib)) == (share < 1)


def test_what_is_assumed_is_said() -> None:
    said = "1 of a node's 8 GPUs, with 256 of its 2,048 GiB of host memory and 14 of 112 cores; --host-memory-gib says"
    assert said in share_text(NODE, 1)
    case = read_case({"model": "llama-3.1-8b", "hardware": "h100-80"}, "test")
    assert case.host_memory_gib == 256 and said in case.node_share
    assert read_case({"model": "llama-3.1-8b", "hardware": "h100-80", "gpus": "8"}, "test").node_share == ""


def test_a_disk_of_the_machine_is_shared_and_one_that_is_named_is_not() -> None:
    cells = {"model": "llama-3.1-8b", "hardware": "h100-80", "nvme_gib": "1000", "nvme_gb_per_s": "4"}
    named = read_case(cells, "test").hardware
    assert (named.nvme_gib, named.nvme_gb_per_s) == (1000, 4)


def test_one_gpu_alone_has_the_link_to_the_host_for_itself() -> None:
    """Estimates, plans, and plans for more GPUs of the same question."""
    cells = {"model": "llama-3.1-8b", "hardware": "h100-80"}
    case = [read_case({**cells, "gpus": gpus}, "test").hardware for gpus in ("1", "2")]
    for host_memory_gib in (None, 512):
        one = ask("llama-3.1-8b", 1, hardware="h100-80", host_memory_gib=host_memory_gib)
        asked = [one.hardware, one.with_gpus(2).hardware]
        for alone, shared in (case, asked):
            assert (alone.offload_gb_per_s, alone.prefetch_gb_per_s) == (NODE.alone_gb_per_s,) * 2
            assert (shared.offload_gb_per_s, shared.prefetch_gb_per_s) == (NODE.offload_gb_per_s,) * 2
        assert one.with_gpus(2).with_gpus(1).hardware == one.hardware
    assert NODE.alone_gb_per_s > NODE.offload_gb_per_s
    assert with_lone_link(HARDWARE["a800-80"], 1) == HARDWARE["a800-80"]
