"""Answers a case by memo's memory account: bytes by component, the verdict, and the simulated step.

The methods of the papers are in memo.papers.methods.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from memo.config import MemoryConfig, ParallelConfig, RunConfig, TrainingConfig
from memo.config.check_layout import check_batch, check_layout
from memo.config.check_memory import check_memory
from memo.config.check_model import check_model
from memo.config.data import DataConfig
from memo.errors import ConfigError, DiskError, HostMemoryError, PlanError
from memo.estimate.accounts import Account
from memo.estimate.attention_rates import device_of
from memo.estimate.calibration import FITS_SHARE, OOM_SHARE, USABLE_SHARE
from memo.estimate.cases import MEMO_LOSS_CHUNK, Case
from memo.estimate.disks import NVME_PATH
from memo.estimate.memory_account import cpu_context_bytes
from memo.estimate.memory_errors import FULL_SIZE
from memo.estimate.node_memory import node_bytes
from memo.estimate.program.memory import program_memory
from memo.estimate.rank_memory import WHOLE_LOGIT_BYTES, RankMemory, components
from memo.estimate.unseen_memory import NOTHING, Unseen, links_of
from memo.estimate.verdict import Capacity, Program, Verdict, judge, judge_capacity
from memo.search.swap_choice import choose_swap
from memo.simulate import StepPrediction, predict_step
from memo.simulate.trace import trace_step
from memo.spec.parameters import check_patterns_of
from memo.units import GIB

_MEGATRON_BOUND = (
    f"calibrated on 232 measured runs: unsure from {FITS_SHARE:.1%} to {OOM_SHARE:.1%} of the usable "
    f"{USABLE_SHARE:.1%} of the device"
)

_CPU_BOUND = (
    "the allocated peak in fp32 is within 1 % of measured ones; the resident set, with "
    "{:.2f} GiB of the process and of what malloc keeps, is foreseen 1.00 to 1.19 times as large as measured"
)


@dataclass(frozen=True)
class Answer:
    """Bytes of the GPU that needs most and of one node's host memory and disks, and the verdict on them.

    Attributes:
        host_bytes, disk_bytes: host memory is filled first.
        parts: bytes by component, as the method names them.
        bound: the evidence for the verdict, as text.
        is_tight: the case fits, but would not if CUDA and NCCL took somewhat more memory than predicted.
        moved: tiles by group that alpha auto moves; None if nothing moves or alpha is a number.
        step: the simulated step; None if it was not asked for, or if the activations that must move do not fit.
    """

    states_bytes: float
    activation_bytes: float
    total_bytes: float
    host_bytes: float
    verdict: Verdict
    parts: dict[str, float]
    bound: str
    moved: Mapping[str, int] | None = None
    step: StepPrediction | None = None
    disk_bytes: float = 0.0
    is_tight: bool = False

    @classmethod
    def of_rank(
        cls,
        rank: RankMemory,
        host_bytes: float,
        capacity: Capacity,
        bound: str,
        unseen: Unseen = NOTHING,
        **others: Any,
    ) -> "Answer":
        """Return the answer for the rank that needs most; `unseen` is an argument of `memo.estimate.verdict.judge`."""
        verdict = judge(rank.total, host_bytes, capacity, unseen)
        return cls(
            states_bytes=rank.states,
            activation_bytes=rank.activations,
            total_bytes=rank.total,
            host_bytes=host_bytes,
            verdict=verdict,
            is_tight=verdict == Verdict.FITS and capacity.is_tight(rank.total, unseen),
            parts={**components(rank)},
            bound=bound,
            **others,
        )


def answer(case: Case, *, is_timed: bool = False, trace_out: str | None = None) -> Answer:
    """Return the answer of memo's account of its own runs or, for method megatron-lm, of Megatron-LM's runs.

    If `is_timed`, a step is simulated too; it is written to the file `trace_out` if that is given. Raises ConfigError
    if memo cannot run the case.
    """
    if case.hardware.device == "cpu" and case.method != "memo":
        raise ConfigError(f"--method {case.method} knows GPUs alone, but the hardware is cpu: use --method memo")
    on_device = _on_cpu if case.hardware.device == "cpu" else _on_gpu
    found, config = on_device(case, capacity_of(case))
    if trace_out is not None:
        trace_step(config, case.gpus, case.hardware, trace_out, found.moved)
    if not is_timed:
        return found
    try:
        return replace(found, step=predict_step(config, case.gpus, case.hardware, found.moved))
    except (PlanError, HostMemoryError, DiskError):
        return found


def capacity_of(case: Case) -> Capacity:
    """Return the memory of the case's machine, with the program by whose measured runs it is judged."""
    program: Program = "megatron-lm" if case.method == "megatron-lm" else "memo"
    return Capacity(case.gpu_memory_gib * GIB, case.host_memory_gib * GIB, program)


