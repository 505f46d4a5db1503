"""Sweeping layers section by section: any alpha, any number of tiles in a slot and recomputed attention, the same bits.

torch.equal on the loss and on every gradient, against alpha = 0 with one tile in a slot, unpoisoned buffers and eager
copies; all others run with buffers poisoned, copies late, at random moments or in threads, and every access checked.
What is comparable: runs on the same number of tiles. Another number of tiles, and layers that are not swept, cut
attention and matrices elsewhere. In fp64 a swept run agrees with the plain model to 1e-12 of the largest value; in fp32
and bf16 it may be at most twice as wrong as the plain model itself is against fp64.

The packed documents of the mock data cross tiles and sections in every layout.
"""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from layouts import assemble, relative_error, tiny
from ranks import run_ranks
from swapped_steps import Copies, Workplace, differences, observed, profiled_once, references
from torch import Tensor

from memo.config.derived import layers_per_chunk
from memo.executor.runtime import SweepRuntime
from memo.parallel.dtypes import torch_dtype
from memo.spec import reach
from memo_kernels import wide_dtype

TILES = 8
DTYPES = ("fp64", "fp32", "bf16")
ONE_STAGE: dict[str, Any] = {"num_layers": 3, "global_batch_size": 1}
TWO_STAGES: dict[str, Any] = {"pp": 2, "num_layers": 4, "global_batch_size": 3}
UNTIED: dict[str, Any] = {"untie_embeddings_and_output_weights": True}
BREADTH_FIRST: dict[str, Any] = {"gradient_accumulation_order": "breadth_first", "global_batch_size": 2}
GATHERED: dict[str, Any] = {"cp": 2, "cp_comm_type": "all_gather"}
EXCHANGED: dict[str, Any] = {"cp": 2, "cp_comm_type": "a2a"}
KINDS: dict[str, Any] = {"window_size": 11, "layer_types": "sliding,full", "attention_sinks": True}
KINDS |= {"attention_output_gate": True}
BETWEEN = {"layer_types": "full,linear"}
"""A gated delta net, which has no keys and values, between layers that have some."""
CASES: dict[str, tuple[int, str, dict[str, Any]]] = {
    "gpt": (1, "gpt-tiny", {**ONE_STAGE, "micro_batch_size": 2, "global_batch_size": 2}),
    "gpt2": (1, "gpt2-tiny", ONE_STAGE),  # biases, LayerNorm, learned positions
    "llama": (1, "llama-tiny", ONE_STAGE),  # fewer key/value heads
    "kinds": (1, "llama-tiny", {**ONE_STAGE, **KINDS}),
    # A window in all layers: with one tile in a slot the device does not hold the keys of the whole sequence.
    "window": (1, "llama-tiny", {**ONE_STAGE, "window_size": 11}),
    "pp2 window": (2, "llama-tiny", {**TWO_STAGES, "window_size": 5}),
    "cp2 all_gather window": (2, "llama-tiny", {**GATHERED, **ONE_STAGE, "window_size": 11}),
    "cp2 a2a window": (2, "qwen3-tiny", {**EXCHANGED, **ONE_STAGE, "window_size": 17}),
    "qwen3": (1, "qwen3-tiny", ONE_STAGE),  # normed heads: the slot holds them unrotated, the store rotated
    "norms around": (1, "gemma-3-tiny", {**ONE_STAGE, "window_size": 11}),
    "delta nets": (1, "qwen3.5-tiny", {**ONE_STAGE, **BETWEEN}),
    "cp2 a2a delta nets": (2, "qwen3.5-tiny", {**EXCHANGED, **ONE_STAGE, **BETWEEN}),
    "norms after": (1, "olmo-3-tiny", {**ONE_STAGE, "window_size": 11}),
    "tp2 norms across heads": (2, "olmo-3-tiny", {"tp": 2, **ONE_STAGE, "window_size": 11}),
    "experts": (1, "qwen3-moe-tiny", ONE_STAGE),
    "experts in some layers": (
        1,
        "qwen3-moe-tiny",
        {**ONE_STAGE, "moe_layer_freq": "[1,0,1]", "ffn_hidden_size": 176, "moe_ffn_hidden_size": 48}
        | {"moe_shared_expert_intermediate_size": 40, "moe_shared_expert_gate": True, "rotary_percent": 0.25},
    ),
    "breadth first": (1, "llama-tiny", {**ONE_STAGE, **BREADTH_FIRST}),
    "tp2": (2, "llama-tiny", {"tp": 2, **ONE_STAGE}),
    "pp2 1F1B": (2, "gpt-tiny", TWO_STAGES),
    "pp2 interleaved": (2, "llama-tiny", {"vpp": 2, **TWO_STAGES, "global_batch_size": 4, **UNTIED}),
    "dp2": (2, "gpt-tiny", {**ONE_STAGE, "micro_batch_size": 2, "global_batch_size": 8}),
    "cp2 all_gather": (2, "llama-tiny", {**GATHERED, **ONE_STAGE, **KINDS}),  # fewer key/value heads
    "cp2 a2a": (2, "gpt-tiny", {**EXCHANGED, **ONE_STAGE, "micro_batch_size": 2, "global_batch_size": 2}),
    "cp2 a2a normed heads": (2, "qwen3-tiny", {**EXCHANGED, **ONE_STAGE}),
    "cp4 all_gather": (4, "gpt-tiny", {**GATHERED, **ONE_STAGE, "cp": 4}),
    "tp2 cp2 all_gather": (4, "gpt-tiny", {"tp": 2, **GATHERED, **ONE_STAGE}),
    "tp2 cp2 a2a": (4, "gpt-tiny", {"tp": 2, **EXCHANGED, **ONE_STAGE}),
    "tp2 cp2 norms across heads": (
        4,
        "olmo-3-tiny",
        {"tp": 2, **EXCHANGED, **ONE_STAGE, "window_size": 11, "num_query_groups": 4},
    ),
    "tp2 pp2": (4, "llama-tiny", {"tp": 2, **TWO_STAGES}),
    "cp2 pp2 all_gather": (4, "gpt2-tiny", {**GATHERED, **TWO_STAGES}),
    "cp2 pp2 a2a": (4, "llama-tiny", {**EXCHANGED, **TWO_STAGES, **KINDS}),
    "cp2 dp2 all_gather": (4, "llama-tiny", {**GATHERED, **ONE_STAGE, "global_batch_size": 4}),
    "cp2 dp2 a2a": (4, "llama-tiny", {**EXCHANGED, **ONE_STAGE, "global_batch_size": 4}),
    "tp2 pp2 dp2": (8, "gpt2-tiny", {"tp": 2, **TWO_STAGES, "global_batch_size": 4}),
    "4 bits": (1, "qwen3-tiny", {**ONE_STAGE, "lora_rank": 3, "quantize": "nf4"}),
    "frozen layers": (1, "gpt2-tiny", {**ONE_STAGE, "freeze": "*embedding.weight,layers.1.*,*mlp.fc2*"}),
    "tp2 cp2 adapters": (4, "qwen3-tiny", {"tp": 2, **EXCHANGED, **ONE_STAGE, "lora_rank": 3, "num_query_groups": 4}),
}


