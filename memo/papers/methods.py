"""Answers a case by the method of a paper (eq18, llmem, dnnmem, paper-alpha): bytes by component, and the verdict.

eq18              fits <= 80 % of the capacity, oom > 100 %, unsure between (the paper's zones)
llmem, dnnmem     fits up to the capacity, as in LLMem's Algorithm 1
paper-alpha       MEMO's system: the calibrated verdict on its GPU and host memory, with alpha by its equations 1 to 3
"""

from collections.abc import Callable
from dataclasses import replace

from memo.config import RunConfig
from memo.config.derived import resolved_dtype
from memo.errors import ConfigError, HostMemoryError, PlanError
from memo.estimate.cases import Case
from memo.estimate.verdict import Capacity, Verdict, judge_capacity
from memo.papers import llmem, memo_paper
from memo.papers.dnnmem import dnnmem
from memo.papers.eq18 import eq18, zone
from memo.planner.alpha import solve_paper
from memo.search.estimating import Answer, capacity_of, run_config
from memo.simulate.kernels import Kernels
from memo.simulate.layer import plain_layer
from memo.units import GIB


def answer_by_paper(case: Case, *, llmem_corrected: bool = False) -> Answer:
    """Answer a case by `case.method`, which is not "memo". Raises ConfigError for a case outside the paper's scope.

    Args:
        llmem_corrected: for llmem, use the formulas that select every printed row of the paper.
    """
    capacity = capacity_of(case)
    if case.method == "eq18":
        return _by_eq18(case, capacity)
    if case.method == "llmem":
        return _by_llmem(case, capacity, llmem_corrected)
    if case.method == "paper-alpha":
        return _by_paper_alpha(case, capacity)
    return _by_dnnmem(case, capacity)


def _answer(parts: dict[str, float], verdict: Callable[[float], Verdict], bound: str) -> Answer:
    """`parts`: states first, then activations, then all other bytes of the total; nothing is in host memory."""
    states_bytes, activation_bytes, *_ = parts.values()
    total_bytes = sum(parts.values())
    return Answer(states_bytes, activation_bytes, total_bytes, 0, verdict(total_bytes), parts, bound)


def _by_eq18(case: Case, capacity: Capacity) -> Answer:
    estimate = eq18(case.shape, case.seq_len, case.tp, case.cp, case.pp, case.mbs, case.gpus)
    return _answer(
        {"states": estimate.states_bytes, "activations": estimate.activation_bytes},
        lambda total_bytes: zone(total_bytes, capacity.gpu_bytes),
        "the paper's zones: fits up to 80 % of the capacity, oom above all of it",
    )


def _by_llmem(case: Case, capacity: Capacity, corrected: bool) -> Answer:
    """Answer by LLMem: for tp 1 CDP on one GPU and ADP on several; for tp = gpus TP; else DP+TP."""
    if case.cp * case.pp > 1:
        raise ConfigError(f"cp {case.cp}, pp {case.pp}: llmem knows data and tensor parallelism alone: set both to 1")
    setting = llmem.Setting(case.shape, case.seq_len, case.gpus, case.tp, corrected)
    method = llmem.Method.DP_TP
    if case.tp == 1:
        method = llmem.Method.CDP if case.gpus == 1 else llmem.Method.ADP
    elif case.tp == case.gpus:
        method = llmem.Method.TP
    peak = llmem.peak(setting, method, case.mbs)
    return _answer(
        {"states": peak.states_bytes, "activations": peak.activation_bytes, "base": peak.base_bytes},
        lambda total_bytes: judge_capacity(total_bytes, capacity),
        f"{method}{', corrected' if corrected else ''}: fits up to the capacity, as Algorithm 1",
    )


def _by_paper_alpha(case: Case, capacity: Capacity) -> Answer:
    """Answer with the given alpha, else with `_paper_alpha`; pinned blocks are rounded up to powers of two."""
    if case.hardware.device == "cpu" or case.recompute != "none":
        named = "--hardware cpu" if case.hardware.device == "cpu" else f"recompute {case.recompute}"
        raise ConfigError(f"{named} conflicts with --method paper-alpha, whose system swaps on GPUs: use --method memo")
    config = run_config(replace(case, alpha="auto" if case.alpha is None else case.alpha, nvme_gib=0.0))
    config = replace(config, memory=replace(config.memory, offload_policy="paper"))
    tokens, ranks = case.seq_len * case.mbs, case.hardware.local_ranks(case.gpus)

    def node_bytes(alpha: float) -> float:
        rank = memo_paper.host_bytes(config.model, tokens, alpha, case.tp, case.cp, powers_of_two=True)
        return ranks * rank / case.pp

    alpha, why = (case.alpha, "as given") if isinstance(case.alpha, float) else _paper_alpha(case, config, node_bytes)
    rank = memo_paper.gpu_memory(config, case.gpus, alpha)
    bound = f"alpha {alpha:g}, {why}; an account that tells 62 of 64 marks of the paper's tables 4 and 7"
    return Answer.of_rank(rank, node_bytes(alpha), capacity, bound)


def _paper_alpha(case: Case, config: RunConfig, node_bytes: Callable[[float], float]) -> tuple[float, str]:
    """(alpha, reason): the largest alpha of the paper's program, rounded down to eighths as in its tables and to the
    node's memory; 0 if no alpha meets the equations.

    T_layer is the simulated time of a layer that works on all tokens at once.
    """
    tokens, ranks = case.seq_len * case.mbs, case.hardware.local_ranks(case.gpus)
    try:
        found = solve_paper(
            memo_paper.always_bytes(config.model, tokens, case.tp, case.cp),
            memo_paper.other_bytes(config.model, tokens, case.tp, case.cp),
            plain_layer(config, Kernels(case.hardware, resolved_dtype(config.training, "cuda"))).forward.total_s,
            case.hardware.offload_gb_per_s * 1e9,
            case.shape.nearest.num_layers // case.pp,
            case.host_memory_gib * GIB / ranks,
        )
    except (PlanError, HostMemoryError) as error:
        return 0.0, f"equations 1 to 3 allow none ({error})"
    eighths = (count / 8 for count in range(8, -1, -1) if count / 8 <= found.alpha)
    fitting = (share for share in eighths if node_bytes(share) <= case.host_memory_gib * GIB)
    return next(fitting, 0.0), f"equations 1 to 3 allow {found.alpha:.3f}, limited by {found.limit}"


def _by_dnnmem(case: Case, capacity: Capacity) -> Answer:
    if case.gpus > 1:
        raise ConfigError(f"gpus {case.gpus}: dnnmem knows one GPU alone: set gpus to 1")
    estimate = dnnmem(replace(case.shape, name=""), case.seq_len, case.mbs)
    return _answer(
        {"weights": estimate.weight_bytes, "live": estimate.live_bytes, "overhead": estimate.overhead_bytes},
        lambda total_bytes: judge_capacity(total_bytes, capacity),
        "fits up to the capacity; 34 to 43 % below measured peaks in LLMem's table 2",
    )
