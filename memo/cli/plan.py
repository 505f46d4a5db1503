"""`memo plan`: the fastest layout that fits, as a table, as JSON, as a run.toml, as a drawing and as a page."""

import contextlib
import gc
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from memo.cli.waiting import waiting
from memo.config import ModelConfig, TrainingConfig
from memo.config.check_model import unscaled_length
from memo.config.command_line import parse_options
from memo.config.flag import COUNT, TOKENS, Flag
from memo.config.flag_table import changed, dashed
from memo.config.model import CHOICES_OF_TRAINED, Quantization
from memo.config.require import require
from memo.config.training import MomentDtype
from memo.errors import ConfigError, tell
from memo.estimate.cases import DEFAULT_SEQ_LEN
from memo.estimate.disks import NVME_PATH
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
class _Options:
    """Find the fastest layout that fits: tp x cp x pp x dp (ZeRO-1), micro-batch, and what activations do; where a
    layout does not fit so, also ZeRO-2, ZeRO-3 and states in host memory.

    Speed is simulated, memory estimated (as `memo estimate` does), so it takes no GPU. TFLOP/s and MFU count model
    FLOPs with the causal half of attention, as `memo train` prints them; papers that count attention in full, such as
    Megatron-LM's, print more for the same speed.
    """

    gpus: int | None = None
    """All GPUs."""
    model: str | None = None
    """A preset, in letters of any case, or the path of a config.json of Hugging Face, also of families that memo can
    only plan for."""
    family: Family | None = None
    """Instead of --model for --objective max-model-size: the shape that is scaled."""
    seq_len: Annotated[int, TOKENS, Flag(aliases=("seq_length",))] = DEFAULT_SEQ_LEN
    """Tokens of one sequence; fights with --objective max-seq-len."""
    global_batch_size: Annotated[int | None, COUNT, Flag(aliases=("gbs",))] = None
    """Sequences in one step; default: one for each GPU."""
    hardware: Annotated[str, Flag(aliases=("gpu",))] = ""
    """Machine by name, such as a100-40 or h100-80, or a TOML file of one; default: a800-80."""
    compare: str | None = None
    """Instead of --gpus and --hardware: machines and numbers of GPUs, such as h100-80x8,h200x8, that are ranked for
    this job by dollars for a token; those without a price come last, by speed. h100-80x8@2.5 gives a price of your own,
    in dollars for a GPU and an hour."""
    price_per_gpu_hour: float | None = None
    """Dollars for a GPU and an hour; default: that of a dated table, which `memo hardware` shows."""
    gpu_memory_gib: float | None = None
    """Memory of one GPU, as nvidia-smi reports it; default: the hardware's."""
    host_memory_gib: float | None = None
    """Host memory that the run gets of each node; default: of the hardware's the part of its GPUs."""
    nvme_gib: float | None = None
    """Local disks of one node, for activations that its memory does not hold (--offload-nvme-path); default: the
    hardware's, which has none unless its file names them."""
    nvme_gb_per_s: float | None = None
    """Their rate in either direction, all together, 10^9 bytes a second; default: 2."""
    nvme_path: str = NVME_PATH
    """Their directory in the run that is written."""
    clip_grad: float = TrainingConfig.clip_grad
    """As of the run; 0 does not clip, so that gradients of layers that the CPU updates need not wait in host memory for
    their norm."""
    exp_avg_dtype: MomentDtype = TrainingConfig.exp_avg_dtype
    """As of the run: bf16 keeps the first moments of AdamW in 2 bytes a parameter instead of 4."""
    exp_avg_sq_dtype: MomentDtype = TrainingConfig.exp_avg_sq_dtype
    """The same of the second moments."""
    deterministic: bool = False
    """As of the run: every run gives the same bits, under kernels of attention that are slower on newer GPUs."""
    custom_layer: str = ""
    """As of the run: FILE.py:CLASS of a layer of your own in the place of the model's (docs/custom_model.md)."""
    lora_rank: int = ModelConfig.lora_rank
    """As of the run: rank of LoRA's adapters beside a frozen model; 0: all of it is trained."""
    lora_target_modules: str = ModelConfig.lora_target_modules
    """As of the run: the matrices that have them."""
    quantize: Quantization = ModelConfig.quantize
    """As of the run: what the frozen matrices of layers are kept in, nf4 or int8 (QLoRA)."""
    train_as: str | None = None
    """Ways of training that are compared, a line each: some of full, lora and qlora (adapters beside a model in 4 bits)
    with commas between; adapters have the rank of --lora-rank, or 16."""
    freeze: str = ""
    """As of the run: patterns of parameters that are not trained, such as layers.[0-7].*."""
    train_only: str = ""
    """As of the run: the same of those that are trained."""
    objective: Objective = "tgs"
    """tgs: tokens per GPU and second; max-seq-len: the longest sequence that fits, then tgs; max-model-size: the
    largest model of --family, or of the shape of --model, then tgs."""
    min_tgs: float | None = None
    """Tokens per GPU and second at which the longest sequence, or the largest model, must still train, under
    --objective max-seq-len or max-model-size."""
    place_states: PlaceStates = "needed"
    """ZeRO-2, ZeRO-3 and states in host memory: needed: where nothing fits without; always: also where such a layout
    may be faster than all that fit without (slower to answer); never."""
    method: Literal["memo", "llmem"] = "memo"
    """memo: layouts of memo's own runs; llmem: the method of fine-tuning that LLMem's Algorithm 1 chooses, with its
    largest batch, by the paper's formulas; it takes no flags but --model, --gpus, --seq-len, --hardware,
    --gpu-memory-gib, --llmem-corrected and --json."""
    llmem_corrected: bool = False
    """llmem: the formulas that select every printed row, instead of the literal ones."""
    top: int = 10
    """Rows of the table: the best of each tp x cp x pp."""
    all: bool = False
    """Show every candidate that fits, and the reason for each refusal."""
    explain: str | None = None
    """One layout as the table writes it, such as 'tp4 cp2 pp1 mbs1': every strategy with its memory and time."""
    wide: bool = False
    """Show every column of the table, however narrow the terminal is."""
    json: bool = False
    """Print one JSON object instead of a table."""
    out: str | None = None
    """File that gets the best run that surely fits, for `memo train --config`; a faster one that may not fit, where the
    table says to try it first, goes beside it: run.first.toml for run.toml."""
    data_path: Annotated[tuple[str, ...] | None, Flag(metavar="PREFIX|WEIGHT PREFIX")] = None
    """Corpus, or corpora and their weights, to write into that file."""
    trace_out: str | None = None
    """File for the simulated step of the best, which https://ui.perfetto.dev opens."""
    plot: str | None = None
    """Drawing (SVG, PNG or PDF) of memory and strategy by sequence length; needs matplotlib."""
    html: str | None = None
    """File for one page that needs no other: the table with its errors, memory by length, and the step of the best as
    it is foreseen; needs matplotlib."""


