"""`memo doctor`: each check by facts that are fed to it, and the command on this machine."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from memo.cli import doctor
from memo.cli import doctor_checks as checks
from memo.cli.doctor_checks import Finding, Gpu
from memo.cli.main import main
from memo.errors import EXIT_FAILED, AllocatorError, DiskError
from memo.units import GIB, MIB

H100 = Gpu("NVIDIA H100 80GB HBM3", 9.0, 80 * GIB, 0, "580")
V100 = Gpu("Tesla V100-SXM2-32GB", 7.0, 32 * GIB, 0, "580")
BUSY = Gpu(H100.name, 9.0, 80 * GIB, 30 * GIB, "580")
EIGHT = (H100,) * 8
OK, NOTE, STOPS = "ok", "note", "STOPS"


def torch(version: str = "2.13.0+cu130", usable: int = 0) -> Any:
    def init() -> None:
        if not usable:
            raise RuntimeError("The NVIDIA driver on your system is too old\nand more")

    cuda = SimpleNamespace(init=init, device_count=lambda: usable)
    return SimpleNamespace(__version__=version, __file__="/t/x.py", version=SimpleNamespace(cuda="13.0"), cuda=cuda)


@pytest.mark.parametrize(
    ("finding", "state", "says"),
    [
        (checks.check_torch(torch()), OK, "2.13.0"),
        (checks.check_torch(torch("2.9.1")), STOPS, "older than 2.11"),
        (checks.check_torch(None), STOPS, "pip install 'torch>=2.11'"),
        (checks.check_torch(torch("unknown")), STOPS, "unknown"),
        (checks.check_cuda(None, ()), NOTE, "no GPU is seen, or no NVIDIA driver"),
        (checks.check_cuda(None, EIGHT), STOPS, "8 GPUs, and no torch"),
        (checks.check_cuda(torch(), EIGHT), STOPS, "torch none: The NVIDIA driver on your system is too old install"),
        (checks.check_cuda(torch(usable=4), EIGHT), NOTE, "13.0, driver 580, 4 of 8 GPUs"),
        (checks.check_cuda(torch(usable=8), EIGHT), OK, "8 of 8 GPUs"),
        (checks.check_gpus([]), OK, "none"),
        (checks.check_gpus(EIGHT), OK, "NVIDIA H100 80GB HBM3 x 8"),
        (checks.check_gpus([Gpu(H100.name, 0.0, 0, 0, "")]), OK, "NVIDIA H100"),
        (checks.check_gpus([H100, V100]), STOPS, "compute capability 7.0 has no bf16"),
        (checks.check_gpus([H100, BUSY]), NOTE, "up to 30.00 GiB are taken on 1"),
    ],
)
def test_torch_and_its_gpus(finding: Finding, state: str, says: str) -> None:
    check(finding, state, says)


def check(finding: Finding, state: str, says: str) -> None:
    assert finding.state == state
    assert says in f"{finding.found} {finding.remedy}"
    assert bool(finding.remedy) == (state != OK), "whatever is wrong comes with what to do"


SHM = "shutil.disk_usage"
LOCKED = "resource.getrlimit"
HOST = "available_host_bytes"


@pytest.mark.parametrize(
    ("name", "answers", "gpus", "state", "says"),
    [
        ("locked_memory", {LOCKED: (-1, -1)}, EIGHT, OK, "no limit"),
        ("locked_memory", {LOCKED: (8 * MIB, -1)}, (), OK, "8.00 MiB"),
        ("locked_memory", {LOCKED: (8 * MIB, -1)}, EIGHT, NOTE, "ulimit -l unlimited"),
        ("locked_memory", {LOCKED: (512 * GIB, -1)}, EIGHT, OK, "512.00 GiB"),
        ("shared_memory", {SHM: SimpleNamespace(total=64 * MIB, free=64 * MIB)}, EIGHT, STOPS, "--shm-size=1g"),
        ("shared_memory", {SHM: SimpleNamespace(total=64 * MIB, free=64 * MIB)}, (H100,), OK, "64.00 MiB"),
        ("shared_memory", {SHM: OSError()}, (H100, H100), STOPS, "none, for 2 GPUs"),
        ("shared_memory", {SHM: SimpleNamespace(total=900 * MIB, free=900 * MIB)}, EIGHT, NOTE, "for 8 GPUs"),
        (
            "shared_memory",
            {SHM: SimpleNamespace(total=64 * GIB, free=63 * GIB)},
            EIGHT,
            OK,
            "63.00 GiB free of 64.00 GiB",
        ),
        ("cpus", {}, EIGHT, OK, "64"),
        ("cpus", {"cpu_quota": 8.0}, EIGHT, NOTE, "8 of 64, by the container's quota, for 8 GPUs"),
        ("host_memory", {HOST: 1000 * GIB}, EIGHT, OK, "1,000.00 GiB free"),
        ("host_memory", {HOST: 500 * GIB}, EIGHT, NOTE, "less than the GPUs' 640.00 GiB"),
        ("host_memory", {HOST: 15 * GIB}, EIGHT, STOPS, "--mem=0"),
        ("host_memory", {HOST: 16 * GIB}, (), OK, "16.00 GiB"),
        ("host_memory", {HOST: 1 * GIB}, (), STOPS, "end other programs"),
    ],
)
def test_limits_of_the_machine(
    name: str, answers: dict[str, Any], gpus: tuple[Gpu, ...], state: str, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine with 64 CPUs and 1 TiB, whose other answers each row has."""
    usual = {"allowed_cpus": frozenset(range(64)), "cpu_quota": float("inf"), "total_host_bytes": 1024 * GIB}
    for asked, answer in {**usual, **answers}.items():
        found = raising(answer) if isinstance(answer, OSError) else partial(lambda answer, *_: answer, answer)
        monkeypatch.setattr(f"{checks.__name__}.{asked}", found)
    check(getattr(checks, f"check_{name}")(gpus), state, says)


