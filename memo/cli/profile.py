"""`memo profile`: measures one layer of a run before the run."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from memo.config import RunConfig
from memo.config.check_fields import check_conflicts
from memo.config.checks import check
from memo.config.derived import resolved_vocab_size
from memo.config.flag import NonNegativeInt, PositiveInt, ReadWith
from memo.config.flags import parse_command
from memo.config.launching import check_ranks
from memo.config.require import require
from memo.config.simulated_world import with_simulated_axes

ABOUT = (
    "Measure one layer and the link to host memory, and print the plan that `memo train` would make with the same "
    "flags. Training then uses this profile. Takes every flag of `memo train`, also under torchrun; data are not read "
    "and need not be given."
)

EXAMPLES = (
    "memo profile --model llama-tiny --seq-len 4K",
    "torchrun --nproc-per-node 8 -m memo profile --model Llama-3.1-8B --tp 8 --seq-len 128K --attention",
    "memo profile --model llama-3.1-8b --tp 8 --seq-len 128K --on-paper 8 --trace-out trace.json",
)


@dataclass(frozen=True)
class _Options:
    out: str | None = None
    """File for the layer's profile, for --layer-profile of `memo train`."""
    trace_out: str | None = None
    """File for the memory requests of one step, for `memo solve --trace`. This builds and runs the whole model; with
    several ranks, rank 0 writes its requests."""
    managed_memory: Annotated[bool, ReadWith("trace_out", use="--trace-out FILE")] = False
    """On CUDA: serve that step from managed memory, as MEMO's profiler does, so that nothing fragments. Slow. A step
    that needs more than the free memory of the device is refused."""
    oversubscribe: Annotated[bool, ReadWith("managed_memory")] = False
    """Also record a step that is larger than the device. Its pages move to the host and back, and a device may hang;
    weights and optimizer states must fit."""
    on_paper: Annotated[PositiveInt | None, ReadWith("trace_out", use="--trace-out FILE")] = None
    """Trace the first rank of this number of GPUs from shapes alone, in one process without its
    memory, and measure nothing. An estimate: scratch memory inside kernels is missing."""
    stage: Annotated[NonNegativeInt, ReadWith("on_paper", use="--on-paper GPUS")] = 0
    """The pipeline stage of that rank."""
    attention: bool = False
    """First time every installed attention kernel that works on this device, on calls of this run's shape, and keep the
    times in --profile-cache for --attention-backend auto."""


_CONFLICTS = (("on_paper", ("out", "managed_memory", "attention"), "a trace on paper measures nothing on a device"),)


def main(argv: Sequence[str]) -> None:
    """Raises MemoError for a run that cannot start, if possible before torch is loaded."""
    config, options = parse_command(argv, _Options(), prog="memo profile", about=ABOUT, examples=EXAMPLES)
    require(
        config.memory.layer_profile is None,
        f"--layer-profile {config.memory.layer_profile} is of an earlier measurement, and memo profile measures: "
        "leave it out, or give it to memo train",
    )
    config = config.override({"num_epochs": None} | ({} if config.data.data_path else {"mock_data": True}))
    check_conflicts(options, _CONFLICTS)
    require(
        not options.attention or config.memory.profile_cache != "off",
        "--attention keeps its times in --profile-cache, which is off: give a directory",
    )
    if options.on_paper is not None:
        _trace_on_paper(config, options, options.on_paper)
        return
    config = with_simulated_axes(config)
    check_ranks(config, "memo profile", argv)
    from memo.train.profile import profile_run

    profile_run(
        config,
        options.out,
        options.trace_out,
        is_managed=options.managed_memory,
        oversubscribes=options.oversubscribe,
        attention=options.attention,
    )


def _trace_on_paper(config: RunConfig, options: _Options, num_gpus: int) -> None:
    stages = config.parallel.pp
    require(options.stage < stages, f"--stage is {options.stage}, but --pp {stages} has 0 to {stages - 1}")
    config = config.override({"device": "cpu", "vocab_size": resolved_vocab_size(config.model, None)})
    config = config.override({"params_dtype": config.training.params_dtype or "bf16"})
    check(config, num_gpus)
    from memo.train.paper import write_paper_trace

    write_paper_trace(config, num_gpus, options.stage, str(options.trace_out))
