"""The result of a rehearsal as text."""

import collections
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from memo.config import RunConfig
from memo.config.derived import global_batch_size
from memo.config.grid import rank_grid
from memo.estimate.hardware import Hardware
from memo.estimate.memory_account import reserved_under_plan
from memo.estimate.unseen_memory import links_of, unseen_memory
from memo.estimate.verdict import Capacity, Verdict, judge
from memo.rehearsal.rehearsed import Rehearsed, Steady, Times
from memo.rehearsal.request import STEADY_STEPS, stand_ins
from memo.spec.foreseen_kernels import foreseen_kernels
from memo.spec.slots import slot_dims
from memo.units import GIB, format_bytes, format_count

NOT_SEEN = "CUDA's context, NCCL's buffers, what cuBLAS and cuDNN take for themselves"
"""Users of GPU memory outside torch's allocator, or in kernels that only a real GPU runs."""

REASONS = {
    "memo.train.agreement.read_numbers": "loss, gradient norm, stop and failure come to the host together",
    "memo.executor.states.await_gradients": "the CPU updates what is in host memory: gradients have arrived there (one "
    "stream), and nobody reads the masters any more (the other)",
    "memo.executor.states.upload_weights": "the CPU casts masters into one of two stages: its last copy has left it",
    "memo.executor.layer_states.wait": "the optimizer's thread updates a layer as soon as its gradient has arrived",
}
"""Places where the host may wait for the device in a training step that is neither the first nor the last: {function
of memo that waits or calls a function that waits: reason}. All other waits are unexpected."""

_COLUMN, _WIDTH = 22, 120

_SEVERITY = (Verdict.FITS, Verdict.UNSURE, Verdict.OOHM, Verdict.OOM)


@dataclass(frozen=True)
class Run:
    """The run that was rehearsed, with the configuration of all its ranks."""

    config: RunConfig
    gpus: int
    hardware: Hardware


def verdict(run: Run, found: Rehearsed) -> Verdict:
    """The verdict on one rank: whether memory ran out, or so little is left that unseen memory may not fit."""
    if found.shortage is not None:
        return Verdict.OOM if found.shortage.memory == "device" else Verdict.OOHM
    assert found.steady is not None, "it ran, or memory ran out"
    capacity = Capacity(run.hardware.memory_gib * GIB, run.hardware.host_memory_bytes)
    unseen = unseen_memory(run.config, run.gpus, links_of(run.hardware), found.foreseen.host)
    return judge(found.steady.reserved_bytes + found.foreseen.context, 0, capacity, unseen)


def worst(run: Run, all_found: Sequence[Rehearsed]) -> Verdict:
    return max((verdict(run, found) for found in all_found), key=_SEVERITY.index)


def text(run: Run, all_found: Sequence[Rehearsed]) -> str:
    """Lines about the run and each rank, the verdict, and the memory that was not measured."""
    lines = [_title(run, all_found[0].parameters)]
    for found in all_found:
        lines += ["", *_rank(run, found)]
    return "\n".join([*lines, "", *_end(run, all_found)])


def _title(run: Run, parameters: int) -> str:
    config, grid = run.config, rank_grid(run.config.parallel, run.gpus)
    batch = global_batch_size(config, run.gpus)
    return (
        f"{format_count(parameters)} parameters, a step of {batch} x {config.data.seq_length:,} tokens, "
        f"tp {grid.tp} x cp {grid.cp} x pp {grid.pp} x dp {grid.dp} on {run.gpus} x {run.hardware.name}"
    )


def _rank(run: Run, found: Rehearsed) -> list[str]:
    stages = run.config.parallel.pp
    alike = ", as all others" if run.gpus > 1 else ""
    if stages > 1:
        alike = f", as all of pipeline stage {found.stage} of 0 to {stages - 1}"
    num_steps = STEADY_STEPS + (1 if found.planned is None else 3)
    lines = [f"rank {found.rank}{alike}: {num_steps} steps on the emulated GPU, in {found.took_s:.0f} s here"]
    if found.steady is not None:
        lines += [_row(name, value) for name, value in _steady(run, found, found.steady)]
    lines += [_row(name, value) for name, value in _plans(run, found)]
    if found.trace is not None:
        lines.append(_row("trace", f"{found.trace}, for https://ui.perfetto.dev; its times are modelled"))
    answer = verdict(run, found)
    lines.append(_row("verdict", f"{answer}: {_because(answer, found)}"))
    if found.shortage is not None:
        lines.append(_row("why", found.shortage.message))
    if found.refusal:
        lines.append(_row("memo train", f"would refuse to start it: {found.refusal}"))
    return lines


def _row(name: str, value: str) -> str:
    blank = " " * _COLUMN
    name = f"  {name}".ljust(_COLUMN)
    return textwrap.fill(value, _WIDTH, initial_indent=name, subsequent_indent=blank, break_on_hyphens=False)


