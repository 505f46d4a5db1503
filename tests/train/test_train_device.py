"""Where a rank runs: near its GPU by a made-up sysfs, with its share of the CPUs, and its host memory with it."""

import os
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import spared_measurements
import torch
from ranks import run_ranks

from memo import Trainer
from memo.config import HardwareConfig, RunConfig
from memo.config.model_name import choose_model
from memo.estimate.gpu_peaks import bf16_peak_tflops
from memo.estimate.hardware_files import HARDWARE
from memo.executor.host_pool import HostPool
from memo.spec.flops import microbatch_flops
from memo.train import device as device_module
from memo.train.device import PeakFlops, device_peak, pci_address, place_on_host
from memo.train.numa import bind_near, cpus_by_node, numa_node

GPU0, GPU1, UNKNOWN = "0000:3b:00.0", "0000:dc:00.0", "0001:00:00.0"
CUDA, CPU = torch.device("cuda", 0), torch.device("cpu")
LARGE = 1e15
"""FLOPs of a microbatch that deserves all threads."""
needs_two_cpus = pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="binding one of two CPUs takes two")


def make_sysfs(folder: Path, *cpulists: str) -> Path:
    """Nodes with these CPUs; GPU i on node i; UNKNOWN says -1, as virtual machines do."""
    for node, cpus in enumerate(cpulists):
        home = folder / "devices/system/node" / f"node{node}"
        home.mkdir(parents=True)
        (home / "cpulist").write_text(f"{cpus}\n")
    for address, gpu_node in ((GPU0, 0), (GPU1, 1), (UNKNOWN, -1)):
        home = folder / "bus/pci/devices" / address
        home.mkdir(parents=True)
        (home / "numa_node").write_text(f"{gpu_node}\n")
    return folder


def test_reading_sysfs(tmp_path: Path) -> None:
    sysfs = make_sysfs(tmp_path, "0-3,8-11", "4-7,12-15", "")  # the third has memory alone
    assert cpus_by_node(sysfs) == {0: {0, 1, 2, 3, 8, 9, 10, 11}, 1: {4, 5, 6, 7, 12, 13, 14, 15}}
    addresses = (GPU0, GPU1, UNKNOWN, "0000:ff:00.0")
    assert [numa_node(address, sysfs) for address in addresses] == [0, 1, None, None]
    assert cpus_by_node(tmp_path / "nowhere") == {}


def _bind(sysfs: Path, address: str, before: set[int] | None) -> tuple[str, set[int], list[set[int]]]:
    """The binding; CPUs of this thread after it; those of one thread that ran before and one started after."""
    if before is not None:
        os.sched_setaffinity(0, before)
    found: dict[str, set[int]] = {}
    started, bound = threading.Event(), threading.Event()

    def older() -> None:
        started.set()
        bound.wait()
        found["older"] = os.sched_getaffinity(0)

    def newer() -> None:
        found["newer"] = os.sched_getaffinity(0)

    old, new = threading.Thread(target=older), threading.Thread(target=newer)
    old.start()
    started.wait()
    binding = bind_near(address, sysfs)
    bound.set()
    new.start()
    old.join()
    new.join()
    return binding, os.sched_getaffinity(0), [found["older"], found["newer"]]


@needs_two_cpus
@pytest.mark.parametrize(
    ("address", "before", "after", "binding"),
    [
        (GPU1, {0, 1}, {1}, "bound to NUMA node 1 of its GPU"),
        (GPU0, {0}, {0}, "on NUMA node 0, as started"),
        (GPU1, {0}, {0}, "NUMA node 1 of the GPU has no CPU that this process may use"),
        (UNKNOWN, {0, 1}, {0, 1}, "NUMA node of the GPU unknown"),
    ],
)
def test_every_thread_moves_to_the_node_of_the_gpu_or_none_does(
    tmp_path: Path, address: str, before: set[int], after: set[int], binding: str
) -> None:
    """`before` and `after`: places among the CPUs of this process; the first is on node 0, the second on node 1."""
    cpus = sorted(os.sched_getaffinity(0))
    sysfs = make_sysfs(tmp_path, f"{cpus[0]},1000-1003", f"{cpus[1]},1004-1007")  # CPUs not allowed are not asked for
    ((found, own, threads),) = run_ranks(1, _bind, sysfs, address, {cpus[place] for place in before})
    assert found == binding and own == {cpus[place] for place in after} and threads == [own, own]


