"""`memo estimate`: memory and verdict for a table of cases, or for one case given by flags."""

import codecs
import csv
import itertools
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated

from memo.artifacts.reading import Source, opened, read_table
from memo.artifacts.regular_file import replacing
from memo.cli.job import Job
from memo.config.check_fields import check_conflicts
from memo.config.command_line import parse_options
from memo.config.flag import COUNT, TOKENS, Flag, ReadWith
from memo.config.flag_table import changed, dashed
from memo.config.memory import OffloadAlpha, RecomputeGranularity
from memo.config.model_name import check_planned_model
from memo.errors import ConfigError, writing
from memo.estimate.cases import COLUMNS, COUNTED, Case, Method, read_case
from memo.papers.methods import answer_by_paper
from memo.search.costs import pinning
from memo.search.estimating import Answer, answer
from memo.spec.foreseen_kernels import foreseen_kernels
from memo.standard_streams import visible
from memo.units import GIB

EXAMPLES = (
    "memo estimate --model llama-3.1-8b --seq-len 64K --tp 4 --gpus 8 --hardware h100-94",
    "memo estimate --cases in.csv --out out.csv",
)
SIZES = {
    "states_gib": "states_bytes",
    "activations_gib": "activation_bytes",
    "total_gib": "total_bytes",
    "host_gib": "host_bytes",
    "disk_gib": "disk_bytes",
}
"""{column: the field of `Answer`}."""
TIMES = ("step_time_s", "tflops_per_gpu", "mfu_percent", "tgs")
ADDED = (*SIZES, "verdict", *TIMES)
"""Columns of the output; columns of time are filled for the methods memo and megatron-lm."""
_OF_TABLES = ("cases", "out", "llmem_corrected")
"""Flags that go with a table of cases."""


@dataclass(frozen=True, kw_only=True)
class _Options(Job):
    """Estimate memory of training, and say whether it fits: fits, unsure, oom or oohm (out of host memory).

    The methods memo and megatron-lm also simulate the time of a step. TFLOP/s and MFU count model FLOPs with the
    causal half of attention, as `memo train` prints them; papers that count attention in full print more for the
    same speed.

    Every flag that describes the case is also a column of the CSV file; an empty cell takes the default.
    """

    gpus: int | None = None
    """All GPUs; default: tp x cp x pp."""
    global_batch_size: Annotated[int | None, COUNT, Flag(aliases=("gbs",))] = None
    """Sequences in one step; default: as many microbatches as fill the pipeline."""
    tp: int | None = None
    """Tensor-parallel ranks, 1 by default like cp, pp, vpp and mbs."""
    cp: int | None = None
    """Context-parallel ranks."""
    pp: int | None = None
    """Pipeline stages."""
    vpp: int | None = None
    """Chunks of layers per stage (interleaved 1F1B)."""
    mbs: int | None = None
    """Sequences in one microbatch."""
    alpha: OffloadAlpha | None = None
    """Share of the tokens whose activations move to the host, 0 to 1; auto: the best share within memory and time; off
    (default): none."""
    recompute: RecomputeGranularity | None = None
    """none (default), selective or full; conflicts with alpha."""
    loss_chunk_size: Annotated[int | None, TOKENS] = None
    """Tokens whose logits exist at once; default: 1024, as in the trainer; for megatron-lm without alpha 0: all."""
    method: Method = "memo"
    """Program to estimate: memo or megatron-lm; or a paper's formulas: eq18, llmem, dnnmem, paper-alpha."""
    llmem_corrected: bool = False
    """llmem: use corrected formulas, which reproduce every printed row, instead of the printed formulas."""
    cases: str | None = None
    """CSV file with one case in each row; needs --out, and takes no other flag except --llmem-corrected."""
    out: Annotated[str | None, ReadWith("cases", use="--cases FILE")] = None
    """CSV file to write: all columns of the input and the answers."""
    trace_out: Annotated[str | None, ReadWith("method", COUNTED)] = None
    """File for the simulated step, which https://ui.perfetto.dev opens."""
    json: bool = False
    """Print one JSON object instead of a table."""


