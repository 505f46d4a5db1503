"""Step time and hidden copies of one rank of eight, by memo's simulator and by its program on the timed emulated GPU.

    python -m memo.emulated_gpu -- python benchmarks/timed_accuracy.py [--only NAME ...] [--hardware NAME]

Needs a CUDA build of torch and no GPU. One side is memo.simulate, which `memo plan` asks. The other side is the real
program, `memo train` with --simulate-world tp=8, without numbers and in virtual time (csrc/emulated_gpu/README.md).
Both sides take the seconds of a kernel, a copy and a collective from the same model (memo.simulate.kernels) of the same
hardware. They differ in the operations that they run, and in the waits between them. All times are modelled, none is
measured.

Every row is a run of three steps, of which the last two count. Under alpha auto the program plans with times of a layer
that it measures itself, and the simulator is asked about this plan. A row replaces an earlier row of its run.
"""

import argparse
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import full_size
import rows

from memo.config import RunConfig, preset
from memo.config.simulated_world import with_simulated_axes
from memo.emulated_gpu.launch import Device, environment
from memo.estimate.hardware import Efficiency
from memo.estimate.machines import find_hardware
from memo.simulate.model import step_model
from memo.simulate.predict import predict_step

EVIDENCE = "modelled time: the program on the timed emulated GPU"
FORESEEN = ("matmul", "attention", "elementwise")
PRODUCTS = ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm")
COPIES = ("copy host to device", "copy device to host")
MESSAGES = "simulated message"
TIMEOUT_S = 3600
KEPT = "all kept"
WAYS: dict[str, dict[str, object]] = {KEPT: {"offload_alpha": "off"}, **full_size.WAYS}
DEVICES = {KEPT: dataclasses.replace(full_size.ROOMY, memory_gib=2000), "alpha auto": full_size.H100}
"""Devices by way: all activations are kept on a device that holds them, and alpha auto decides by an H100's memory."""


@dataclasses.dataclass(frozen=True)
class Case:
    model: str
    seq_length: int
    way: str
    hardware: str

    @property
    def name(self) -> str:
        return f"{self.model}, {self.seq_length // 1024}K, {self.way}, {self.hardware}"

    @property
    def flags(self) -> dict[str, object]:
        return {**full_size.BASE, "seq_length": self.seq_length, **WAYS[self.way]}

    @property
    def device(self) -> Device:
        return dataclasses.replace(DEVICES.get(self.way, full_size.ROOMY), timed=self.hardware)


def cases(hardware: str) -> Iterator[Case]:
    for model in ("gpt-7b", "llama-3.1-8b"):
        for length in (64, 192, 256, 1024):
            for way in WAYS:
                yield Case(model, length * 1024, way, hardware)


def configuration(case: Case) -> RunConfig:
    return dataclasses.replace(RunConfig(), model=preset(case.model)).override(case.flags)