@pytest.mark.parametrize(
    ("free_bytes", "kind", "state", "says"),
    [
        (500 * GIB, "ext4", OK, "500.00 GiB free in"),
        (500 * GIB, "tmpfs", NOTE, "in host memory or on the network (tmpfs)"),
        (500 * GIB, "nfs4", NOTE, "name a folder on a local disk"),
        (DiskError("no such directory"), "ext4", STOPS, "cannot be written (no such directory)"),
    ],
)
def test_the_disk_of_records(
    free_bytes: Any, kind: str, state: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The innermost mount holds the path."""

    def free(_: str) -> int:
        if isinstance(free_bytes, DiskError):
            raise free_bytes
        return int(free_bytes)

    kinds = {"/": "xfs", str(tmp_path.parent): kind, f"{tmp_path}0": "btrfs"}
    mounts = [SimpleNamespace(mountpoint=path, fstype=each) for path, each in kinds.items()]
    monkeypatch.setattr("psutil.disk_partitions", lambda **_: mounts)
    monkeypatch.setattr("memo.executor.disk_budget.disk_free_bytes", free)
    check(checks.check_disk_of_records(str(tmp_path)), state, says)


def test_the_disk_of_checkpoints_and_the_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=10 * GIB))
    check(checks.check_disk(str(tmp_path / "not" / "yet")), NOTE, "12 bytes a parameter")
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=500 * GIB))
    check(checks.check_disk(str(tmp_path)), OK, f"500.00 GiB free in {tmp_path}")
    monkeypatch.setattr("tempfile.TemporaryFile", raising(PermissionError(13, "Permission denied")))
    check(checks.check_disk(str(tmp_path)), STOPS, f"{tmp_path} cannot be written (Permission denied)")
    monkeypatch.setattr(checks, "find_compiler", lambda *_: "/usr/bin/g++")
    monkeypatch.setattr(checks, "cuda_include", lambda *_: "/usr/local/cuda/include")
    check(checks.check_compiler(torch(), EIGHT), OK, "/usr/bin/g++, CUDA's headers in /usr/local/cuda/include")
    monkeypatch.setattr(checks, "cuda_include", raising(AllocatorError()))
    check(checks.check_compiler(torch(), ()), OK, "g++")
    check(checks.check_compiler(torch(), EIGHT), NOTE, "nvidia-cuda-runtime")
    monkeypatch.setattr(checks, "find_compiler", raising(AllocatorError()))
    check(checks.check_compiler(None, ()), NOTE, "install g++")


def raising(error: Exception) -> Callable[..., None]:
    def call(*_: object, **__: object) -> None:
        raise error

    return call


def test_this_machine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status = main(["doctor", "--save", str(tmp_path / "not" / "yet"), "--json"])
    found = json.loads(capsys.readouterr().out)
    assert {"torch", "CUDA", "locked memory", "/dev/shm", "host memory"} <= {each["name"] for each in found}
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
    found = checks.check_disk_of_records(str(tmp_path / "none"))
    assert found.state == STOPS and "--offload-nvme-path" in found.found


def test_a_driver_that_does_not_know_a_question_is_no_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    pynvml = pytest.importorskip("pynvml")

    def unknown(*_: object) -> object:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_FUNCTION_NOT_FOUND)

    monkeypatch.setattr(pynvml, "nvmlInit", unknown)
    assert checks.ask_driver() == []
    for name in ("nvmlDeviceGetMemoryInfo", "nvmlDeviceGetCudaComputeCapability"):
        monkeypatch.setattr(pynvml, name, unknown)
    answers = {"nvmlInit": None, "nvmlDeviceGetCount": 2, "nvmlDeviceGetHandleByIndex": 0}
    answers |= {"nvmlDeviceGetName": b"NVIDIA H100 80GB HBM3", "nvmlSystemGetDriverVersion": "535"}
    for name, answer in answers.items():
        monkeypatch.setattr(pynvml, name, lambda *_, answer=answer: answer)
    assert checks.ask_driver() == [Gpu("NVIDIA H100 80GB HBM3", 0.0, 0, 0, "535")] * 2