def main(argv: Sequence[str]) -> None:
    """Raises ConfigError for what cannot be read, planned for, or written, and where --out has nothing to write."""
    options = parse_options(_Options, argv, prog="memo plan", examples=EXAMPLES)
    _check(options)
    columns = None if options.wide else terminal_columns()
    model = base_model(options.model, options.family, options.objective)
    if options.compare is not None:
        _compare(model, options.compare, options, columns)
        return
    if options.gpus is None:
        raise ConfigError("--gpus is not given: say how many there are, such as 8, or --compare machines")
    if options.train_as is not None:
        _compare_ways(model, options.gpus, options, columns)
        return
    question = ask(
        model,
        options.gpus,
        hardware=options.hardware,
        gpu_memory_gib=options.gpu_memory_gib,
        global_batch_size=options.global_batch_size,
        **_asked(options),
    )
    if options.method == "llmem":
        from memo.papers import fine_tuning

        setting, found = fine_tuning.choose_method(question, options.llmem_corrected)
        _print((fine_tuning.as_object if options.json else fine_tuning.text)(question, setting, found))
        return
    if options.explain is not None:
        print(explanation(question, parse_layout(options.explain), columns))
        return
    with _collecting_rarely(), waiting("planning"):
        plan = answer(
            question,
            options.objective,
            top=options.top,
            everything=options.all,
            family=options.family,
            min_tgs=options.min_tgs,
        )
    if plan.question.model.run is not None and (beyond := unscaled_length(plan.question.base)):
        tell(f"warning: {beyond}")
    commands = _write(plan, options)
    if options.plot is not None:
        _draw(question, options.plot)
    with waiting("looking for what would fit"):
        told = as_object(plan, commands, options.all) if options.json else text(plan, commands, options.all, columns)
    _print(told)


def _print(told: Any) -> None:
    """Text as it is, an object as JSON."""
    print(told if isinstance(told, str) else json.dumps(told, indent=1))


def _asked(options: _Options) -> dict[str, Any]:
    """The arguments of `ask` that are the same for every machine."""
    names = ("seq_len", "host_memory_gib", "place_states", "nvme_gib", "nvme_gb_per_s", "nvme_path", "clip_grad")
    more = ("exp_avg_dtype", "exp_avg_sq_dtype", "deterministic", "price_per_gpu_hour", "custom_layer")
    return {name: getattr(options, name) for name in (*names, *more, *CHOICES_OF_TRAINED)}


def _compare(model: str, machines: str, options: _Options, columns: int | None) -> None:
    from memo.search.comparing import compare, comparison, comparison_object, parse_machines

    with _collecting_rarely(), waiting("planning for each machine"):
        plans = compare(model, parse_machines(machines), options.global_batch_size, **_asked(options))
    _print(comparison_object(plans) if options.json else comparison(plans, columns))


def _compare_ways(model: str, gpus: int, options: _Options, columns: int | None) -> None:
    from memo.search.comparing import compare_ways, comparison, comparison_object

    names = ("hardware", "gpu_memory_gib", "global_batch_size")
    asked = {**{name: getattr(options, name) for name in names}, **_asked(options)}
    with _collecting_rarely(), waiting("planning for each way of training"):
        plans = compare_ways(model, gpus, str(options.train_as), **asked)
    _print(comparison_object(plans) if options.json else comparison(plans, columns))


