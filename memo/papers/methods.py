"""Answers a case by the method of a paper: eq18, llmem or dnnmem; bytes by component, and the verdict.

eq18              fits <= 80 % of the capacity, oom > 100 %, unsure between (the paper's zones)
llmem, dnnmem     fits up to the capacity, as LLMem's Algorithm 1 has it
"""

from dataclasses import replace

from memo.errors import ConfigError
from memo.estimate.answer import Answer
from memo.estimate.cases import Case
from memo.estimate.verdict import Capacity, Verdict, judge_capacity
from memo.papers import llmem
from memo.papers.dnnmem import dnnmem
from memo.papers.eq18 import Layout, Zone, eq18, zone
from memo.units import GIB

_VERDICTS = {Zone.GREEN: Verdict.FITS, Zone.YELLOW: Verdict.UNSURE, Zone.RED: Verdict.OOM}


def answer_by_paper(case: Case, *, llmem_corrected: bool = False) -> Answer:
    """By `case.method`, which is not "memo". Raises ConfigError for a layout that the paper does not know.

    Args:
        llmem_corrected: llmem with the formulas that select every row that its paper prints.
    """
    capacity = Capacity(case.gpu_memory_gib * GIB, case.host_memory_gib * GIB)
    if case.method == "eq18":
        return _by_eq18(case, capacity)
    if case.method == "llmem":
        return _by_llmem(case, capacity, llmem_corrected)
    return _by_dnnmem(case, capacity)


def _by_eq18(case: Case, capacity: Capacity) -> Answer:
    estimate = eq18(case.shape, Layout(case.seq_len, case.tp, case.cp, case.pp, case.mbs, case.gpus))
    return Answer(
        states_bytes=estimate.states_bytes,
        activation_bytes=estimate.activation_bytes,
        total_bytes=estimate.total_bytes,
        host_bytes=0,
        verdict=_VERDICTS[zone(estimate.total_bytes, capacity.gpu_bytes)],
        parts={"states": estimate.states_bytes, "activations": estimate.activation_bytes},
        bound="the paper's zones: fits up to 80 % of the capacity, oom above all of it",
    )


def _by_llmem(case: Case, capacity: Capacity, corrected: bool) -> Answer:
    """tp 1: CDP on one GPU, ADP on several; tp = gpus: TP; else DP+TP."""
    if case.cp * case.pp > 1:
        raise ConfigError(f"cp {case.cp}, pp {case.pp}: llmem knows data and tensor parallelism alone: set both to 1")
    setting = llmem.Setting(case.shape, case.seq_len, case.gpus, case.tp, corrected)
    method = llmem.Method.DP_TP
    if case.tp == 1:
        method = llmem.Method.CDP if case.gpus == 1 else llmem.Method.ADP
    elif case.tp == case.gpus:
        method = llmem.Method.TP
    peak = llmem.peak(setting, method, case.mbs)
    return Answer(
        states_bytes=peak.states_bytes,
        activation_bytes=peak.activation_bytes,
        total_bytes=peak.total_bytes,
        host_bytes=0,
        verdict=judge_capacity(peak.total_bytes, capacity),
        parts={"states": peak.states_bytes, "activations": peak.activation_bytes, "base": peak.base_bytes},
        bound=f"{method}{', corrected' if corrected else ''}: fits up to the capacity, as Algorithm 1",
    )


def _by_dnnmem(case: Case, capacity: Capacity) -> Answer:
    if case.gpus > 1:
        raise ConfigError(f"gpus {case.gpus}: dnnmem knows one GPU alone: set gpus to 1")
    estimate = dnnmem(replace(case.shape, name=""), case.seq_len, case.mbs)
    return Answer(
        states_bytes=estimate.weight_bytes,
        activation_bytes=estimate.live_bytes,
        total_bytes=estimate.total_bytes,
        host_bytes=0,
        verdict=judge_capacity(estimate.total_bytes, capacity),
        parts={"weights": estimate.weight_bytes, "live": estimate.live_bytes, "overhead": estimate.overhead_bytes},
        bound="fits up to the capacity; 34 to 43 % below measured peaks in LLMem's table 2",
    )
