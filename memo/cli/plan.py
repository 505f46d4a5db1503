"""`memo plan`: finds the fastest layout that fits; prints a table or JSON, writes a run.toml, a drawing or a page."""

import contextlib
import gc
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, Literal

from memo.cli.job import Job
from memo.config import TrainingConfig
from memo.config.check_fields import check_conflicts
from memo.config.check_model import unscaled_length
from memo.config.command_line import parse_options
from memo.config.flag import COUNT, Flag, ReadWith
from memo.config.flag_table import dashed
from memo.config.require import require
from memo.config.training import Preference
from memo.errors import tell
from memo.estimate.cases import DEFAULT_SEQ_LEN
from memo.estimate.disks import NVME_PATH
from memo.progress import waiting
from memo.search.candidates import config_of, parse_layout
from memo.search.largest import Family
from memo.search.launch import command, trial_file, write_run
from memo.search.plan import Plan
from memo.search.planning import Objective, answer, base_model, plans_by_length
from memo.search.question import PlaceStates, Question, ask
from memo.search.tables import Commands, as_object, explanation, text
from memo.text_table import terminal_columns

EXAMPLES = (
    "memo plan --model llama-3.1-8b --gpus 8 --hardware h100-80 --seq-len 128K --out run.toml --html plan.html",
    "memo plan --model gpt-7b --gpus 8 --objective max-seq-len --trace-out step.json",
    "memo plan --family llama --gpus 8 --objective max-model-size",
    "memo plan --model llama-3.1-8b --seq-len 128K --compare h100-80x8,h200x8,a100-80x16",
)


@dataclass(frozen=True, kw_only=True)
class _Options(Job):
    """Find the fastest layout that fits: tp x cp x pp x dp (ZeRO-1), micro-batch size, recomputation and swapping; if
    needed also ZeRO-2, ZeRO-3 and states in host memory.

    Speed is simulated and memory estimated (as by `memo estimate`), so no GPU is needed. TFLOP/s and MFU count model
    FLOPs with the causal half of attention, as `memo train` prints them; papers that count attention in full, such as
    Megatron-LM's, print more for the same speed.
    """

    global_batch_size: Annotated[int | None, COUNT, Flag(aliases=("gbs",))] = None
    """Sequences in one step; default: one for each GPU."""
    family: Family | None = None
    """Instead of --model for --objective max-model-size: the shape to scale."""
    compare: str | None = None
    """Instead of --gpus and --hardware: machines and numbers of GPUs, such as h100-80x8,h200x8, to rank for this job by
    dollars per token; machines without a price come last, by speed. h100-80x8@2.5 gives your own price, in dollars per
    GPU and hour."""
    price_per_gpu_hour: float | None = None
    """Dollars per GPU and hour; default: from a dated table, which `memo hardware` shows."""
    nvme_path: str = NVME_PATH
    """Directory on the local disks of a node, for the run that is written."""
    clip_grad: float = TrainingConfig.clip_grad
    """Setting of the run; 0 does not clip, so that gradients of layers that the CPU updates need not wait in host
    memory for their norm."""
    preference: Preference | None = None
    """Setting of the run: loss on pairs of answers, with forwards before each step for their log-probs."""
    custom_layer: str = ""
    """Setting of the run: FILE.py:CLASS of your own layer, which replaces the model's (docs/custom_model.md)."""
    train_as: str | None = None
    """Ways of training to compare, one in each line: full, lora and qlora (adapters beside a model in 4 bits),
    separated by commas; adapters have the rank of --lora-rank, or 16."""
    objective: Objective = "tgs"
    """tgs: tokens per GPU and second; max-seq-len: the longest sequence that fits, then tgs; max-model-size: the
    largest model of --family, or of the shape of --model, then tgs."""
    min_tgs: float | None = None
    """The least tokens per GPU and second for --objective max-seq-len or max-model-size."""
    place_states: PlaceStates = "auto"
    """Whether to try ZeRO-2, ZeRO-3 and states in host memory. auto: where nothing fits without them, or where they
    make a step more than 5 % shorter; never: the answer comes sooner."""
    method: Literal["memo", "llmem"] = "memo"
    """memo: layouts of memo's own runs; llmem: the method of fine-tuning that LLMem's Algorithm 1 chooses, with its
    largest batch, by the paper's formulas; it takes only --model, --gpus, --seq-len, --hardware, --gpu-memory-gib,
    --llmem-corrected and --json."""
    llmem_corrected: Annotated[bool, ReadWith("method", ("llmem",))] = False
    """Use corrected formulas, which reproduce every printed row, instead of the printed formulas."""
    top: int = 10
    """Rows of the table: the best candidate of each tp x cp x pp."""
    all: bool = False
    """Show every candidate that fits, and the reason for each refusal."""
    explain: str | None = None
    """A layout as the table writes it, such as 'tp4 cp2 pp1 mbs1': show every strategy with its memory and time."""
    wide: bool = False
    """Show every column of the table, however narrow the terminal is."""
    json: bool = False
    """Print one JSON object instead of a table."""
    out: str | None = None
    """File for the best run that surely fits, for `memo train --config`. A faster run that may not fit, if the table
    says to try it first, gets a file next to it: run.first.toml for run.toml."""
    data_path: Annotated[
        tuple[str, ...] | None, Flag(metavar="PREFIX|WEIGHT PREFIX"), ReadWith("out", use="--out FILE")
    ] = None
    """Corpus, or corpora and their weights, to write into the file of --out."""
    trace_out: str | None = None
    """File for the simulated step of the best run, which https://ui.perfetto.dev opens."""
    plot: str | None = None
    """Drawing (SVG, PNG or PDF) of memory and strategy by sequence length; needs matplotlib."""
    html: str | None = None
    """File for one self-contained page: the table with its errors, memory by length, and the simulated step of the best
    run; needs matplotlib."""