@dataclass(frozen=True)
class Sweep:
    """One way to run the same tiles."""

    slot_tiles: int
    alpha: float
    policy: str
    copies: Copies
    again: int = 0
    """Layers of a stage that recompute attention, as far as it has so many."""
    hidden: bool = False
    """Whether hidden states are in host memory."""


SWEEPS = (
    Sweep(1, 0.0, "auto", "lazy"),
    Sweep(1, 1.0, "auto", "random", again=2, hidden=True),
    Sweep(2, 0.5, "auto", "lazy", hidden=True),
    Sweep(2, 0.5, "paper", "random", again=1),
    Sweep(4, 0.25, "auto", "threads", again=2, hidden=True),
    Sweep(4, 1.0, "paper", "lazy"),
    Sweep(8, 0.625, "auto", "random"),
    Sweep(1, 0.0, "auto", "lazy", again=3, hidden=True),
    Sweep(2, 0.0, "paper", "random", again=1, hidden=True),
)


def sweeps_of(name: str, dtype: str) -> Sequence[Sweep]:
    """All ways for one process in fp64; else a few of them, which cases and dtypes take in turn. Of several stages
    some have hidden states in host memory in each.

    What moves is a matter of one rank, and of bytes rather than of their dtype.
    """
    if CASES[name][0] == 1 and dtype == "fp64":
        return SWEEPS
    turn = list(CASES).index(name) + 2 * DTYPES.index(dtype)
    taken = [SWEEPS[turn % len(SWEEPS)], SWEEPS[(turn + 3) % len(SWEEPS)]]
    if "pp2" in name and not any(sweep.hidden for sweep in taken):  # they pass from stage to stage otherwise
        taken.append(next(sweep for sweep in SWEEPS[turn % 6 :] if sweep.hidden))
    return taken