def run_config(case: Case) -> RunConfig:
    """Return the checked configuration of the run that the case describes. Raises ConfigError."""
    config = RunConfig(
        model=case.shape.nearest,
        parallel=ParallelConfig(
            tensor_model_parallel_size=case.tp,
            context_parallel_size=case.cp,
            pipeline_model_parallel_size=case.pp,
            num_virtual_stages_per_pipeline_rank=case.vpp,
        ),
        memory=MemoryConfig(
            offload_alpha="off" if case.alpha is None else case.alpha,
            recompute_granularity=case.recompute,
            offload_nvme_path=NVME_PATH if case.nvme_gib and case.alpha is not None else None,
        ),
        training=TrainingConfig(
            micro_batch_size=case.mbs,
            global_batch_size=case.global_batch_size or _filling_batch(case),
            params_dtype="bf16" if case.hardware.device == "cuda" else "fp32",  # the trainer's defaults
            loss_chunk_size=case.loss_chunk_size or MEMO_LOSS_CHUNK,
            exp_avg_dtype=case.exp_avg_dtype,
            exp_avg_sq_dtype=case.exp_avg_sq_dtype,
        ),
        data=DataConfig(seq_length=case.seq_len),
        hardware=device_of(case.hardware, case.shape.nearest, case.deterministic, case.kernels),
    )
    # memo.config.checks.check would take half of a case's time. It is not needed: the ranges of single cells were
    # checked when they were read, and there is neither data nor an optimizer to check.
    check_model(config)
    check_patterns_of(config.model, config.data.seq_length)
    check_layout(config, case.gpus)
    check_batch(config, case.gpus)
    check_memory(config)
    return config


def _filling_batch(case: Case) -> int:
    """Return the sequences of the fewest microbatches that fill the pipeline; more add no activations in flight."""
    microbatches = case.pp if case.vpp == 1 else 2 * case.pp
    return case.mbs * (case.gpus // case.model_ranks) * microbatches


def _on_gpu(case: Case, capacity: Capacity) -> tuple[Answer, RunConfig]:
    """Return the answer for a GPU, and the run."""
    config, is_own = run_config(case), case.method == "memo"
    if is_own and not case.loss_chunk_size:
        raise ConfigError(
            "loss_chunk_size is 0, but memo's loss never has all logits at once: give a number of tokens, such as "
            f"{MEMO_LOSS_CHUNK}, leave it out, or ask about Megatron-LM with --method megatron-lm"
        )
    logit_bytes = None if case.loss_chunk_size else WHOLE_LOGIT_BYTES
    links = links_of(case.hardware)
    account = Account("memo" if is_own else "megatron-lm", case.shape, case.gpus, logit_bytes, links)
    moved = None
    if case.alpha == "auto":
        worst = account.worst(config)
        if judge(worst.total, 0, capacity, account.unseen(config, worst)) != Verdict.FITS:
            moved = choose_swap(config, account, case.hardware, capacity).tiles
        else:  # nothing moves
            config = replace(config, memory=replace(config.memory, offload_alpha="off", offload_nvme_path=None))
    what = case.alpha if isinstance(case.alpha, float) else moved
    rank = account.worst(config, what)
    host, disk = node_bytes(config, case.gpus, case.hardware, what, capacity.host_bytes)
    unseen = account.unseen(config, rank)
    bound = _own_bound(unseen, capacity, rank) if is_own else _MEGATRON_BOUND
    return Answer.of_rank(rank, host, capacity, bound, unseen, moved=moved, disk_bytes=disk), config


def _own_bound(unseen: Unseen, capacity: Capacity, rank: RankMemory) -> str:
    """Return how close the account is to the limit of what surely fits, and the evidence for the account."""
    least, foreseen, most = (size / GIB for size in unseen)
    room_gib = (capacity.sure_gpu_bytes - rank.total) / GIB
    return (
        f"{abs(room_gib):.2f} GiB {'less' if room_gib >= 0 else 'more'} than the {capacity.sure_gpu_bytes / GIB:.2f} "
        f"GiB that surely fit, of {capacity.usable_gpu_bytes / GIB:.2f} GiB that torch reports; CUDA and NCCL take "
        f"{foreseen:.2f} GiB beside torch (published figures: {least:.2f} to {most:.2f}); every request is "
        f"counted, within {FULL_SIZE.share:.2%} in {FULL_SIZE.runs} full-size runs on the emulated GPU"
    )


def _on_cpu(case: Case, capacity: Capacity) -> tuple[Answer, RunConfig]:
    """Return the answer for a CPU, and the run: the requests to torch's allocator, and the memory of the process."""
    if not case.loss_chunk_size:
        raise ConfigError(
            "loss_chunk_size is 0, as in Megatron-LM, but on a CPU memo itself runs, which never has all logits at "
            "once: give a number of tokens, such as 1024, or leave it out"
        )
    config = run_config(case)
    stages = range(config.parallel.pp)
    memory = max((program_memory(config, case.gpus, stage) for stage in stages), key=lambda stage: stage.total)
    context_bytes = cpu_context_bytes(memory.total, case.gpus)
    moved = case.alpha if isinstance(case.alpha, float) else None
    host, disk = node_bytes(config, case.gpus, case.hardware, moved, capacity.host_bytes)
    found = Answer(
        states_bytes=memory.states.device,
        activation_bytes=memory.total - memory.states.device,
        total_bytes=memory.total,
        host_bytes=host,
        verdict=judge_capacity(memory.total + context_bytes, capacity),
        parts=memory.main_components,
        bound=_CPU_BOUND.format(context_bytes / GIB),
        disk_bytes=disk,
    )
    return found, config