@pytest.mark.parametrize("cpulists", [(), ("0-1023",), ("0-1023", "")])
def test_one_node_or_none_readable(tmp_path: Path, cpulists: tuple[str, ...]) -> None:
    before = os.sched_getaffinity(0)
    assert bind_near(GPU0, make_sysfs(tmp_path, *cpulists)) == "one NUMA node"
    assert os.sched_getaffinity(0) == before


def _with_fake_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = SimpleNamespace(pci_domain_id=0, pci_bus_id=0xDC, pci_device_id=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: gpu)


def test_address_on_the_bus_as_sysfs_writes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    _with_fake_gpu(monkeypatch)
    assert pci_address(CUDA) == GPU1


def _placed(sysfs: str, flags: dict[str, Any], device: torch.device, local_ranks: str) -> tuple[str, int, set[int]]:
    os.environ["LOCAL_WORLD_SIZE"] = local_ranks
    with pytest.MonkeyPatch.context() as patch:
        _with_fake_gpu(patch)
        patch.setattr(device_module, "bind_near", lambda address: bind_near(address, Path(sysfs)))
        patch.setattr(device_module, "cpu_quota", lambda: float("inf"))
        said = place_on_host(HardwareConfig(**flags), device, LARGE)
    return said, torch.get_num_threads(), os.sched_getaffinity(0)


@needs_two_cpus
def test_a_rank_is_placed_and_says_so(tmp_path: Path) -> None:
    before = os.sched_getaffinity(0)
    first, second = sorted(before)[:2]
    sysfs = str(make_sysfs(tmp_path, str(first), str(second)))
    (near,) = run_ranks(1, _placed, sysfs, {}, CUDA, "1")
    assert near == ("1 CPU thread a rank, bound to NUMA node 1 of its GPU", 1, {second})
    (off,) = run_ranks(1, _placed, sysfs, {"numa_binding": "off"}, CUDA, "1")
    assert off == (f"{len(before)} CPU threads a rank", len(before), before)
    (cpu,) = run_ranks(1, _placed, sysfs, {"num_threads": 3}, CPU, "1")
    assert cpu == ("3 CPU threads a rank", 3, before)
    (shared,) = run_ranks(1, _placed, sysfs, {}, CPU, str(len(before)))
    assert shared == ("1 CPU thread a rank", 1, before)


@pytest.mark.parametrize(
    ("preset", "tokens", "threads"), [("llama-tiny", 1024, 1), ("llama-tiny", 32768, 6), ("llama-3.1-8b", 1024, 6)]
)
def test_tiny_models_get_one_thread_on_cpus(
    preset: str, tokens: int, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_module, "threads_of_a_rank", lambda *_: 6)
    monkeypatch.setattr(torch, "set_num_threads", lambda threads: None)
    run = choose_model(RunConfig(), preset).override({"seq_length": tokens, "vocab_size": 257})
    plural = "s" * (threads > 1)
    said = place_on_host(run.hardware, CPU, microbatch_flops(run))
    assert said == f"{threads} CPU thread{plural} a rank"
    assert place_on_host(HardwareConfig(num_threads=2), CPU, microbatch_flops(run)) == "2 CPU threads a rank"
    monkeypatch.setattr(device_module, "bind_near", lambda address: "unbound")
    _with_fake_gpu(monkeypatch)
    assert place_on_host(run.hardware, CUDA, microbatch_flops(run)) == "6 CPU threads a rank, unbound"


def test_quotas_count(monkeypatch: pytest.MonkeyPatch) -> None:
    threads = torch.get_num_threads()
    monkeypatch.setattr(device_module, "cpu_quota", lambda: 1.9)
    try:
        assert place_on_host(HardwareConfig(), CPU, LARGE) == "1 CPU thread a rank"
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(threads)