def main(argv: Sequence[str]) -> None:
    """Raises ConfigError for files that cannot be read or written, for impossible jobs, and if --out has no plan to
    write."""
    options = parse_options(_Options, argv, prog="memo plan", examples=EXAMPLES)
    _check(options)
    columns = None if options.wide else terminal_columns()
    more = ("place_states", "nvme_path", "clip_grad", "price_per_gpu_hour", "custom_layer", "preference")
    asked = options.job() | {name: getattr(options, name) for name in more}
    asked["model"] = base_model(options.model, options.family, options.objective)
    if options.compare is not None or options.train_as is not None:
        _print(_compared(options, asked, columns))
        return
    question = ask(**asked)
    if options.method == "llmem":
        from memo.papers import fine_tuning

        setting, found = fine_tuning.choose_method(question, options.llmem_corrected)
        _print((fine_tuning.as_object if options.json else fine_tuning.text)(question, setting, found))
        return
    if options.explain is not None:
        print(explanation(question, parse_layout(options.explain), columns))
        return
    with _searching("planning"):
        plan = answer(
            question,
            options.objective,
            top=options.top,
            everything=options.all,
            family=options.family,
            min_tgs=options.min_tgs,
        )
    base = plan.question.base
    if plan.question.model.run is not None and (beyond := unscaled_length(base.model, base.data.seq_length)):
        tell(f"warning: {beyond}")
    commands = _write(plan, options)
    if options.plot is not None:
        _draw(question, options.plot)
    with waiting("looking for what would fit"):
        told = as_object(plan, commands, options.all) if options.json else text(plan, commands, options.all, columns)
    _print(told)


def _print(told: Any) -> None:
    """Print text unchanged, and other objects as JSON."""
    print(told if isinstance(told, str) else json.dumps(told, indent=1))


def _compared(options: _Options, asked: dict[str, Any], columns: int | None) -> Any:
    """Return a table with a line for each machine, or for each way of training."""
    from memo.search.comparing import as_object, compare, compare_ways, comparison, parse_machines

    if options.compare is None:
        with _searching("planning for each way of training"):
            plans = compare_ways(ways=str(options.train_as), **asked)
    else:
        of_jobs = {name: value for name, value in asked.items() if name not in ("gpus", "hardware", "gpu_memory_gib")}
        with _searching("planning for each machine"):
            plans = compare(machines=parse_machines(options.compare), **of_jobs)
    return [as_object(plan) for plan in plans] if options.json else comparison(plans, columns)


