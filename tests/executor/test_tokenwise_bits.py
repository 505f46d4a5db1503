"""Swapping changes nothing: any alpha gives the same bits, and the plain model's numbers to rounding.

torch.equal on the loss and on every gradient, against alpha = 0 in unpoisoned buffers with eager copies; all
others run with buffers poisoned, copies late or at random moments, and every access checked. One model on one process
runs under every alpha and policy in every dtype; the others share all of them in each dtype (and run under all in the
full tests); each layout of several ranks runs under one of them in each dtype, and the layouts together under all that
move something. On one tile of all tokens, training without a swap plan, with and without recomputation, gives the same
bits too. Else the plain model works on whole sequences instead of tiles: in fp64 it agrees to 1e-12 of the largest
value; in fp32 and bf16 swapping may be at most twice as wrong as the plain model itself is against fp64.

The packed documents of the mock data cross tiles and ranks in every layout.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import pytest
import torch
from layouts import Outcome, assemble, relative_error, tiny, train
from ranks import run_ranks
from swapped_steps import Step, Workplace, differences, observed, profiled_once, references
from torch import Tensor

from memo.parallel.dtypes import torch_dtype

ALPHAS = (0.0, 0.125, 0.25, 0.5, 1.0)
TILES = 8
DTYPES = ("fp64", "fp32", "bf16")
POLICIES = ("auto", "paper")
SWAPS = tuple(product(POLICIES, ALPHAS))
"""(policy, alpha)."""

# Three layers on one stage are the fewest of which one moves; a pipeline needs two on each and two microbatches.
ONE_STAGE: dict[str, Any] = {"num_layers": 3, "global_batch_size": 1}
TWO_STAGES: dict[str, Any] = {"pp": 2, "num_layers": 4, "global_batch_size": 2}
TIED: dict[str, Any] = {"untie_embeddings_and_output_weights": False}
KINDS: dict[str, Any] = {"window_size": 11, "layer_types": "sliding,full", "attention_sinks": True}
KINDS |= {"attention_output_gate": True}
DENSE_FIRST: dict[str, Any] = {"moe_layer_freq": "[0]+[1]*2", "ffn_hidden_size": 176, "moe_ffn_hidden_size": 48}
DENSE_FIRST |= {"moe_shared_expert_intermediate_size": 40, "moe_shared_expert_gate": True, "rotary_percent": 0.5}
"""Layers whose weights, and whose rows in a slot, differ."""
WHOLE_GRID = "gpt"
"""The model that runs under all swaps."""
CASES: dict[str, tuple[int, str, dict[str, Any]]] = {
    WHOLE_GRID: (1, "gpt-tiny", {**ONE_STAGE, "micro_batch_size": 2, "global_batch_size": 4}),
    "gpt2": (1, "gpt2-tiny", ONE_STAGE),  # biases, LayerNorm, learned positions
    "llama": (1, "llama-tiny", ONE_STAGE),  # fewer key/value heads
    "qwen3": (1, "qwen3-tiny", ONE_STAGE),  # normed heads: the slot holds them unrotated
    "window": (1, "llama-tiny", {**ONE_STAGE, "window_size": 5}),  # shorter than a tile
    "layers of two kinds": (1, "llama-tiny", {**ONE_STAGE, **KINDS}),
    "norms around": (1, "gemma-3-tiny", {**ONE_STAGE, "window_size": 11}),
    "delta nets": (1, "qwen3.5-tiny", ONE_STAGE),
    "tp2 delta nets": (2, "qwen3.5-tiny", {"tp": 2, **ONE_STAGE}),
    "norms after, and across heads": (1, "olmo-3-tiny", {**ONE_STAGE, "window_size": 11}),
    "experts": (1, "qwen3-moe-tiny", ONE_STAGE),
    "experts in some layers": (1, "qwen3-moe-tiny", {**ONE_STAGE, **DENSE_FIRST}),
    "tp2": (2, "llama-tiny", {"tp": 2, **ONE_STAGE}),
    "tp2 norms around": (2, "gemma-3-tiny", {"tp": 2, **ONE_STAGE, "window_size": 11}),
    "tp2 norms across heads": (2, "olmo-3-tiny", {"tp": 2, **ONE_STAGE, "window_size": 11}),
    "tp2 experts": (2, "qwen3-moe-tiny", {"tp": 2, **ONE_STAGE}),
    "tp2 experts by sigmoid": (2, "glm-4.5-tiny", {"tp": 2, **ONE_STAGE, "moe_layer_freq": "[0]+[1]*2"}),
    "tp2 experts with biases": (2, "gpt-oss-tiny", {"tp": 2, **ONE_STAGE, "window_size": 11}),
    "cp2 ring": (2, "llama-tiny", {"cp": 2, "cp_comm_type": "p2p", **ONE_STAGE}),
    "cp2 gathered": (2, "qwen3-tiny", {"cp": 2, "cp_comm_type": "all_gather", **ONE_STAGE}),
    "cp2 ring, kinds": (2, "llama-tiny", {"cp": 2, "cp_comm_type": "p2p", **ONE_STAGE, **KINDS}),
    "cp2 all-to-all": (2, "llama-tiny", {"cp": 2, "cp_comm_type": "a2a", **ONE_STAGE}),
    "pp2 1F1B": (2, "gpt-tiny", {**TWO_STAGES, "global_batch_size": 3}),  # its embedding is tied over both stages
    "pp2 interleaved": (2, "llama-tiny", {"vpp": 2, **TWO_STAGES, **TIED}),
    "dp2": (2, "gpt-tiny", {**ONE_STAGE, "micro_batch_size": 2, "global_batch_size": 8}),
    "tp2 cp2 pp2": (8, "llama-tiny", {"tp": 2, "cp": 2, **TWO_STAGES, **TIED, **KINDS}),
    "pp2 dp2, experts in some layers": (
        4,
        "qwen3-moe-tiny",
        {**TWO_STAGES, **DENSE_FIRST, "moe_layer_freq": "[0]*3+[1]", "global_batch_size": 4},
    ),
    "tp2 pp2 dp2": (8, "gpt2-tiny", {"tp": 2, **TWO_STAGES, "global_batch_size": 4}),
    "adapters": (1, "qwen3-moe-tiny", {**ONE_STAGE, **DENSE_FIRST, "lora_rank": 3}),
    "tp2 frozen layers": (2, "gpt2-tiny", {"tp": 2, **ONE_STAGE, "freeze": "*embedding.weight,layers.1.*,*mlp.fc2*"}),
}


def swaps_of(name: str, dtype: str) -> Sequence[tuple[str, float]]:
    """(policy, alpha) of the runs of one layout in one dtype.

    What ranks do to each other's bits, alpha does not change: it says how many rows move, within one rank. So layouts
    of several ranks share what moves among them, each dtype beginning elsewhere; so do the models of one process that
    are not the first, in whose tiles there is other code, but nothing else.
    """
    alone = [other for other, case in CASES.items() if case[0] == 1 and other != WHOLE_GRID]
    if name == WHOLE_GRID:
        return SWAPS
    if name in alone:
        return SWAPS[(alone.index(name) + DTYPES.index(dtype)) % len(alone) :: len(alone)]
    moving = [(policy, alpha) for policy, alpha in SWAPS if alpha > 0.0]
    turn = list(CASES).index(name) + 3 * DTYPES.index(dtype)
    return [moving[turn % len(moving)]]


def test_layouts_share_every_swap_that_moves_and_models_every_swap() -> None:
    for dtype in DTYPES:
        shared = {swap for name, case in CASES.items() if case[0] > 1 for swap in swaps_of(name, dtype)}
        assert shared == {(policy, alpha) for policy, alpha in SWAPS if alpha > 0.0}
        alone = [name for name, case in CASES.items() if case[0] == 1 and name != WHOLE_GRID]
        assert {swap for name in alone for swap in swaps_of(name, dtype)} == set(SWAPS)


@dataclass
class Findings:
    """What one rank found.

    Attributes:
        unequal: runs that differ from alpha = 0, and in what.
        moved_bytes: of one layer, by dtype and policy, in the order of the alphas that ran.
        num_moves: layers and microbatches that left the device in a step, by run.
        results: loss and gradients by global name, of the runs "plain", "swapped" and "exact" in each dtype.
    """

    unequal: list[str] = field(default_factory=list)
    moved_bytes: dict[str, list[int]] = field(default_factory=dict)
    num_moves: list[int] = field(default_factory=list)
    results: dict[str, dict[str, Tensor]] = field(default_factory=dict)


def examine(name: str, dtypes: Sequence[str], in_all: bool) -> Findings:
    """Everything about one layout, on one of its ranks; `in_all`: under all swaps, not only under its share."""
    world_size, model, overrides = CASES[name]
    workplace, findings = Workplace(tiny(model, **overrides), world_size), Findings()
    assert workplace.batches()[0].documents is not None, "each row is one document: nothing is packed"
    with profiled_once():
        for dtype in dtypes:
            findings.results |= references(workplace, dtype)
            swaps = SWAPS if in_all else swaps_of(name, dtype)
            findings.results[f"{dtype} swapped"] = compare_swaps(workplace, dtype, swaps, findings).pieces
    return findings


def compare_swaps(workplace: Workplace, dtype: str, swaps: Sequence[tuple[str, float]], findings: Findings) -> Step:
    """Each of `swaps` against alpha = 0, which is returned."""
    batches = workplace.batches(TILES)
    common: dict[str, Any] = {"params_dtype": dtype, "offload_tiles": TILES}
    reference = workplace.step(workplace.build(**common, offload_alpha=0.0), batches)
    for policy, alpha in swaps:
        with observed(copies="lazy" if policy == "auto" else "random"):
            model = workplace.build(**common, offload_alpha=alpha, offload_policy=policy)
        assert model.swap is not None
        with model.swap.recorded() as recorder:
            different = differences(workplace.step(model, batches), reference)
        if different:
            findings.unequal.append(f"{dtype}, {policy}, alpha {alpha}: {different}")
        findings.num_moves.append(sum(span.row == "offload" for span in recorder.spans()))
        findings.moved_bytes.setdefault(f"{dtype} {policy}", []).append(model.swap.layout.moved_bytes)
    return reference


def parts(name: str) -> list[Any]:
    """One process runs in all dtypes. Several ranks run in fp32, and eight in any dtype, in full tests.

    fp64 holds them to the plain model most closely and bf16 has other buffers, which two ranks show; fp32 lies between,
    as one process shows.
    """
    world_size = CASES[name][0]
    if world_size == 1:
        whole = (
            [] if name == WHOLE_GRID else [pytest.param(name, DTYPES, True, marks=pytest.mark.full, id=f"{name}, all")]
        )
        return [pytest.param(name, DTYPES, False, id=name), *whole]
    here: tuple[str, ...] = ("fp64", "bf16") if world_size == 2 else ("fp64",)
    in_full = [dtype for dtype in DTYPES if dtype not in here]
    return [
        pytest.param(name, here, False, marks=[pytest.mark.full] if world_size == 8 else [], id=name),
        *(pytest.param(name, (dtype,), False, marks=pytest.mark.full, id=f"{name} in {dtype}") for dtype in in_full),
    ]


@pytest.mark.parametrize(("name", "dtypes", "in_all"), [part for name in CASES for part in parts(name)])
def test_swapping_changes_no_bit(name: str, dtypes: Sequence[str], in_all: bool) -> None:
    ranks = run_ranks(CASES[name][0], examine, name, dtypes, in_all)
    assert [found.unequal for found in ranks] == [[]] * len(ranks)
    for moves in zip(*(found.num_moves for found in ranks), strict=True):
        assert any(moves), "a run in which no rank moved anything"
    for moved in ranks[0].moved_bytes.values():
        assert moved == sorted(set(moved)), "each alpha must move more than the one before"
    runs = {run: assemble([found.results[run] for found in ranks]) for run in ranks[0].results}
    if "fp64" in dtypes:
        assert relative_error(runs["fp64 swapped"], runs["fp64 plain"]) <= 1e-12
    for dtype in dtypes:
        if dtype == "fp64":
            continue
        exact, plain, swapped = (runs[f"{dtype} {run}"] for run in ("exact", "plain", "swapped"))
        for tensor, value in exact.items():
            wrong = (plain[tensor] - value).norm()
            if tensor == "loss":  # a single number may be right by chance: then one rounding of it counts
                wrong = max(wrong, value.norm() * torch.finfo(torch_dtype(dtype)).eps)
            assert (swapped[tensor] - value).norm() <= 2 * wrong, f"{tensor} in {dtype}"


ONE_TILE: tuple[dict[str, Any], ...] = (
    {"recompute_granularity": "full"},
    {"recompute_granularity": "selective"},
    {"offload_alpha": 0.0, "offload_tiles": 1},
    {"offload_alpha": 1.0, "offload_tiles": 1, "offload_policy": "paper"},
)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("model", ["llama-tiny", "qwen3-tiny", "qwen3-moe-tiny", "gpt2-tiny"])
def test_plain_recomputed_and_swapped_training_on_one_tile_give_the_same_bits(model: str, dtype: str) -> None:
    """Three steps: losses, gradient norms, the last gradients and the weights after it."""
    plain = train(tiny(model, num_layers=3, params_dtype=dtype))
    for flags in ONE_TILE:
        other = train(tiny(model, num_layers=3, params_dtype=dtype, **flags))
        assert (other.losses, other.norms) == (plain.losses, plain.norms), flags
        assert_same_bits(other, plain)


def assert_same_bits(actual: Outcome, expected: Outcome) -> None:
    for ours, theirs in ((actual.gradients, expected.gradients), (actual.weights, expected.weights)):
        assert not [name for name in theirs if not torch.equal(ours[name], theirs[name])]
