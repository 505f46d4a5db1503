"""`memo profile`: one layer of a run, measured before there is a run."""

from collections.abc import Sequence
from dataclasses import dataclass

from memo.config import RunConfig
from memo.config.checks import check
from memo.config.derived import resolved_vocab_size, world_size_from_env
from memo.config.flags import parse_command
from memo.config.require import require
from memo.errors import is_reporting_rank

ABOUT = (
    "Measure one layer and the link to host memory, and print the plan that `memo train` would make with the same "
    "flags. Training then starts from what was measured. Takes every flag of `memo train`, also under torchrun; data "
    "are not read and need not be given."
)


@dataclass(frozen=True)
class _Options:
    """What is measured, and where it goes."""

    out: str | None = None
    """File for the layer's profile, for --layer-profile of `memo train`."""
    trace_out: str | None = None
    """File for the memory requests of one step, for `memo solve --trace`. The whole model is built and run for it;
    of several ranks the first writes its own."""
    on_paper: int | None = None
    """With --trace-out: trace the first rank of so many GPUs on shapes alone, in one process, without memory, and
    measure nothing. An estimate: scratch memory inside kernels is missing."""
    stage: int = 0
    """With --on-paper: the pipeline stage of that rank."""


def main(argv: Sequence[str]) -> None:
    """Raises MemoError for a run that cannot be, before torch is loaded where that is known by then."""
    config, options = parse_command(
        argv, _Options(), prog="memo profile", about=ABOUT, print_errors=is_reporting_rank()
    )
    require(
        config.memory.layer_profile is None,
        f"--layer-profile {config.memory.layer_profile} is of an earlier measurement, and memo profile measures: "
        "leave it out, or give it to memo train",
    )
    if config.data.data_path is None:
        config = config.override({"mock_data": True})
    if options.on_paper is not None:
        _trace_on_paper(config, options, options.on_paper)
        return
    require(options.stage == 0, f"--stage {options.stage} needs --on-paper: each real rank has its own stage")
    check(config, world_size_from_env())
    from memo.train.profile import profile_run

    profile_run(config, options.out, options.trace_out)


def _trace_on_paper(config: RunConfig, options: _Options, num_gpus: int) -> None:
    require(
        options.trace_out is not None and options.out is None,
        f"--on-paper {num_gpus} measures nothing and writes a trace: give --trace-out, and leave --out out",
    )
    stages = config.parallel.pp
    require(0 <= options.stage < stages, f"--stage is {options.stage}, but --pp {stages} has 0 to {stages - 1}")
    config = config.override({"device": "cpu", "vocab_size": resolved_vocab_size(config, None)})
    config = config.override({"params_dtype": config.training.params_dtype or "bf16"})
    check(config, num_gpus)
    from memo.train.paper import write_paper_trace

    write_paper_trace(config, num_gpus, options.stage, str(options.trace_out))