def main(argv: Sequence[str]) -> None:
    """Raises ConfigError for files that cannot be read or written, and cases that cannot be estimated."""
    options = parse_options(_Options, argv, prog="memo estimate", examples=EXAMPLES)
    of_a_case = tuple(field.name for field in fields(options) if field.name not in _OF_TABLES)
    check_conflicts(options, (("cases", of_a_case, "each row says it by a column, or it is for one case"),))
    if options.cases is None:
        _case(options)
    else:
        _table(options.cases, options)


def _case(options: _Options) -> None:
    """Answer one case, given by flags."""
    if options.model is None:
        raise ConfigError("--model is not given: name a preset or a config.json, or give --cases, a table of models")
    check_planned_model(options.model)
    given = {name: value for name, value in changed(options).items() if name in COLUMNS}
    cells = {name: "true" if value is True else str(value).removesuffix(".0") for name, value in given.items()}
    case = read_case(cells, "memo estimate")
    result = _located("memo estimate", case, options)
    print(json.dumps(_as_object(case, result), indent=1) if options.json else _text(case, result))


def _table(cases: str, options: _Options) -> None:
    """Answer a table of cases. Each row is written at once, so a table of any length needs the memory of one row. The
    file appears when all rows are answered: a bad cell leaves no partial file."""
    if options.out is None:
        raise ConfigError(f"--cases {cases} needs a file for the answers, but --out is not given: give both")
    rows = _answered(Path(cases), options)
    names, num_cases = list(next(rows)), 0
    added = [name for name in ADDED if name not in names]
    with writing(f"--out {options.out}", ConfigError), replacing(options.out) as file:
        writer = csv.DictWriter(codecs.getwriter("utf-8")(file), [*names, *added])
        writer.writeheader()
        for row in rows:
            writer.writerow(row)
            num_cases += 1
    print(f"{options.out}: {num_cases} cases")
    if unread := [name for name in names if name not in (*COLUMNS, *ADDED)]:
        print(f"passed through unread: {visible(', '.join(unread))}; known columns: {', '.join(COLUMNS)}")
    if replaced := [name for name in names if name in ADDED]:
        print(f"replaced by the answers: {', '.join(replaced)}")


def _answered(path: Path, options: _Options) -> Iterator[dict[str, str]]:
    """Yield the columns, as keys, and then each row with its answers."""
    source = Source(f"--cases {path}", ConfigError, "give the path of a CSV file in UTF-8")
    with opened(path, source) as file:
        rows = read_table(file, source)
        names = [name.strip() for name in next(rows, (0, []))[1]]
        if doubled := [name for name, count in Counter(names).items() if count > 1]:
            raise source.refusal(f"the column {doubled[0]} stands there twice", "keep one")
        if "model" not in names:
            raise source.refusal("line 1: there is no column model", f"add it, and any of {', '.join(COLUMNS)}")
        yield dict.fromkeys(names, "")
        for number, cells in rows:
            if not cells:  # a blank line
                continue
            where = f"{path}: line {number}"
            if len(cells) > len(names):
                beyond = cells[len(names)]
                raise ConfigError(f"{where}: {beyond!r} stands beyond the last column: remove it, or quote commas")
            row = dict(itertools.zip_longest(names, cells, fillvalue=""))
            yield row | _row(_located(where, read_case(row, where), options))


_FLAG_COLUMNS = {
    "--seq-length": "seq_len",
    "--micro-batch-size": "mbs",
    "--global-batch-size": "global_batch_size",
    "--offload-alpha": "alpha",
    "--recompute-granularity": "recompute",
    **{dashed(name): name for name in ("tp", "cp", "pp", "vpp")},
}


def _located(where: str, case: Case, options: _Options) -> Answer:
    """Answer a case; in messages of a run's checks, names of flags become names of columns."""
    try:
        if case.method not in COUNTED:
            return answer_by_paper(case, llmem_corrected=options.llmem_corrected)
        return answer(case, is_timed=True, trace_out=options.trace_out)
    except ConfigError as error:
        text = str(error)
        for flag, column in _FLAG_COLUMNS.items():
            text = text.replace(f"{flag} ", f"{column} ")
        raise ConfigError(f"{where}: {text}") from None


