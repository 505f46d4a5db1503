"""`memo doctor`: each check by facts that are fed to it, and the command on this machine."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from memo.cli import doctor
from memo.cli.doctor_checks import (
    Finding,
    Gpu,
    State,
    check_compiler,
    check_cpus,
    check_cuda,
    check_disk,
    check_environment,
    check_gpus,
    check_host_memory,
    check_locked_memory,
    check_numa,
    check_shared_memory,
    check_torch,
)
from memo.cli.main import main
from memo.errors import EXIT_FAILED
from memo.units import GIB, MIB

H100 = Gpu("NVIDIA H100 80GB HBM3", (9, 0), 80 * GIB, 0, 0)
V100 = Gpu("Tesla V100-SXM2-32GB", (7, 0), 32 * GIB, 0)
BUSY = Gpu(H100.name, (9, 0), 80 * GIB, 30 * GIB, 1)
KNOWN = {H100.name}
TORCHRUN = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "a", "MASTER_PORT": "1"}

OK: State = "ok"
NOTE: State = "note"
STOPS: State = "STOPS"


@pytest.mark.parametrize(
    ("finding", "state", "says"),
    [
        (check_torch("2.13.0+cu130"), OK, "2.13.0"),
        (check_torch("2.9.1"), STOPS, "older than 2.11"),
        (check_torch(None), STOPS, "pip install 'torch>=2.11'"),
        (check_torch("unknown"), STOPS, "unknown"),
        (check_cuda(None, None, None, 0, 0), NOTE, "no GPU is seen, and no NVIDIA driver"),
        (check_cuda(None, "580", 13000, 0, 8), STOPS, "8 GPUs, but torch is built for CPUs"),
        (check_cuda("13.0", "535", 12020, 0, 8), STOPS, "serves up to 12"),
        (check_cuda("13.0", "580", 13000, 0, 8), STOPS, "torch none"),
        (check_cuda("12.8", "580", 13000, 4, 8), NOTE, "4 of 8 GPUs"),
        (check_cuda("12.8", "580", 13000, 8, 8), OK, "8 of 8 GPUs"),
        (check_gpus([], KNOWN), OK, "none"),
        (check_gpus([H100] * 8, KNOWN), OK, "NVIDIA H100 80GB HBM3 x 8"),
        (check_gpus([Gpu(H100.name, None, 0, 0)], KNOWN), OK, "NVIDIA H100"),
        (check_gpus([H100, V100], KNOWN), STOPS, "compute capability 7.0 has no bf16"),
        (check_gpus([H100, BUSY], KNOWN), NOTE, "up to 30.00 GiB are taken on 1"),
        (check_gpus([H100], set()), NOTE, "memo hardware"),
        (check_compiler("/usr/bin/g++", "/usr/local/cuda/include", True), OK, "/usr/local/cuda/include"),
        (check_compiler("/usr/bin/g++", None, False), OK, "g++"),
        (check_compiler("/usr/bin/g++", None, True), NOTE, "nvidia-cuda-runtime"),
        (check_compiler(None, None, False), NOTE, "install g++"),
        (check_locked_memory(None, 512 * GIB, True), OK, "no limit"),
        (check_locked_memory(8 * MIB, 512 * GIB, False), OK, "8.00 MiB"),
        (check_locked_memory(8 * MIB, 512 * GIB, True), NOTE, "ulimit -l unlimited"),
        (check_locked_memory(256 * GIB, 512 * GIB, True), OK, "256.00 GiB"),
        (check_shared_memory(64 * MIB, 64 * MIB, 8), STOPS, "--shm-size=1g"),
        (check_shared_memory(64 * MIB, 64 * MIB, 1), OK, "64.00 MiB"),
        (check_shared_memory(None, 0, 2), STOPS, "none, for 2 GPUs"),
        (check_shared_memory(900 * MIB, 900 * MIB, 8), NOTE, "for 8 GPUs"),
        (check_shared_memory(64 * GIB, 63 * GIB, 8), OK, "63.00 GiB free of 64.00 GiB"),
        (check_cpus(64, float("inf"), 8), OK, "64"),
        (check_cpus(64, 8.0, 8), NOTE, "8 of 64, by the container's quota, for 8 GPUs"),
        (check_numa({0: {0, 1}}, {0, 1}, [H100]), OK, "1 node"),
        (check_numa({0: {0}, 1: {1}}, {0, 1}, [H100, BUSY]), OK, "2 nodes"),
        (check_numa({0: {0}, 1: {1}}, {0}, [H100, BUSY]), NOTE, "no CPU of node 1"),
        (check_numa({0: {0}, 1: {1}}, {0, 1}, [V100]), NOTE, "--numa-binding"),
        (check_host_memory(1000 * GIB, 1024 * GIB, [H100] * 8), OK, "1,000.00 GiB free"),
        (check_host_memory(500 * GIB, 1024 * GIB, [H100] * 8), NOTE, "less than the GPUs' 640.00 GiB"),
        (check_host_memory(15 * GIB, 1024 * GIB, [H100] * 8), STOPS, "--mem=0"),
        (check_host_memory(16 * GIB, 16 * GIB, []), OK, "16.00 GiB"),
        (check_host_memory(1 * GIB, 16 * GIB, []), STOPS, "end other programs"),
        (check_disk("disk", "/data", None, "Permission denied"), STOPS, "/data cannot be written (Permission denied)"),
        (check_disk("disk", "/data", 10 * GIB), NOTE, "12 bytes a parameter"),
        (check_disk("disk", "/data", 500 * GIB), OK, "500.00 GiB free in /data"),
        (check_disk("records", "/nvme", 500 * GIB, "", "ext4"), OK, "500.00 GiB free in /nvme"),
        (check_disk("records", "/dev/shm", 500 * GIB, "", "tmpfs"), NOTE, "is host memory itself (tmpfs)"),
        (check_disk("records", "/home", 500 * GIB, "", "nfs4"), NOTE, "name a folder on a local disk"),
        (check_disk("records", "/none", None, "no such directory", ""), STOPS, "no such directory"),
        (check_environment({}), OK, "none"),
        (check_environment(TORCHRUN), OK, "torchrun's variables"),
        (check_environment({"WORLD_SIZE": "8"}), STOPS, "WORLD_SIZE are set, but RANK, LOCAL_RANK"),
    ],
)
def test_each_check(finding: Finding, state: State, says: str) -> None:
    assert finding.state == state
    assert says in f"{finding.found} {finding.remedy}"
    assert bool(finding.remedy) == (state != OK), "whatever is wrong comes with what to do"


def test_this_machine(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name in TORCHRUN:
        monkeypatch.delenv(name, raising=False)
    status = main(["doctor", "--save", str(tmp_path / "not" / "yet"), "--json"])
    found = json.loads(capsys.readouterr().out)
    assert {"torch", "CUDA", "locked memory", "/dev/shm", "NUMA", "host memory"} <= {each["name"] for each in found}
    assert status == int(any(each["state"] == "STOPS" for each in found))


def test_what_stops_a_run_is_the_exit_status_and_the_last_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    stopped = [Finding("torch", OK, "2.13.0"), Finding("/dev/shm", STOPS, "none", "mount one")]
    monkeypatch.setattr(doctor, "findings", lambda *_: stopped)
    assert main(["doctor"]) == EXIT_FAILED
    lines = capsys.readouterr().out.splitlines()
    assert lines[1:] == [
        "  ok     torch     2.13.0",
        "  STOPS  /dev/shm  none",
        "      -> mount one",
        "a run is stopped by: /dev/shm",
    ]
    monkeypatch.setattr(doctor, "findings", lambda *_: stopped[:1])
    assert main(["doctor"]) == 0
    assert capsys.readouterr().out.endswith("nothing stops a run here\n")


def test_a_disk_that_cannot_hold_records_is_told(tmp_path: Path) -> None:
    names = {each.name: each for each in doctor.findings(str(tmp_path), str(tmp_path / "none"))}
    assert names["disk of records"].state == STOPS and "--offload-nvme-path" in names["disk of records"].found


def test_a_driver_that_does_not_know_a_question_is_no_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    pynvml = pytest.importorskip("pynvml")

    def unknown(*_: object) -> object:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_FUNCTION_NOT_FOUND)

    for name in ("nvmlDeviceGetMemoryInfo", "nvmlDeviceGetPciInfo", "nvmlDeviceGetCudaComputeCapability"):
        monkeypatch.setattr(pynvml, name, unknown)
    monkeypatch.setattr(pynvml, "nvmlSystemGetCudaDriverVersion", unknown)
    monkeypatch.setattr(pynvml, "nvmlInit", lambda: None)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetCount", lambda: 2)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetHandleByIndex", lambda index: index)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetName", lambda _: b"NVIDIA H100 80GB HBM3")
    monkeypatch.setattr(pynvml, "nvmlSystemGetDriverVersion", lambda: "535")
    assert doctor._gpus() == ([Gpu("NVIDIA H100 80GB HBM3", None, 0, 0)] * 2, "535", None)


def test_the_innermost_mount_holds_a_path(monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = {"/": "ext4", "/data": "nfs4", "/data/fast disk": "xfs"}
    mounts = [SimpleNamespace(mountpoint=path, fstype=kind) for path, kind in kinds.items()]
    monkeypatch.setattr("psutil.disk_partitions", lambda **_: mounts)
    found = [doctor.file_system(path) for path in ("/home", "/data/runs", "/data/fast disk/a", "/database")]
    assert found == ["ext4", "nfs4", "xfs", "ext4"]
    mounts.clear()
    assert doctor.file_system("/") == ""