def run(case: Case) -> dict[str, Any]:
    """Run a case in a process of its own, with a timed device."""
    with tempfile.TemporaryDirectory() as folder:
        env = environment(case.device, Path(folder) / "gpu.txt", os.environ)
        command = [sys.executable, __file__, "--run", json.dumps(dataclasses.asdict(case))]
        limit_s = TIMEOUT_S
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=False, timeout=limit_s)
    if done.returncode != 0:
        raise SystemExit(f"{case.name}: exit status {done.returncode}\n{done.stderr[-3000:]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def emulate(case: Case) -> dict[str, Any]:
    """Return the seconds of one step; called in the process of `run`."""
    import memo
    from memo.emulated_gpu.face import EmulatedGpu

    start_s, gpu, steps = time.monotonic(), EmulatedGpu(), full_size.STEPS
    with memo.Trainer(config=configuration(case)) as trainer:
        trainer.step()
        gpu.clear()
        records = [trainer.step() for _ in range(steps)]
        chosen = trainer.parts.chosen_swap if trainer.parts.swap is not None else None
        return {
            "step_time_s": sum(record.step_time_s for record in records) / steps,
            "hidden_share": records[-1].hidden_share,
            "mfu_percent": records[-1].mfu_percent,
            "tiles": None if chosen is None else chosen.solution.tiles,
            "seconds": {name: seconds / steps for name, seconds in gpu.taken_s().items() if seconds},
            "took_s": time.monotonic() - start_s,
        }


def by_kind(seconds: dict[str, float]) -> dict[str, float]:
    """Return the seconds of a row's kernels by their bound (compute or memory), and of messages and copies."""
    kinds = dict.fromkeys((*FORESEEN, "messages", "copies"), 0.0)
    for name, taken_s in seconds.items():
        if name.partition(".")[0].removesuffix("_") in PRODUCTS:
            kinds["matmul"] += taken_s
        elif name == MESSAGES:
            kinds["messages"] += taken_s
        elif name in COPIES:
            kinds["copies"] += taken_s
        else:
            kinds["attention" if "attention" in name else "elementwise"] += taken_s
    return kinds


def foreseen(row: dict[str, Any]) -> dict[str, Any]:
    """Return the simulator's figures for the run of a row, with the seconds of its kernels by their bound.

    The machine has the rates with which the row was modelled, because both sides take their seconds from it."""
    config = dataclasses.replace(RunConfig(), model=preset(row["model"])).override(row["flags"])
    config = with_simulated_axes(config.override({"params_dtype": "bf16"}))
    if row["tiles"] is None:
        config = config.override({"offload_alpha": "off"})
    hardware, tiles = find_hardware(row["hardware"]), row["tiles"]
    hardware = dataclasses.replace(hardware, efficiency=Efficiency(**row["efficiency"]))
    step = predict_step(config, full_size.GPUS, hardware, tiles)
    model = step_model(config, full_size.GPUS, hardware, tiles)
    cost = (model.layer.forward + model.layer.backward + model.recompute) * model.num_layers
    for end in (model.embedding, model.loss):
        cost += end.forward + end.backward
    kinds = {"matmul": cost.matmul, "attention": cost.attention, "elementwise": cost.elementwise}
    kinds["elementwise"] += model.updates[0].optimizer_s
    return {"step_time_s": step.step_time_s, "hidden_share": step.hidden_share, "seconds": kinds}


def table(kept: list[dict[str, Any]]) -> str:
    """Return Markdown. Kernels of a device queue, so steps differ by the time of their kernels and by idle time."""
    heads = ("run", "simulator, s", "program, s", "difference", *FORESEEN, "idle", "hidden: simulator", "program")
    lines = [heads, ("---",) * len(heads)]
    for row in kept:
        expected, kinds = foreseen(row), by_kind(row["seconds"])
        step_s, expected_s = row["step_time_s"], expected["step_time_s"]
        more = [kinds[kind] - expected["seconds"][kind] for kind in FORESEEN]
        shares = [part / expected_s for part in (*more, step_s - expected_s - sum(more))]
        hidden = [1.0 if share is None else share for share in (expected["hidden_share"], row["hidden_share"])]
        lines.append(
            (
                *(row["name"], f"{expected_s:.3f}", f"{step_s:.3f}", f"{step_s / expected_s - 1:+.1%}"),
                *(f"{share:+.1%}" for share in shares),
                *(f"{share:.3f}" for share in hidden),
            )
        )
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def ratios(kept: list[dict[str, Any]]) -> str:
    """Return Markdown with the program's step under swapping, compared with keeping everything and recomputing all."""
    seconds = {(row["model"], row["seq_length"], row["way"]): row["step_time_s"] for row in kept}
    heads = ("run", *WAYS, "alpha auto / all kept", "full recompute / alpha auto")
    lines = [heads, ("---",) * len(heads)]
    for model, length in dict.fromkeys((row["model"], row["seq_length"]) for row in kept if row["way"] == KEPT):
        step_s = {way: seconds[model, length, way] for way in WAYS}
        swapped_s = step_s["alpha auto"]
        cells = (*step_s.values(), swapped_s / step_s[KEPT], step_s["full recompute"] / swapped_s)
        lines.append((f"{model}, {length // 1024}K", *(f"{cell:.3f}" for cell in cells)))
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="NAME", default=[""], help="cases whose name holds one of these")
    parser.add_argument("--hardware", default="h100-80", help="of memo's table, or a file (default: %(default)s)")
    parser.add_argument("--run", help=argparse.SUPPRESS)  # what this script starts for each run
    parser.add_argument("--table", action="store_true", help="print the rows that are kept beside what memo foresees")
    options = parser.parse_args()
    if options.table:
        kept = rows.read("timed_accuracy")
        print(table(kept), ratios(kept), sep="\n\n")
        return 0
    if options.run:
        print(json.dumps(emulate(Case(**json.loads(options.run)))))
        return 0
    for case in cases(options.hardware):
        if any(word in case.name for word in options.only):
            row = {"evidence": EVIDENCE, "name": case.name, **dataclasses.asdict(case), "flags": case.flags}
            row |= {"efficiency": dataclasses.asdict(find_hardware(case.hardware).efficiency)}
            rows.Journal("timed_accuracy").replace({**row, **run(case)}, "name")
    return 0


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    sys.exit(main())
