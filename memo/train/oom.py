"""Explains an out-of-memory error in a step: which component exceeds its forecast, and which flags save memory."""

import contextlib
import os
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType

import torch

from memo.artifacts.regular_file import open_regular
from memo.artifacts.run_log import default_log
from memo.config import RunConfig
from memo.config.derived import resolved_offload_tiles
from memo.config.parallel import SWEPT_CP_COMM_TYPES
from memo.errors import OutOfMemory
from memo.train.parallel_model import ParallelModel
from memo.train.watching import MemoryUse, Meter, memory_forecast
from memo.units import GIB, KIB, MIB, format_bytes

_MESSAGES = ("DefaultCPUAllocator: can't allocate memory", "DefaultCPUAllocator: not enough memory", "bad_alloc")
"""Messages of the RuntimeErrors of torch's CPU allocator and of the planned allocator."""

RESIDENT_NOISE_BYTES = 128 * MIB
"""The resident set of a process on a CPU may exceed the forecast by this without being reported: freed pages that were
not returned, libraries that the first step loads. It was 10 to 75 MiB in four small runs on Linux."""

_UNITS = {"bytes": 1, "KiB": KIB, "MiB": MIB, "GiB": GIB}

_PLACES = {
    "memo.parallel.loss": "the loss",
    "memo.train.optimizer": "the optimizer's step",
    "memo.parallel.data": "the reduction of gradients",
    "memo.executor.layer": "a layer",
    "memo.executor.sweep": "a layer",
    "memo.executor.tile_machine": "a layer",
    "memo.model.layer": "a layer",
    "memo.parallel.stage_messages": "a backward or the messages between stages",
    "memo.parallel.pipeline": "a backward or the messages between stages",
}
"""Parts of a step by module; the innermost module on the stack counts. Autograd's backward has no Python frame."""


@dataclass(frozen=True)
class Shortage:
    """The memory of one rank when it ran out of it, in use and as foreseen before training, by component."""

    place: str
    """The part of the step that was running."""
    asked_bytes: int | None
    """Bytes of the failed request, which counts as transient; None if the error does not name them."""
    used_bytes: dict[str, int]
    foreseen_bytes: dict[str, int]
    free: str = ""
    """Words about the free memory of the device."""
    scattered_bytes: int = 0
    """Free bytes that torch's allocator holds in pieces (fragmentation)."""
    noise_bytes: int = 0
    """used_bytes may be too high by this."""

    @property
    def grown(self) -> str | None:
        """The component that exceeds its forecast most; None if no excess is above a hundredth and the noise."""
        above = {name: self.used_bytes[name] - self.foreseen_bytes.get(name, 0) for name in self.used_bytes}
        name = max(above, key=lambda name: above[name])
        return name if above[name] > max(self.foreseen_bytes.get(name, 0) / 100, self.noise_bytes) else None

    def describe(self) -> str:
        """Describe the shortage in one sentence, without advice."""
        asked = "" if self.asked_bytes is None else f", which asked for {format_bytes(self.asked_bytes)}"
        parts = [
            f"{name} {format_bytes(used)} (foreseen {format_bytes(self.foreseen_bytes.get(name, 0))})"
            for name, used in self.used_bytes.items()
            if used or self.foreseen_bytes.get(name)
        ]
        name = self.grown
        verdict = (
            "no component is above what was foreseen, so the memory itself is smaller than the plan took it to be"
            if name is None
            else f"{name} is {format_bytes(self.used_bytes[name] - self.foreseen_bytes.get(name, 0))} above that"
        )
        return f"in {self.place}{asked}{self.free}: {', '.join(parts)}; {verdict}"


@contextlib.contextmanager
def explained(parts: ParallelModel, meter: Meter, iteration: int) -> Iterator[None]:
    """A context around one step: raises OutOfMemory if the device's or the host's allocator refuses a request.

    The message names the component that grew, with numbers, and the flags that help. On CUDA, torch's memory snapshot
    is first written next to the run's log.
    """
    try:
        yield
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        config, shortage = parts.config, measure(error, parts, meter)
        raise OutOfMemory(
            f"out of memory on rank {parts.mesh.rank} in iteration {iteration}, {shortage.describe()}. "
            f"What helps: {'; '.join(advice(config, shortage, parts.swap is not None))}{_snapshot(parts)}"
        ) from error


def is_out_of_memory(error: BaseException) -> bool:
    """Whether `error` is torch's error for CUDA, Python's MemoryError, or the RuntimeError of a CPU allocator."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(message in str(error) for message in _MESSAGES)


def measure(error: BaseException, parts: ParallelModel, meter: Meter) -> Shortage:
    """Measure the memory of this rank; call it while the tensors of the failed step are still alive."""
    use, asked = MemoryUse.of(parts), asked_bytes(str(error))
    free, scattered, noise = "", 0, 0
    if parts.device.type == "cuda":
        free_bytes, total_bytes = torch.cuda.mem_get_info(parts.device)
        allocated, reserved = torch.cuda.memory_allocated(parts.device), torch.cuda.memory_reserved(parts.device)
        scattered = reserved - allocated
        free = f" where {format_bytes(free_bytes)} of {format_bytes(total_bytes)} are free outside of torch's allocator"
    else:
        allocated, noise = meter.device_bytes_now(use), RESIDENT_NOISE_BYTES
    used = {name.removesuffix("_bytes"): num_bytes for name, num_bytes in asdict(use).items()}
    used["transient"] = max(0, allocated - use.device_bytes) + (asked or 0)
    foreseen = memory_forecast(parts)
    return Shortage(place_of(error.__traceback__), asked, used, foreseen, free, scattered, noise)


def asked_bytes(message: str) -> int | None:
    """The bytes of the refused request that an allocator's message names; None if it names none."""
    found = re.search(r"[Tt]ried to allocate ([\d.]+) (bytes|KiB|MiB|GiB)", message)
    return None if found is None else int(float(found[1]) * _UNITS[found[2]])


