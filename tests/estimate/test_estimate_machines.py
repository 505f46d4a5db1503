"""Machines by the names of GPUs that drivers report."""

from dataclasses import replace

import pytest

from memo.estimate.hardware_files import HARDWARE
from memo.estimate.machines import find_hardware, machine_of_gpu, nearest_hardware

# As nvidia-smi and rocm-smi print them, with the memory that torch reports, GiB.
REPORTED = {
    ("NVIDIA GeForce RTX 3090", 23.7): "rtx-3090",
    ("NVIDIA GeForce RTX 4090", 23.6): "rtx-4090",
    ("NVIDIA GeForce RTX 5090", 31.4): "rtx-5090",
    ("NVIDIA RTX PRO 6000 Blackwell Server Edition", 94.9): "rtx-pro-6000",
    ("NVIDIA A10", 22.0): "a10",
    ("NVIDIA A10G", 22.0): "a10g",
    ("NVIDIA A40", 44.4): "a40",
    ("NVIDIA RTX A6000", 47.5): "a6000",
    ("NVIDIA L4", 22.0): "l4",
    ("NVIDIA L40", 44.4): "l40",
    ("NVIDIA L40S", 44.4): "l40s",
    ("NVIDIA A100-SXM4-40GB", 39.4): "a100-40",
    ("A100-SXM4-40GB", 39.4): "a100-40",
    ("NVIDIA A100-SXM4-80GB", 79.2): "a100-80",
    ("NVIDIA A100-PCIE-40GB", 39.4): "a100-40-pcie",
    ("NVIDIA A100 80GB PCIe", 79.1): "a100-80-pcie",
    ("NVIDIA A800-SXM4-80GB", 79.2): "a800-80",
    ("NVIDIA H100 80GB HBM3", 79.1): "h100-80",
    ("NVIDIA H100 PCIe", 79.1): "h100-80-pcie",
    ("NVIDIA H100 NVL", 93.1): "h100-nvl",
    ("NVIDIA H20", 95.1): "h20",
    ("NVIDIA H200", 139.8): "h200",
    ("NVIDIA GH200 480GB", 94.5): "gh200",
    ("NVIDIA B200", 178.4): "b200",
    ("NVIDIA B300 SXM6 AC", 267.7): "b300",
    ("NVIDIA GB200", 184.0): "gb200",
    ("AMD Instinct MI300X", 191.7): "mi300x",
    ("AMD Instinct MI325X", 255.7): "mi325x",
    ("AMD Instinct MI355X", 287.7): "mi355x",
}
UNKNOWN = {
    ("Tesla T4", 14.6): "a10",
    ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", 4.8): "a10",
    ("NVIDIA L40 24Q", 24.1): "rtx-3090",
}


@pytest.mark.parametrize(("reported", "name"), REPORTED.items())
def test_a_gpu_is_found_by_its_whole_name(reported: tuple[str, float], name: str) -> None:
    driver_name, memory_gib = reported
    found = machine_of_gpu(driver_name, memory_gib)
    assert found is not None and found.name == name
    assert nearest_hardware(driver_name, memory_gib) is found
    assert find_hardware(driver_name) is found
    assert abs(found.memory_gib - memory_gib) < 0.04 * found.memory_gib
    assert -0.35 < memory_gib - found.visible_gib < 1.0


@pytest.mark.parametrize(("reported", "nearest"), UNKNOWN.items())
def test_another_gpu_has_no_machine_but_a_nearest_one(reported: tuple[str, float], nearest: str) -> None:
    assert machine_of_gpu(*reported) is None
    assert nearest_hardware(*reported).name == nearest


@pytest.mark.parametrize(
    ("name", "mib"),
    [("h100-80", 81559), ("h200", 143771), ("b200", 183359), ("a100-40", 40960), ("a100-80", 81920), ("l4", 23034)],
)
def test_memory_is_what_nvidia_smi_reports(name: str, mib: int) -> None:
    assert HARDWARE[name].memory_gib == mib / 1024


def test_a_name_and_the_nominal_memory_find_a_machine() -> None:
    assert [find_hardware("h100", gib).name for gib in (80, 94)] == ["h100-80", "h100-94"]
    assert [find_hardware("a100", gib).name for gib in (40, 80)] == ["a100-40", "a100-80"]


def test_every_machine_has_a_gpu_of_its_own() -> None:
    gpus = [machine.driver_name for machine in HARDWARE.values()]
    assert len(set(gpus)) == len(gpus)
    assert {name for _, name in REPORTED.items()} == HARDWARE.keys() - {"cpu", "h100-94"}


@pytest.mark.parametrize(("name", "chip"), [("b300", "b200"), ("gb200", "b200"), ("gh200", "h200"), ("h20", "h100-80")])
def test_boards_take_the_shares_of_their_own_chip(name: str, chip: str) -> None:
    """They are said to be assumed, and so they have the error of a machine without published runs."""
    shares = HARDWARE[name].efficiency
    assert shares == replace(HARDWARE[chip].efficiency, source=shares.source)
    assert shares.source.startswith("assumed: those of ")