@contextlib.contextmanager
def _searching(what: str) -> Iterator[None]:
    """A context in which the terminal shows `what` is being done, and Python collects no garbage.

    A search makes many objects and few cycles, and garbage collection would take a quarter of its time. A collection at
    the end of the process would take as long, so the remaining objects are frozen.
    """
    gc.disable()
    try:
        with waiting(what):
            yield
    finally:
        gc.freeze()
        gc.enable()


_OF_LLMEM = {"gpus", "model", "seq_len", "hardware", "gpu_memory_gib", "method", "llmem_corrected", "json"}
_OF_ONE_WAY = (
    *("objective", "family", "min_tgs", "method", "llmem_corrected", "top", "all"),
    *("explain", "out", "data_path", "trace_out", "plot", "html"),
)
"""Flags of a plan for one machine and one way of training."""
_CONFLICTS = (
    ("compare", (*_OF_ONE_WAY, "gpus", "hardware", "gpu_memory_gib", "train_as"), "it shows one line a machine"),
    ("train_as", (*_OF_ONE_WAY, "freeze", "train_only", "quantize"), "it shows one line a way of training"),
    ("explain", ("objective", "all", "json", "out", "trace_out", "plot", "html"), "it only explains"),
)


def _check(options: _Options) -> None:
    strangers = [field.name for field in fields(options) if field.name not in _OF_LLMEM]
    check_conflicts(options, (("method", tuple(strangers), "the paper of llmem does not know it"), *_CONFLICTS))
    require(
        not options.hardware.isdecimal(),
        f"--hardware {options.hardware} is a number, not a machine: did you mean --gpus {options.hardware}?",
    )
    require(
        options.gpus is not None or options.compare is not None,
        "--gpus is not given: say how many there are, such as 8, or --compare machines",
    )
    require(
        options.objective != "max-seq-len" or options.seq_len == DEFAULT_SEQ_LEN,
        f"--seq-len {options.seq_len} conflicts with --objective max-seq-len, which finds it: leave one of both out",
    )
    require(
        options.out is None or Path(options.out).name,
        f"--out {options.out!r} names no file: give the path of one, such as run.toml",
    )
    if options.plot is not None:
        from memo.report.drawing import check_suffix

        check_suffix(options.plot)


def _write(plan: Plan, options: _Options) -> Commands:
    """Write the requested files of the best choice; returns the commands that run the choices."""
    question, best, trial = plan.question, plan.best, plan.trial
    if best is None:
        for name in ("out", "trace_out", "html"):
            flag, path = dashed(name), getattr(options, name)
            require(
                path is None,
                f"{flag} {path}: nothing fits, so there is nothing to write: see `memo plan` without {flag} for why",
            )
        return Commands()
    file, commands = options.out, Commands()
    other = None if file is None else trial_file(file)
    for choice, path in ((best, file), (trial, other)):
        if choice is not None and path is not None:
            write_run(question, choice, path, options.data_path)
    if question.model.run is not None:
        told = None if trial is None else command(question, trial, other, options.data_path)
        commands = Commands(command(question, best, file, options.data_path), told)
    if options.trace_out is not None:
        from memo.simulate.trace import trace_step

        config = config_of(question, best.layout, best.strategy)
        trace_step(config, question.gpus, question.hardware, options.trace_out, best.moved)
    if options.html is not None:
        from memo.report.plan_page import write_plan_page

        with waiting("writing the page") as doing:
            write_plan_page(plan, commands, options.html, lambda what: doing(description=what))
    return commands


def _draw(question: Question, path: str) -> None:
    from memo.report.drawing import save_figure
    from memo.report.memory_drawing import draw_plans

    with waiting("drawing") as doing:
        plans = plans_by_length(question, lambda what: doing(description=what))
    require(plans, f"--plot {path}: no sequence length fits on --gpus {question.gpus}: use more, or a smaller --model")
    title = (
        f"{question.model.name} on {question.gpus} x {question.hardware.name}, {question.global_batch_size} sequences "
        "a step: the fastest plan that fits"
    )
    save_figure(draw_plans(plans, path, title), path)