def place_of(trace: TracebackType | None) -> str:
    """The part of a step that was running, for people."""
    found = "the step"
    while trace is not None:
        found = _PLACES.get(trace.tb_frame.f_globals.get("__name__", ""), found)
        trace = trace.tb_next
    return found


def advice(config: RunConfig, shortage: Shortage, moves: bool) -> list[str]:
    """Flags that save memory, the most fitting flag first; `moves`: whether activations move to host memory."""
    memory, training, parallel = config.memory, config.training, config.parallel
    found = []
    if shortage.scattered_bytes > (shortage.asked_bytes or 0) and not memory.plans:
        scattered = format_bytes(shortage.scattered_bytes)
        found.append(f"--memory-planner auto ({scattered} are free, but in pieces)")
    if shortage.place == "the loss" and training.loss_chunk_size > 1:
        fewer = training.loss_chunk_size // 2
        found.append(f"--loss-chunk-size {fewer} (now {training.loss_chunk_size}: tokens whose logits exist at once)")
    found += _activation_advice(config, moves, grown=shortage.grown)
    if training.micro_batch_size > 1:
        fewer = training.micro_batch_size // 2
        found.append(f"--micro-batch-size {fewer} (now {training.micro_batch_size})")
    more_tp = f"--tensor-model-parallel-size {2 * parallel.tp} (now {parallel.tp}) for weights as well"
    more_cp = f"--context-parallel-size {2 * parallel.cp} (now {parallel.cp}) for activations"
    if memory.sweeps and parallel.cp_comm_type not in SWEPT_CP_COMM_TYPES:
        more_cp += f" with --cp-comm-type {SWEPT_CP_COMM_TYPES[0]}"
    found.append(f"on more ranks {more_cp}, or {more_tp}")
    return found


def _activation_advice(config: RunConfig, moves: bool, grown: str | None) -> list[str]:
    memory = config.memory
    if moves and grown == "host_records":
        return [
            f"--offload-host-memory-gib below {memory.offload_host_memory_gib or 'what is free'}, so that less moves"
        ]
    if moves:
        alpha = memory.offload_alpha
        if alpha == 0.0 and not memory.sweeps:
            rings = config.parallel.cp > 1 and config.parallel.cp_comm_type not in SWEPT_CP_COMM_TYPES
            other = f" with --cp-comm-type {SWEPT_CP_COMM_TYPES[0]}" if rings else ""
            return [f"--offload-granularity tile{other} (now layer: slots would hold a few tiles instead of a layer)"]
        if alpha == 0.0:
            tiles = resolved_offload_tiles(config)
            found = [f"--offload-tiles {2 * tiles} (now {tiles}: smaller working sets)"]
            if not memory.offload_hidden_states:
                found.append("--offload-hidden-states (now off: what layers pass on would be in host memory)")
            return found
        less = alpha / 2 if isinstance(alpha, float) else 0.0
        return [f"--offload-alpha {less:g} (now {alpha}: a smaller share in the rounding buffers)"]
    if memory.recompute_granularity == "full":
        return ["--recompute-granularity none with --offload-alpha auto (now full: layers work on tiles instead)"]
    found = [f"--offload-alpha 0.5 (now {memory.offload_alpha}: activations move to host memory or are recomputed)"]
    return [*found, f"--recompute-granularity full (now {memory.recompute_granularity})"]


def _snapshot(parts: ParallelModel) -> str:
    """Write torch's snapshot of the device's memory in the failed step; returns a sentence about its file."""
    if parts.device.type != "cuda":
        return ""
    config = parts.config
    log = default_log(config.checkpoint.save, config.logging.log_jsonl)
    if log is None:
        # A simulated rank writes no log: --simulate-world does not go with --save, and memo rehearse has none either.
        is_alone = config.parallel.simulate_world is not None
        return "" if is_alone else ". With --save or --log-jsonl there would be a memory snapshot"
    path = Path(log).with_suffix(f".oom.rank{parts.mesh.rank}.pickle")
    try:
        os.close(open_regular(path, os.O_WRONLY | os.O_CREAT))  # torch would write through a link
        torch.cuda.memory._dump_snapshot(str(path))
    except (OSError, RuntimeError) as error:
        return f". The memory snapshot could not be written: {error}"
    return f". Memory snapshot: {path}, for https://docs.pytorch.org/memory_viz"