def test_cases_share_every_way() -> None:
    for dtype in DTYPES:
        assert {sweep for name in CASES for sweep in sweeps_of(name, dtype)} == set(SWEEPS)


@dataclass
class Findings:
    """What one rank found: runs that differ and in what; copies of a step, by run; results by name of the run."""

    unequal: list[str] = field(default_factory=list)
    moves: list[tuple[int, int, int]] = field(default_factory=list)
    results: dict[str, dict[str, Tensor]] = field(default_factory=dict)


def examine(name: str, dtypes: Sequence[str]) -> Findings:
    """Everything about one layout, on one of its ranks."""
    world_size, model, overrides = CASES[name]
    workplace, findings = Workplace(tiny(model, **overrides), world_size), Findings()
    tiled = workplace.batches(TILES, swept=True)
    assert tiled[0].documents is not None, "each row is one document: nothing is packed"
    with profiled_once():
        for dtype in dtypes:
            findings.results |= references(workplace, dtype)
            common: dict[str, Any] = {
                "params_dtype": dtype,
                "offload_granularity": "tile",
                "offload_tiles": TILES,
                "profile_cache": "off",
            }
            reference = workplace.step(workplace.build(**common, offload_alpha=0.0), tiled)
            findings.results[f"{dtype} swept"] = reference.pieces
            for sweep in sweeps_of(name, dtype):
                with observed(copies=sweep.copies):
                    swept = workplace.build(
                        **common,
                        offload_alpha=sweep.alpha,
                        offload_policy=sweep.policy,
                        offload_slot_tiles=sweep.slot_tiles,
                        recompute_attention_layers=min(sweep.again, layers_per_chunk(workplace.config)),
                        offload_hidden_states=sweep.hidden,
                    )
                assert isinstance(swept.swap, SweepRuntime)
                with swept.swap.recorded() as recorder:
                    for step in range(2):  # the second begins with what the first left in slots and store
                        different = differences(workplace.step(swept, tiled), reference)
                        if different:
                            findings.unequal.append(f"{dtype}, {sweep}, step {step}: {different}")
                moved = Counter(span.kind for span in recorder.spans() if span.row == "prefetch")
                findings.moves.append((moved["activations"], moved["keys and values"], moved["layer inputs"]))
    return findings


OTHERS_SHOW_IT = ("breadth first", "experts in some layers", "norms after", "pp2 interleaved")
"""At less length: depth first, experts in all layers, norms around, and one chunk a stage."""