_RARELY = 1_000_000
"""Objects that a search may make before Python looks for garbage: more than most searches make."""


@contextlib.contextmanager
def _collecting_rarely() -> Iterator[None]:
    """A context in which Python seldom collects garbage: a search makes many objects and few cycles.

    Collections as often as by default would take a tenth of its time. The one at the end of the process would take as
    long as a search, so the objects that are left are frozen.
    """
    before = gc.get_threshold()
    gc.set_threshold(_RARELY, *before[1:])
    try:
        yield
    finally:
        gc.freeze()
        gc.set_threshold(*before)


_OF_LLMEM = {"gpus", "model", "seq_len", "hardware", "gpu_memory_gib", "method", "llmem_corrected", "json"}
_OF_ONE_MACHINE = {
    *("gpus", "hardware", "gpu_memory_gib", "objective", "family", "min_tgs", "method", "llmem_corrected"),
    *("top", "all", "explain", "out", "data_path", "trace_out", "plot", "html", "train_as"),
}
_NOT_COMPARED = (_OF_ONE_MACHINE - {"gpus", "hardware", "gpu_memory_gib", "train_as"}) | {
    "freeze",
    "train_only",
    "quantize",
}
_OF_ALL_LAYOUTS = {"objective", "all", "json", "out", "trace_out", "plot", "html"}


def _check(options: _Options) -> None:
    for name, value in changed(options).items():
        flag = dashed(name) + ("" if value is True else f" {value}")
        require(
            options.method != "llmem" or name in _OF_LLMEM,
            f"{flag} fights with --method llmem, whose paper does not know it: drop one",
        )
        require(
            options.compare is None or name not in _OF_ONE_MACHINE,
            f"{flag} fights with --compare {options.compare}, which shows one line a machine: drop one",
        )
        require(
            options.train_as is None or name not in _NOT_COMPARED,
            f"{flag} fights with --train-as {options.train_as}, which shows one line a way of training: drop one",
        )
        require(
            options.explain is None or name not in _OF_ALL_LAYOUTS,
            f"--explain {options.explain} only explains: leave {dashed(name)} out, or --explain",
        )
    require(
        options.method == "llmem" or not options.llmem_corrected,
        "--llmem-corrected fights with --method memo, which has no such formulas: give --method llmem",
    )
    require(
        not options.hardware.isdecimal(),
        f"--hardware {options.hardware} is a number, not a machine: did you mean --gpus {options.hardware}?",
    )
    require(
        options.objective != "max-seq-len" or options.seq_len == DEFAULT_SEQ_LEN,
        f"--seq-len {options.seq_len} fights with --objective max-seq-len, which finds it: leave one of both out",
    )
    require(
        options.data_path is None or options.out is not None,
        f"--data-path {' '.join(options.data_path or ())} goes into the run's file, but --out is not given: give both",
    )
    require(
        options.out is None or Path(options.out).name,
        f"--out {options.out!r} names no file: give the path of one, such as run.toml",
    )
    if options.plot is not None:
        from memo.report.drawing import check_suffix

        check_suffix(options.plot)


def _write(plan: Plan, options: _Options) -> Commands:
    """Write the files of the best choice that are asked for; the commands that run the choices."""
    question, best, trial = plan.question, plan.best, plan.trial
    if best is None:
        for name in ("out", "trace_out", "html"):
            flag, path = dashed(name), getattr(options, name)
            require(
                path is None,
                f"{flag} {path}: nothing fits, so there is nothing to write: see `memo plan` without {flag} for why",
            )
        return Commands()
    file = options.out
    other = None if file is None else trial_file(file)
    for choice, path in ((best, file), (trial, other)):
        if choice is not None and path is not None:
            write_run(question, choice, path, options.data_path)
    commands = Commands()
    if question.model.run is not None:
        commands = Commands(
            command(question, best, file, options.data_path),
            None if trial is None else command(question, trial, other, options.data_path),
        )
    if options.trace_out is not None:
        from memo.simulate.trace import trace_step

        config = config_of(question, best.layout, best.strategy)
        trace_step(config, question.gpus, question.hardware, options.trace_out, best.moved)
    if options.html is not None:
        from memo.report.plan_page import write_plan_page

        with waiting("writing the page") as doing:
            write_plan_page(plan, commands, options.html, doing)
    return commands


def _draw(question: Question, path: str) -> None:
    from memo.report.drawing import save_figure
    from memo.report.memory_drawing import draw_plans

    with waiting("drawing") as doing:
        plans = plans_by_length(question, doing)
    require(plans, f"--plot {path}: no sequence length fits on --gpus {question.gpus}: use more, or a smaller --model")
    title = (
        f"{question.model.name} on {question.gpus} x {question.hardware.name}, {question.global_batch_size} sequences "
        "a step: the fastest plan that fits"
    )
    save_figure(draw_plans(plans, path, title), path)
