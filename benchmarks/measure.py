"""One way to fit activations, measured in a fresh process: times, memory on both sides, copies.

    python benchmarks/measure.py '{"way": "memo", "preset": "gpt-tiny", "seq_length": 512, "device": "cpu"}'

The last line printed is the row. Whether a way fits is found by trying it: the estimates that would refuse a user's run
beforehand are not asked. Status of a row: ok; oom, of the device or of the host; refused, with memo's message; failed;
timeout.
"""

import contextlib
import dataclasses
import functools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from rows import environment
from scales import Arguments, Shape
from ways import WAYS, HostCopies

from memo import Trainer
from memo.artifacts.run_log import StepRecord
from memo.config import ModelConfig, preset
from memo.errors import HostMemoryError, MemoError
from memo.estimate.host_memory import available_host_bytes
from memo.spec.flops import matmul_parameters, model_flops_per_token
from memo.train import trainer as trainer_module
from memo.train.oom import is_out_of_memory
from memo.train.setup import prepare
from memo.train.watching import swap_forecast
from memo.units import GIB

HOST_RESERVE_BYTES = 2 * GIB
"""A run that leaves less host memory free is ended as out of memory, before the system kills another process."""


@dataclass(frozen=True)
class Case:
    """One row to measure.

    Attributes:
        way: a name of ways.WAYS.
        shape: changed fields of the preset.
        world: value of --simulate-world; None: the whole model.
        flags: further flags of the trainer, which win over those of the way.
    """

    way: str
    preset: str
    seq_length: int
    device: str
    shape: dict[str, int] = field(default_factory=dict)
    world: str | None = None
    warmup: int = 1
    steps: int = 3
    flags: dict[str, Any] = field(default_factory=dict)

    @property
    def model(self) -> ModelConfig:
        return dataclasses.replace(preset(self.preset), **self.shape)  # type: ignore[arg-type]


def case_of(args: Arguments, way: str, shape: Shape, seq_length: int, **more: Any) -> Case:
    scale = args.scale
    flags = {**dict(scale.flags), **more.pop("flags", {})}
    found = {"device": scale.device, "warmup": scale.warmup, "steps": scale.steps, "shape": dict(shape.fields), **more}
    return Case(way, shape.preset, seq_length, flags=flags, **found)


def measured(args: Arguments, case: Case, variables: dict[str, str] | None = None) -> dict[str, Any]:
    """Return the row of a case, measured in a fresh process; `variables` are added to its environment."""
    command = [sys.executable, __file__, json.dumps(dataclasses.asdict(case))]
    row = in_fresh_process(command, min(args.scale.timeout_s, args.left_s), variables)
    return {"scale": args.scale.name, **_about(case), **row}


def in_fresh_process(
    command: Sequence[str], timeout_s: float, variables: dict[str, str] | None = None
) -> dict[str, Any]:
    """Return the JSON object that a program prints last, or a row with the reason why there is none."""
    if timeout_s <= 0:
        return {"status": "skipped", "message": "no time was left"}
    with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as errors:
        child = subprocess.Popen(command, stdout=output, stderr=errors, env={**os.environ, **(variables or {})})
        row = _wait(child, timeout_s)
        output.seek(0)
        errors.seek(0)
        printed, complaints = output.read().splitlines(), errors.read().splitlines()
    if row is None and child.returncode == 0 and printed:
        found: dict[str, Any] = json.loads(printed[-1])
        return found
    last = complaints[-1] if complaints else "it said nothing"
    return row or {"status": "failed", "message": f"status {child.returncode}: {last}"}


def _wait(child: subprocess.Popen[bytes], timeout_s: float) -> dict[str, Any] | None:
    """Wait for a process; return None if it ended by itself, else the row of the reason for which it was ended."""
    deadline_s = time.monotonic() + timeout_s
    while True:
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(timeout=0.2)
            return None
        left_bytes = available_host_bytes()
        late = time.monotonic() > deadline_s
        if late or left_bytes < HOST_RESERVE_BYTES:
            child.kill()
            child.wait()
            if late:
                return {"status": "timeout", "message": f"not done in {timeout_s:.0f} s"}
            return {"status": "oom", "message": f"host memory: {left_bytes / GIB:.1f} GiB were left"}


def _about(case: Case) -> dict[str, Any]:
    model = case.model
    return {
        "way": case.way,
        "model": case.preset,
        "shape": case.shape,
        "layers": model.num_layers,
        "seq_length": case.seq_length,
        "simulated_world": case.world,
        "collectives_executed": case.world is None,
        "flags": case.flags,
    }


# In the fresh process.


@contextlib.contextmanager
def tried() -> Iterator[None]:
    """Let no estimate refuse trainers that are built within the context."""
    with mock.patch.object(trainer_module, "prepare", functools.partial(prepare, must_fit=False)):
        yield


def take(case: Case) -> dict[str, Any]:
    """Warm up, run steps, and return the row. Out of memory and refusals become rows; other errors are raised."""
    way, copies = WAYS[case.way], HostCopies()
    flags = {"mock_data": True, "simulate_world": case.world, "profile_cache": "off", **way.flags, **case.flags}
    try:
        with (
            tried(),
            way.building(),
            Trainer(
                case.model,
                seq_length=case.seq_length,
                train_iters=case.warmup + case.steps,
                device=case.device,
                **flags,
            ) as trainer,
            way.around(trainer, copies),
        ):
            return {"status": "ok", **_steps(trainer, case, copies)}
    except HostMemoryError as error:
        return {"status": "oom", "message": str(error)}
    except MemoError as error:
        return {"status": "refused", "message": str(error)}
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        return {"status": "oom", "message": str(error).splitlines()[0]}