def parts(name: str) -> list[Any]:
    """Several ranks run in fp64, which holds them to the plain model most closely; in other dtypes, eight of them, and
    all but one layout of four, in full tests."""
    world_size = CASES[name][0]
    is_full = world_size == 8 or (world_size == 4 and name != "tp2 cp2 all_gather") or name in OTHERS_SHOW_IT
    if world_size == 1:
        return [pytest.param(name, DTYPES, marks=[pytest.mark.full] if is_full else [], id=name)]
    in_full = [pytest.param(name, (dtype,), marks=pytest.mark.full, id=f"{name} in {dtype}") for dtype in DTYPES[1:]]
    return [pytest.param(name, DTYPES[:1], marks=[pytest.mark.full] if is_full else [], id=name), *in_full]


@pytest.mark.parametrize(("name", "dtypes"), [part for name in CASES for part in parts(name)])
def test_sections_change_no_bit(name: str, dtypes: Sequence[str]) -> None:
    ranks = run_ranks(CASES[name][0], examine, name, dtypes)
    assert [found.unequal for found in ranks] == [[]] * len(ranks)
    for found in ranks:
        assert all(keys or inputs for _, keys, inputs in found.moves), "a run in which neither keys nor inputs moved"
        assert any(activations for activations, _, _ in found.moves), "no run moved activations"
    runs = {run: assemble([found.results[run] for found in ranks]) for run in ranks[0].results}
    if "fp64" in dtypes:
        assert relative_error(runs["fp64 swept"], runs["fp64 plain"]) <= 1e-12
    for dtype in dtypes:
        if dtype == "fp64":
            continue
        exact, plain, swept = (runs[f"{dtype} {run}"] for run in ("exact", "plain", "swept"))
        wrong, ours = wrongness(plain, exact), wrongness(swept, exact)
        # A single number may be right by chance: then one rounding of it counts.
        wrong["loss"] = max(wrong["loss"], exact["loss"].norm().item() * torch.finfo(torch_dtype(dtype)).eps)
        # So may one of few numbers. The sum over tiles rounds once a tile, in the wide dtype.
        size = wrongness(exact, {name: torch.zeros_like(value) for name, value in exact.items()})
        rounding = TILES**0.5 * torch.finfo(wide_dtype(torch_dtype(dtype))).eps
        wrong |= {kind: max(wrong[kind], rounding * size[kind]) for kind in wrong if kind.endswith("_norm.weight")}
        too_wrong = {kind: (ours[kind], wrong[kind]) for kind in wrong if ours[kind] > 2 * wrong[kind]}
        assert too_wrong == {}, dtype


def examine_with_short_reach(name: str) -> Findings:
    """As `examine` in fp64, where a call of attention takes at most 20 tokens, two and a half tiles; and one uncut."""
    workplace = Workplace(tiny(CASES[name][1], **CASES[name][2]), 1)
    uncut, model = references(workplace, "fp64")["fp64 plain"], workplace.config.model
    reach.REACH = 20 * (model.num_attention_heads + 2 * model.kv_heads) * model.head_dim
    findings = examine(name, ("fp64",))
    return Findings(findings.unequal, results={**findings.results, "uncut": uncut})


def test_what_is_cut_for_its_reach_keeps_its_bits_whatever_moves() -> None:
    """Whole and swept layers are cut alike; their sums differ from those of uncut calls by rounding alone."""
    (found,) = run_ranks(1, examine_with_short_reach, "llama")
    assert found.unequal == []
    expected = found.results["uncut"]
    for run in ("fp64 plain", "fp64 swept"):
        assert any(not torch.equal(found.results[run][name], expected[name]) for name in expected), "nothing was cut"
        assert relative_error(assemble([found.results[run]]), assemble([expected])) <= 1e-12


def wrongness(found: dict[str, Tensor], exact: dict[str, Tensor]) -> dict[str, float]:
    """Distances from what is exact, by kind of tensor: all layers together, because some tensors are small."""
    kinds: dict[str, list[Tensor]] = {}
    for name, value in exact.items():
        kind = re.sub(r"^layers\.\d+\.", "", name)
        kinds.setdefault(kind, []).append((found[name].double() - value.double()).flatten())
    return {kind: torch.cat(distances).norm().item() for kind, distances in kinds.items()}