def _steady(run: Run, found: Rehearsed, steady: Steady) -> Iterator[tuple[str, str]]:
    foreseen = found.foreseen
    if steady.times is not None:
        alone = ", without the pipeline's bubbles" if run.config.parallel.pp > 1 else ""
        yield "step, modelled", f"{_times(steady.times)}{alone}"
    yield (
        "device, allocated",
        f"{format_bytes(steady.allocated_bytes)}, foreseen {format_bytes(foreseen.allocated)}",
    )
    there = format_bytes(found.device_bytes - foreseen.context)
    in_pages = found.planned is not None and found.planned.arena_bytes > 0
    expected = f", foreseen {format_bytes(reserved_under_plan(foreseen))}," if in_pages else ""
    yield "device, reserved", f"{format_bytes(steady.reserved_bytes)}{expected} of {there}"
    pinned = f"{format_bytes(steady.pinned_bytes)}, foreseen {format_bytes(foreseen.host)}"
    yield "host, pinned", f"{pinned}, of {format_bytes(found.host_bytes)} that are this rank's"
    retries = f"; {steady.num_alloc_retries} times nothing was free and all that lay unused was given back"
    retries = retries if steady.num_alloc_retries else ""
    yield "device mallocs", f"{steady.num_device_mallocs} in the last {STEADY_STEPS} steps{retries}"
    yield from _waits(steady)


def _times(times: Times) -> str:
    hidden = "" if times.hidden_share is None else f", {int(times.hidden_share * 100 + 1e-6)} % of the copies hidden"
    mfu = "" if times.mfu_percent is None else f", MFU {times.mfu_percent:.1f} %"
    return f"{times.step_time_s:.3g} s, {times.tgs:,.0f} tokens/GPU/s{mfu}{hidden}"


def _waits(steady: Steady) -> Iterator[tuple[str, str]]:
    counts: collections.Counter[str] = collections.Counter()
    for wait in steady.waits:
        entry = reasoned(wait.what, wait.where)
        where = " < ".join(wait.where) or "outside of memo"
        counts[f"{REASONS[entry]} ({entry})" if entry else f"{wait.what} in {where}"] += wait.count
    yield "host waits", f"{counts.total()} in a step"
    for told, count in counts.items():
        yield "", f"{count} x {told}"


def reasoned(what: str, functions: Sequence[str]) -> str | None:
    """The entry of REASONS for a wait, by the fields of memo.emulated_gpu.face.HostWait; None if it is unexpected, like
    all waits for copies from pageable memory."""
    return None if "pageable" in what else next((name for name in functions if name in REASONS), None)


def _plans(run: Run, found: Rehearsed) -> Iterator[tuple[str, str]]:
    memory = run.config.memory
    yield "attention", found.attention
    if memory.swaps:
        moved = "nothing moves"
        if found.tiles is not None:
            tiles = slot_dims(run.config).tiles
            shares = ", ".join(f"{name} {count}/{tiles}" for name, count in found.tiles.items())
            moved = f"input and attention output move, and of the tokens: {shares}"
        decided = f"; times of a layer: {found.layer_times}" if memory.offload_alpha == "auto" else ""
        yield "activations", f"{moved}{decided}"
    if found.planned is not None:
        planned = found.planned
        served = f"{planned.hits:,} requests at their address, {planned.fallbacks:,} fallbacks, "
        sizes = f"{format_bytes(planned.arena_bytes)} reserved, at least {format_bytes(planned.bound_bytes)} needed"
        yield "planned memory", f"{served}{sizes}" if planned.arena_bytes else f"none: {planned.reason}"


def _because(answer: Verdict, found: Rehearsed) -> str:
    shortage, steady = found.shortage, found.steady
    if shortage is None:
        assert steady is not None, "it ran, or memory ran out"
        left = format_bytes(found.device_bytes - found.foreseen.context - steady.reserved_bytes)
        near = "" if answer is Verdict.FITS else ", and what is not seen may take more than is assumed"
        return f"{left} of the device are left{near}"
    lacks = "" if shortage.missing_bytes is None else f", at least {format_bytes(shortage.missing_bytes)} short"
    lacking = found.foreseen.total - found.device_bytes
    ran_out = f"out of {shortage.memory} memory {shortage.when}{lacks}"
    if shortage.memory == "host" or lacking <= 0:
        return ran_out
    total = format_bytes(found.foreseen.total)
    return f"{ran_out}; foreseen are {total}, {format_bytes(lacking)} more than the device has"


def _end(run: Run, all_found: Sequence[Rehearsed]) -> Iterator[str]:
    context = format_bytes(all_found[0].foreseen.context)
    yield f"not seen, {context} foreseen for them, from published figures: {NOT_SEEN}"
    if run.config.parallel.pp > 1 and len(all_found) > 1:
        yield f"verdict of the run: {worst(run, all_found)}"
    for name, stand_in in stand_ins(run.config).items():
        asked = getattr(run.config.hardware, name)
        yield f"--{name.replace('_', '-')} {asked}: kernels of torch ({stand_in}) ran in its place"
    if told := foreseen_kernels(run.config.model, run.config.hardware):
        yield told