def _steps(trainer: Trainer, case: Case, copies: HostCopies) -> dict[str, Any]:
    for _ in range(case.warmup):
        trainer.step()
    begin = DeviceMemory.begin(case.device)
    records = [trainer.step() for _ in range(case.steps)]
    clocks = {name: value for name, value in environment().items() if name.endswith("_mhz")}
    return {
        **times(records, trainer),
        **begin.end(case.steps),
        **_memory(trainer, records[-1], copies),
        **_copies(trainer, records),
        "losses": [record.lm_loss for record in records],
        "clocks_after_steps": clocks,
    }


def times(records: Sequence[StepRecord], trainer: Trainer) -> dict[str, Any]:
    """Return the seconds of steps, and MFU by both conventions: with half of the attention's scores, and with all."""
    model, seq_length = trainer.config.model, trainer.config.data.seq_length
    causal = model_flops_per_token(model, seq_length)
    whole = 2 * causal - 6 * matmul_parameters(model)
    mfu = 100e12 * statistics.median(record.tflops_per_gpu for record in records) / trainer.peak.flops
    return {
        **percentiles([record.step_time_s for record in records]),
        "tgs": statistics.median(record.tgs for record in records),
        "peak_tflops": trainer.peak.flops / 1e12,
        "peak_of": str(trainer.peak),
        "mfu_causal_percent": mfu,
        "mfu_full_percent": mfu * whole / causal,
    }


def percentiles(steps_s: Sequence[float]) -> dict[str, Any]:
    """Return the shortest, median and longest time of a few steps, and all times."""
    return {
        "step_p0_s": min(steps_s),
        "step_p50_s": statistics.median(steps_s),
        "step_p100_s": max(steps_s),
        "steps_s": list(steps_s),
    }


@dataclass(frozen=True)
class DeviceMemory:
    """Counters of torch's allocator while steps run; empty on a CPU, which has no counters."""

    device: str
    mallocs: int = 0

    @classmethod
    def begin(cls, device: str) -> "DeviceMemory":
        if device != "cuda":
            return cls(device)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        return cls(device, torch.cuda.memory_stats().get("num_device_alloc", 0))

    def end(self, steps: int) -> dict[str, Any]:
        names = ("allocated_peak_bytes", "reserved_peak_bytes", "device_used_bytes", "device_mallocs_per_step")
        if self.device != "cuda":
            return dict.fromkeys(names)
        torch.cuda.synchronize()
        free_bytes, total_bytes = torch.cuda.mem_get_info()
        counts = torch.cuda.memory_stats()
        values = (
            torch.cuda.max_memory_allocated(),
            torch.cuda.max_memory_reserved(),
            total_bytes - free_bytes,
            (counts.get("num_device_alloc", 0) - self.mallocs) / steps,
        )
        return {**dict(zip(names, values, strict=True)), "allocation_retries": counts.get("num_alloc_retries", 0)}


def _memory(trainer: Trainer, last: StepRecord, copies: HostCopies) -> dict[str, Any]:
    """Return the bytes of the host and of the plan; the host's peak is that of the process, on a CPU with the model."""
    planned = trainer.parts.transients.planned if trainer.parts.transients is not None else None
    return {
        "host_peak_bytes": last.host_peak_bytes,
        "host_records_bytes": (last.host_records_bytes or 0) + copies.peak_bytes,
        "rounding_buffers_bytes": last.rounding_buffers_bytes,
        "states_bytes": sum((last.weights_bytes or 0, last.gradients_bytes or 0, last.optimizer_bytes or 0)),
        "planned_arena_bytes": None if planned is None else planned.plan.arena_bytes,
        "planned_peak_bytes": last.planned_peak_bytes,
        "fallbacks": last.fallbacks,
        "not_planned_because": trainer.parts.transients.reason if trainer.parts.transients is not None else None,
    }


def _copies(trainer: Trainer, records: Sequence[StepRecord]) -> dict[str, Any]:
    """Return the measured copies (medians of steps) and those that the plan expects; None if nothing moves."""
    chosen = trainer.parts.chosen_swap
    names = ("layers_s", "copies_s", "copy_wait_s", "hidden_share", "state_copies_s", "state_wait_s", "host_update_s")
    found = {name: [value for record in records if (value := getattr(record, name)) is not None] for name in names}
    return {
        "moves": trainer.parts.swap is not None,
        "forecast": None if chosen is None else dataclasses.asdict(swap_forecast(chosen)),
        "tiles": None if chosen is None or trainer.parts.swap is None else chosen.solution.tiles,
        **{name: statistics.median(values) if values else None for name, values in found.items()},
    }


def main() -> None:
    if len(sys.argv) != 2 or sys.argv[1] in ("-h", "--help"):
        print(__doc__)
        raise SystemExit(0 if "-h" in sys.argv or "--help" in sys.argv else 2)
    print(json.dumps(take(Case(**json.loads(sys.argv[1])))))


if __name__ == "__main__":
    main()