def test_a_rank_is_placed_before_its_host_memory_is_touched(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """First touch decides where memory lies, and the arena touches its pages in the thread that makes it."""
    events: list[str] = []
    touch = HostPool._map

    def placed(config: HardwareConfig, device: torch.device, microbatch_flops: float) -> str:
        events.append("placed")
        return place_on_host(config, device, microbatch_flops)

    def touched(pool: HostPool, is_pinned: bool) -> torch.Tensor:
        assert threading.current_thread() is threading.main_thread()
        events.append("touched")
        return touch(pool, is_pinned)

    monkeypatch.setattr("memo.train.setup.place_on_host", placed)
    monkeypatch.setattr(HostPool, "_map", touched)
    shape = {"num_layers": 3, "hidden_size": 32, "num_attention_heads": 4, "vocab_size": 61, "seq_length": 64}
    flags: dict[str, Any] = {**shape, "mock_data": True, "device": "cpu", "num_threads": 1, "peak_tflops": 1.0}
    with Trainer(**flags, plan=0.5, profile_cache="off", progress=False) as trainer:
        trainer.print_header()
    assert events == ["placed", "touched", "touched"]  # by the measurement of the link, then by the arena
    assert "\nhost: 1 CPU thread a rank\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "tflops"),
    [
        ("NVIDIA L4", 121.0),
        ("NVIDIA L40", 181.05),
        ("NVIDIA L40S", 362.05),
        ("NVIDIA A10", 125.0),
        ("NVIDIA A10G", 70.0),
        ("NVIDIA H100 80GB HBM3", 989.4),
        ("NVIDIA H100 NVL", 835.5),
        ("NVIDIA H100 PCIe", 756.0),
        ("NVIDIA H20", 148.0),
        ("NVIDIA H200", 989.4),
        ("A100-SXM4-80GB", 312.0),  # as drivers before 470 tell it
    ],
)
def test_peaks_are_found_by_whole_names(monkeypatch: pytest.MonkeyPatch, name: str, tflops: float) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: name)
    peak = device_peak(HardwareConfig(), CUDA, torch.bfloat16)
    assert peak == PeakFlops(tflops * 1e12, f"{name}, bf16 dense")


def test_the_peak_of_a_cpu_is_measured_with_a_matrix_product() -> None:
    """Other tests take a known one. A thread of a CPU computes 1e9 to 1e13 FLOPs a second."""
    assert 1e9 < spared_measurements.measured_flops(CPU, torch.float32) < 1e13


UNKNOWN_PEAK = "measured matrix product, bfloat16; memo knows no peak of"


@pytest.mark.parametrize(
    ("name", "dtype", "source"),
    [
        ("NVIDIA RTX A4000", torch.bfloat16, UNKNOWN_PEAK),
        (
            "NVIDIA A100-SXM4-40GB MIG 1g.5gb",
            torch.bfloat16,
            UNKNOWN_PEAK,
        ),
        ("Tesla V100-SXM2-16GB", torch.bfloat16, UNKNOWN_PEAK),
        ("NVIDIA L40", torch.float32, "measured matrix product, float32; memo knows the peak in bf16 alone of"),
    ],
)
def test_a_peak_that_is_not_known_is_measured_and_says_what_helps(
    monkeypatch: pytest.MonkeyPatch, name: str, dtype: torch.dtype, source: str
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: name)
    monkeypatch.setattr(device_module, "_measured_flops", lambda device, dtype: 5e12)
    peak = device_peak(HardwareConfig(), CUDA, dtype)
    assert peak == PeakFlops(5e12, f"{source} {name}: give its data sheet's with --peak-tflops")
    assert device_peak(HardwareConfig(peak_tflops=80.0), CUDA, dtype) == PeakFlops(80e12, "--peak-tflops")


def test_machines_and_trainer_take_peaks_from_one_table() -> None:
    for machine in HARDWARE.values():
        if machine.device == "cuda":
            assert machine.peak_tflops["bf16"] == bf16_peak_tflops(machine.driver_name)
