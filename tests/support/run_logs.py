"""Logs of runs that never ran, for tests of their readers."""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from memo.artifacts.run_log import RunHeader, StepRecord, SwapForecast, header_path

MIB = 1 << 20

SWAP = SwapForecast(
    moves=True,
    origin="measured now",
    limit="link (offload)",
    shares={"qkv": 0.5, "residual": 0.25},
    forward_s=0.01,
    backward_s=0.02,
    recompute_s=0.005,
    layers_s=0.7,
    copies_s=0.4,
    copy_wait_s=0.05,
    hidden_share=0.875,
    device_bytes=30 * MIB,
    host_bytes=40 * MIB,
)


def step(iteration: int, **changes: Any) -> StepRecord:
    """Return an iteration of a run that swaps; its loss is 6 - iteration / 10."""
    record = StepRecord(
        iteration=iteration,
        consumed_samples=8 * iteration,
        lm_loss=6.0 - iteration / 10,
        grad_norm=2.0,
        lr=1e-3,
        step_time_s=1.0,
        tgs=1000.0 + iteration,
        mfu_percent=40.0,
        tflops_per_gpu=120.0,
        global_batch_size=8,
        skipped_iterations=0,
        nan_iterations=0,
        device_peak_bytes=200 * MIB,
        host_peak_bytes=300 * MIB,
        weights_bytes=10 * MIB,
        gradients_bytes=20 * MIB,
        optimizer_bytes=60 * MIB,
        rounding_buffers_bytes=30 * MIB,
        host_records_bytes=40 * MIB,
        transient_peak_bytes=50 * MIB,
        layers_s=0.8,
        copy_wait_s=0.1,
        copies_s=0.4,
        hidden_share=0.75,
    )
    return dataclasses.replace(record, **changes)


def old_step(iteration: int) -> dict[str, Any]:
    """Return a line of an old log, from before memory and copies were recorded."""
    fields = dataclasses.asdict(step(iteration))
    return {name: fields[name] for name in list(fields)[: list(fields).index("weights_bytes")]}


def header(**changes: Any) -> RunHeader:
    found = RunHeader(
        started_at="2026-01-31T12:00:00+01:00",
        versions={"memo": "0.1.0", "torch": "2.13.0", "python": "3.11.7"},
        device="NVIDIA H100",
        parameters=123_456_789,
        layout={"tp": 2, "cp": 4, "pp": 1, "dp": 1, "world_size": 8, "microbatches": 3},
        peak_flops=989e12,
        config={"training": {"lr": 3e-4, "global_batch_size": None}, "data": {"seq_length": 65536}},
        memory_forecast={
            "weights": 10 * MIB,
            "gradients": 20 * MIB,
            "optimizer": 60 * MIB,
            "rounding_buffers": 30 * MIB,
            "host_records": 40 * MIB,
            "transient": 45 * MIB,
        },
        swap=SWAP,
        memory_plan=None,
    )
    return dataclasses.replace(found, **changes)


def write_log(path: Path, lines: Sequence[StepRecord | dict[str, Any] | str], head: RunHeader | None = None) -> Path:
    """Write a log like memo's, or one with lines that memo does not write; return its path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    texts = [line if isinstance(line, str) else json.dumps(_plain(line)) + "\n" for line in lines]
    path.write_text("".join(texts))
    if head is not None:
        head.save(header_path(path))
    return path


def _plain(line: StepRecord | dict[str, Any]) -> dict[str, Any]:
    return line if isinstance(line, dict) else dataclasses.asdict(line)
