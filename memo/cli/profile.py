"""`memo profile`: measures one layer of a run before the run."""

from collections.abc import Sequence
from dataclasses import dataclass

from memo.config import RunConfig
from memo.config.checks import check
from memo.config.derived import resolved_vocab_size
from memo.config.flags import parse_command
from memo.config.launching import check_ranks
from memo.config.require import require, require_count
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
    """Options besides those of a run."""

    out: str | None = None
    """File for the layer's profile, for --layer-profile of `memo train`."""
    trace_out: str | None = None
    """File for the memory requests of one step, for `memo solve --trace`. This builds and runs the whole model; with
    several ranks, rank 0 writes its requests."""
    managed_memory: bool = False
    """With --trace-out, on CUDA: serve that step from managed memory, as MEMO's profiler does, so that nothing
    fragments. Slow. A step that needs more than the free memory of the device is refused."""
    oversubscribe: bool = False
    """With --managed-memory: also record a step that is larger than the device. Its pages move to the host and back,
    and a device may hang; weights and optimizer states must fit."""
    on_paper: int | None = None
    """With --trace-out: trace the first rank of this number of GPUs from shapes alone, in one process without its
    memory, and measure nothing. An estimate: scratch memory inside kernels is missing."""
    stage: int = 0
    """With --on-paper: the pipeline stage of that rank."""
    attention: bool = False
    """First time every installed attention kernel that works on this device, on calls of this run's shape, and keep the
    times in --profile-cache for --attention-backend auto."""


def main(argv: Sequence[str]) -> None:
    """Raises MemoError for a run that cannot start, if possible before torch is loaded."""
    config, options = parse_command(argv, _Options(), prog="memo profile", about=ABOUT, examples=EXAMPLES)
    require(
        config.memory.layer_profile is None,
        f"--layer-profile {config.memory.layer_profile} is of an earlier measurement, and memo profile measures: "
        "leave it out, or give it to memo train",
    )
    config = config.override({"num_epochs": None} | ({} if config.data.data_path else {"mock_data": True}))
    _check_managed(options)
    require(
        not options.attention or (config.memory.profile_cache != "off" and options.on_paper is None),
        f"--attention measures on this device and keeps the times in --profile-cache, but --profile-cache is "
        f"{config.memory.profile_cache} and --on-paper is {options.on_paper}: give a directory, and no --on-paper",
    )
    if options.on_paper is not None:
        _trace_on_paper(config, options, options.on_paper)
        return
    require(options.stage == 0, f"--stage {options.stage} needs --on-paper: each real rank has its own stage")
    config = with_simulated_axes(config)
    check_ranks(config, "memo profile", argv)
    from memo.train.profile import TraceOptions, profile_run

    recording = None
    if options.trace_out is not None:
        recording = TraceOptions(options.trace_out, options.managed_memory, options.oversubscribe)
    profile_run(config, options.out, recording, options.attention)


def _check_managed(options: _Options) -> None:
    require(
        not options.managed_memory or (options.trace_out is not None and options.on_paper is None),
        f"--managed-memory serves the step that --trace-out records on a device, but --trace-out is "
        f"{options.trace_out} and --on-paper is {options.on_paper}: give the first without the second",
    )
    require(
        options.managed_memory or not options.oversubscribe,
        "--oversubscribe needs --managed-memory: no other memory can be larger than the device",
    )


def _trace_on_paper(config: RunConfig, options: _Options, num_gpus: int) -> None:
    require_count("--on-paper", num_gpus)
    require(
        options.trace_out is not None and options.out is None,
        f"--on-paper {num_gpus} measures nothing and writes a trace: give --trace-out, and leave --out out",
    )
    stages = config.parallel.pp
    require(0 <= options.stage < stages, f"--stage is {options.stage}, but --pp {stages} has 0 to {stages - 1}")
    config = config.override({"device": "cpu", "vocab_size": resolved_vocab_size(config.model, None)})
    config = config.override({"params_dtype": config.training.params_dtype or "bf16"})
    check(config, num_gpus)
    from memo.train.paper import write_paper_trace

    write_paper_trace(config, num_gpus, options.stage, str(options.trace_out))
