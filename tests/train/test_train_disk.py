"""Training whose activations do not fit in host memory and lie on a real disk: the same losses, and nothing left."""

import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from processes import alone
from ranks import run_ranks
from trainers import tiny_trainer

import memo
from memo.errors import DiskError, HostMemoryError
from memo.executor import disk_rate
from memo.executor.record_file import RecordFile
from memo.units import GIB, MIB

LAYERS: dict[str, Any] = {"num_layers": 12, "seq_length": 256, "offload_alpha": 1.0, "params_dtype": "fp32"}
TILES: dict[str, Any] = {
    **LAYERS,
    "num_layers": 4,
    "offload_granularity": "tile",
    "offload_tiles": 16,
    "offload_slot_tiles": 1,
}
STEPS = 3


def trainer(**overrides: Any) -> memo.Trainer:
    disk_rate._PROBE_BYTES = 1 * MIB  # the rate decides nothing here
    return tiny_trainer(**{"global_batch_size": 2, "profile_cache": "off", **overrides})


def trained(**overrides: Any) -> tuple[list[float], int, int]:
    """Losses, and bytes of activations in host memory and on disk."""
    with trainer(**overrides) as run:
        losses = [run.step().lm_loss for _ in range(STEPS)]
        swap = run.parts.swap
        assert swap is not None
        return losses, swap.host_bytes, swap.disk_bytes


@pytest.mark.parametrize("kind", ["layers", *(pytest.param(kind, marks=pytest.mark.full) for kind in ("tiles", "tp2"))])
def test_losses_are_those_of_the_run_in_memory(
    kind: str, tmp_path: Path, in_memory: tuple[list[float], int, int]
) -> None:
    world_size = 2 if kind == "tp2" else 1
    overrides = {**(TILES if kind == "tiles" else LAYERS), **({"tp": 2} if kind == "tp2" else {})}
    resident = [in_memory] if kind == "layers" else run_ranks(world_size, trained, **overrides)
    _, host_bytes, disk_bytes = resident[0]
    assert disk_bytes == 0
    limit_gib = 0.6 * host_bytes * world_size / GIB
    on_disk = run_ranks(
        world_size, trained, **overrides, offload_nvme_path=str(tmp_path), offload_host_memory_gib=limit_gib
    )
    for here, there in zip(resident, on_disk, strict=True):
        assert there[0] == here[0], "losses differ"
        assert 0 < there[1] <= limit_gib * GIB / world_size and there[2] > 0
        assert there[1] + there[2] >= host_bytes, "some records are nowhere"
    assert list(tmp_path.iterdir()) == []


@pytest.fixture(scope="module")
def in_memory() -> tuple[list[float], int, int]:
    """Of LAYERS."""
    (found,) = run_ranks(1, trained, **LAYERS)
    return found


def refused(error: type[Exception], **overrides: Any) -> str:
    with pytest.raises(error) as raised, trainer(**overrides):
        pass
    assert not dist.is_initialized() or dist.get_world_size() == 1
    return str(raised.value)


def test_a_disk_that_is_too_small_is_refused_before_the_first_step(tmp_path: Path) -> None:
    least = {**LAYERS, "offload_alpha": 0.0}
    _, host_bytes, _ = run_ranks(1, trained, **least)[0]
    limits = {"offload_host_memory_gib": 0.6 * host_bytes / GIB, "offload_nvme_gib": 0.1 * host_bytes / GIB}
    message = run_ranks(1, refused, DiskError, **least, **limits, offload_nvme_path=str(tmp_path))[0]
    assert "disk space: even at alpha = 0" in message and "raise --offload-nvme-gib" in message


@pytest.mark.parametrize(
    ("error", "flags", "folder", "told"),
    [
        (DiskError, LAYERS, "no", ["cannot hold records (No such file or directory): give a directory"]),
        (
            HostMemoryError,
            {**LAYERS, "offload_host_memory_gib": 0.1 / 1024},
            ".",
            ["do not hold the staging buffers", "--offload-granularity tile"],
        ),
        (  # hidden states never go to a disk; named is what the user has given, not what is left of it (below 0)
            HostMemoryError,
            {**TILES, "offload_host_memory_gib": 0.01 / 1024, "offload_hidden_states": True},
            ".",
            [
                "10.24 KiB of this rank do not hold the hidden states, 30.00 KiB, which never go to a disk",
                "and the staging buffers, 48.00 KiB, through which",
                "leave out --offload-hidden-states",
            ],
        ),
    ],
    ids=["no directory", "staging buffers", "hidden states"],
)
def test_what_cannot_hold_records_is_refused_with_its_figures(
    error: type[Exception], flags: dict[str, Any], folder: str, told: list[str], tmp_path: Path
) -> None:
    message = run_ranks(1, refused, error, **flags, offload_nvme_path=str(tmp_path / folder))[0]
    assert all(each in message for each in told), message


def failing(directory: str, limit_gib: float) -> str:
    """The error of a step whose disk fails."""

    def fail(self: RecordFile, index: int, buffer: object) -> None:
        self._fail(f"record {index} cannot be read (Input/output error)")

    run = trainer(**LAYERS, offload_nvme_path=directory, offload_host_memory_gib=limit_gib)
    with run:
        run.step()
        RecordFile.read = fail  # type: ignore[method-assign,assignment]
        with pytest.raises(DiskError) as raised:
            run.step()
    return str(raised.value)


def test_a_disk_that_fails_in_a_step_ends_the_run_with_one_message(
    tmp_path: Path, in_memory: tuple[list[float], int, int]
) -> None:
    message = run_ranks(1, failing, str(tmp_path), 0.6 * in_memory[1] / GIB)[0]
    assert message.startswith(f"--offload-nvme-path {tmp_path}: record 7 cannot be read (Input/output error): look at")
    assert "continue from the last checkpoint" in message


def test_a_run_that_is_killed_in_a_step_leaves_no_file(tmp_path: Path) -> None:
    records, out = tmp_path / "records", tmp_path / "out"
    records.mkdir()
    flags = (
        "--num-layers 12 --hidden-size 64 --num-attention-heads 4 --vocab-size 61 --mock-data --seq-len 256 "
        "--train-iters 100000 --device cpu --num-threads 1 --peak-tflops 1 --no-progress --max-step-minutes 1000 "
        f"--offload-alpha 1 --profile-cache off --offload-nvme-path {records} --offload-host-memory-gib 0.0035"
    )
    out.mkdir()
    with alone(out, ("module", "memo"), ["train", *flags.split()]) as run:
        run.wait_until(lambda: re.search("iteration.*2/", run.output(0)), "iteration 2")
        files = [os.readlink(link) for link in Path(f"/proc/{run.processes[0].pid}/fd").iterdir()]
        assert any(str(records) in file and "deleted" in file for file in files), "no record is on the disk"
    assert run.ended(0).status == -signal.SIGKILL
    assert list(records.iterdir()) == []
