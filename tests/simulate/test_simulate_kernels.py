"""Times of kernels and collectives against sums done by hand."""

import itertools
from dataclasses import replace

import pytest

from memo.config.grid import AXES, RankGrid
from memo.errors import ConfigError
from memo.estimate.hardware import Hardware
from memo.estimate.hardware_files import HARDWARE
from memo.simulate.kernels import Group, Kernels

PLAIN = replace(
    HARDWARE["a800-80"],
    peak_tflops={"bf16": 100.0},
    memory_gb_per_s=1000,
    node_gb_per_s=100,
    network_gb_per_s=10,
    gpus_per_node=8,
    efficiency=replace(
        HARDWARE["a800-80"].efficiency,
        matmul=0.5,
        matmul_half_size=0,
        attention_forward=0.5,
        attention_backward=0.25,
        attention_half_head=32,
        memory=0.5,
        node=1.0,
        network=1.0,
        kernel_s=1e-6,
        collective_s=1e-5,
    ),
)


def kernels(hardware: Hardware = PLAIN) -> Kernels:
    return Kernels(hardware, "bf16")


def test_products_count_their_flops_and_suffer_from_small_sizes() -> None:
    assert kernels().matmul_s(1000, 2000, 500) == pytest.approx(2 * 1e9 / 50e12 + 1e-6)
    half = replace(PLAIN, efficiency=replace(PLAIN.efficiency, matmul_half_size=500))
    # A size of 500 reaches half, 1000 two thirds, 2000 four fifths of the rate.
    slower = 2 * 1.5 * 1.25
    assert kernels(half).matmul_s(1000, 2000, 500) == pytest.approx(2 * 1e9 / 50e12 * slower + 1e-6)


def test_attention_prefers_large_heads() -> None:
    assert kernels().attention_s(1e12, 128, backward=False) == pytest.approx(0.02 + 1e-6)
    assert kernels().attention_s(1e12, 128, backward=True) == pytest.approx(0.04 + 1e-6)
    # 64 / 96 of the endless head's rate, where 128 reach 128 / 160.
    assert kernels().attention_s(1e12, 64, backward=False) == pytest.approx(0.02 * 0.8 / (2 / 3) + 1e-6)


def test_memory_bound_kernels_and_widths() -> None:
    assert kernels().memory_s(5e8, 3) == pytest.approx(1e-3 + 3e-6)
    assert (kernels().narrow, kernels().wide) == (2, 4)
    fp64 = Kernels(replace(PLAIN, peak_tflops={"fp64": 1.0}), "fp64")
    assert (fp64.narrow, fp64.wide) == (8, 8)


@pytest.mark.parametrize(
    ("group", "gb_per_s"),
    [
        (Group(8, 1), 100),  # one node
        (Group(4, 2), 100),
        (Group(16, 1), 80),  # eight members a node share its eight parts of the network
        (Group(8, 2), 40),
        (Group(4, 8), 10),  # one member a node
        (Group(2, 16), 10),
    ],
)
def test_collectives_over_the_network_share_it(group: Group, gb_per_s: float) -> None:
    expected = 1e9 * (group.size - 1) / group.size / (gb_per_s * 1e9) + 1e-5
    assert kernels().gather_s(1e9, group) == pytest.approx(expected)
    assert kernels().all_reduce_s(1e9, group) == pytest.approx(2 * expected)


@pytest.mark.parametrize("order", [AXES, ("tp", "cp", "pp", "dp")], ids=str)
def test_a_group_along_two_axes_has_as_many_members_on_a_node_as_ranks_there(order: tuple[str, ...]) -> None:
    """Counted on grids of powers of two, of which nodes of 4 and 8 ranks cut no row in the middle."""
    for tp, cp, dp, pp in itertools.product((1, 2, 4), repeat=4):
        grid = RankGrid(tp=tp, cp=cp, dp=dp, pp=pp, order=order)
        group, ranks = Group.along(grid, "cp", "dp"), grid.groups("cp", "dp")[0]
        assert group.size == len(ranks)
        for node in (4, 8):
            assert group.members_per_node(node) == sum(rank < node for rank in ranks), (grid, node)


def test_a_group_of_one_says_nothing() -> None:
    alone = Group(1, 4)
    assert kernels().gather_s(1e9, alone) == kernels().message_s(1e9, alone) == kernels().all_to_all_s(1e9, alone) == 0


def test_all_to_all_uses_both_links_at_once() -> None:
    inside = kernels().all_to_all_s(8e8, Group(8, 1))
    assert inside == pytest.approx(7e8 / 100e9 + 1e-5)
    # Sixteen ranks on two nodes: half of everything leaves the node.
    assert kernels().all_to_all_s(16e8, Group(16, 1)) == pytest.approx(8e8 / 10e9 + 1e-5)


def test_messages_between_nodes_are_slower() -> None:
    assert kernels().message_s(1e8, Group(2, 4)) == pytest.approx(1e-3 + 1e-5)
    assert kernels().message_s(1e8, Group(2, 8)) == pytest.approx(1e-2 + 1e-5)


def test_a_dtype_without_a_peak_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"--hardware a800-80 has no peak for --dtype fp64.*--dtype bf16"):
        Kernels(PLAIN, "fp64").matmul_s(1, 1, 1)