def _row(result: Answer) -> dict[str, str]:
    sizes = {name: f"{size_gib:.6f}" for name, size_gib in _sizes(result).items()}
    times = {name: str(value) for name, value in _times(result).items()}
    return sizes | {"verdict": str(result.verdict)} | dict.fromkeys(TIMES, "") | times


def _sizes(result: Answer) -> dict[str, float]:
    """{column: GiB}."""
    return {name: getattr(result, field) / GIB for name, field in SIZES.items()}


def _times(result: Answer) -> dict[str, float]:
    return {} if result.step is None else {name: getattr(result.step, name) for name in TIMES}


def _text(case: Case, result: Answer) -> str:
    sizes = [
        *((name, num_bytes / GIB, "") for name, num_bytes in result.parts.items() if name != "host"),
        ("total", result.total_bytes / GIB, ""),
        ("of one GPU", case.gpu_memory_gib, ""),
        *([("host, one node", result.host_bytes / GIB, case.host_memory_gib)] if result.host_bytes else []),
        *([("NVMe, one node", result.disk_bytes / GIB, case.nvme_gib)] if result.disk_bytes else []),
    ]
    lines = [f"  {name:<18}{size:>12,.3f} GiB" + (f" of {room:,.1f} GiB" if room else "") for name, size, room in sizes]
    if case.alpha == "auto":
        lines.append(f"  {'alpha auto':<18}{_moved(result.moved)}")
    lines += [f"  {name:<18}{value:>12,.3f}" for name, value in _times(result).items()]
    lines += [case.node_share] if case.node_share and result.host_bytes else []
    lines += pinning(int(result.host_bytes)) if case.hardware.device == "cuda" else []
    lines += filter(None, [_kernels(case)])
    tight = ", tight" if result.is_tight else ""
    return "\n".join([_title(case), *lines, f"verdict: {result.verdict}{tight} ({result.bound})"])


def _kernels(case: Case) -> str | None:
    return foreseen_kernels(case.shape.nearest) if case.method == "memo" else None


def _moved(tiles: Mapping[str, int] | None) -> str:
    if tiles is None:
        return "nothing moves: all activations fit on the GPU"
    return "input, attention output, and tiles of " + ", ".join(f"{name} {count}" for name, count in tiles.items())


def _title(case: Case) -> str:
    layout = ", ".join(f"{name} {getattr(case, name)}" for name in ("tp", "cp", "pp", "mbs", "gpus"))
    alpha = "" if case.alpha is None else f", alpha {case.alpha}"
    repeats = ", deterministic" if case.deterministic else ""
    repeats += "" if case.kernels == "torch" else f", kernels {case.kernels}"
    narrow = "".join(f", {each} bf16" for each in ("exp_avg", "exp_avg_sq") if getattr(case, f"{each}_dtype") == "bf16")
    lora = f", LoRA of rank {case.lora_rank}" if case.lora_rank else ""
    lora += "" if case.quantize == "none" else f", {case.quantize}"
    lora += ", frozen in part" if case.freeze or case.train_only else ""
    asked = f"{layout}{alpha}{lora}{narrow}{repeats}"
    return f"{case.method}: {case.model}, {case.seq_len:,} tokens, {asked}, {case.hardware.name}"


def _as_object(case: Case, result: Answer) -> Mapping[str, object]:
    return {
        **{name: getattr(case, name) for name in COLUMNS if name != "hardware"},
        "hardware": case.hardware.name,
        "parameters": case.shape.parameters,
        "foreseen_kernels": _kernels(case),
        **_sizes(result),
        "verdict": str(result.verdict),
        "tight": result.is_tight,
        "bound": result.bound,
        "parts_bytes": result.parts,
        "moved_tiles": result.moved,
        **(dict.fromkeys(TIMES) | _times(result)),
    }
