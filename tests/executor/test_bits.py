"""What moves, and where things live, changes nothing: every way to run a step gives the same bits.

Three references stand for all that may differ by rounding: a plain step on whole sequences, whole layers on tiles, and
swept layers on tiles. Each way of a reference is compared with it by torch.equal: losses, gradient norms, an evaluation
and masters and moments after some steps with clipping and a schedule of the learning rate. References keep all on the
device, in unpoisoned buffers with eager copies; ways run with buffers poisoned, copies late, at random moments or in
threads, and every access checked, and combine what moves: activations, by any share and policy, keys and values, inputs
of layers that recompute attention, hidden states, records on a disk, and states. The references' first gradients agree
with one another in fp64 to 1e-12 of the largest value; in fp32 and bf16 those on tiles may be at most twice as wrong
as plain ones against fp64.

One model on one process runs in every way in fp64, and in the full tests in each dtype. What moves is a matter of one
rank and of bytes, so the other rows share the ways and the dtypes: each takes a few of them, and in the full tests
another few in the other dtype. The packed documents of the mock data cross tiles, sections and ranks.
"""

import contextlib
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from bit_table import (
    EVERY_WAY,
    IN_FP32,
    ONE_STAGE,
    REFERENCES,
    ROWS,
    STEPS,
    TILES,
    TRAINING,
    WAYS,
    ZEROS,
    Reference,
    Way,
)
from disk_runs import shared
from layouts import assemble, global_pieces, relative_error, tiny
from ranks import run_ranks
from streamed_steps import ALL, PLACEMENTS, Course, run_course, unlike
from swapped_steps import Workplace, copy_weights, observed, profiled_once
from torch import Tensor

from memo.estimate.swap_memory import host_records
from memo.executor.runtime import SweepRuntime
from memo.parallel.dtypes import torch_dtype
from memo.spec import reach
from memo.spec.slots import slot_layout
from memo.train.build import ParallelModel
from memo_kernels import wide_dtype

DTYPES = ("fp64", "bf16")

Tensors = dict[str, Tensor]


def dtypes_of(name: str) -> tuple[str, ...]:
    """fp64 and bf16 show what fp32 would, in which one row runs. Other rows take turns."""
    if name == EVERY_WAY:  # the others of one process share every way in bf16
        return ("fp64",)
    return ("fp32",) if name == IN_FP32 else DTYPES[list(ROWS).index(name) % 2 :][:1]


def ways_of(name: str, dtype: str) -> Sequence[Way]:
    """A way of each reference, which rows and dtypes take in turn; all of them where the row is not like others."""
    row = ROWS[name]
    if row.ways is not None:
        return row.ways
    turn = list(ROWS).index(name) // 2 + 3 * (dtype != dtypes_of(name)[0])
    return [way for way in WAYS[3 * (turn % 6) :][:3] if way.of not in row.refuses]


@pytest.mark.parametrize(("ranks", "dtypes"), [([1], ["fp64"]), ([1], ["bf16"]), ([2, 4], DTYPES)])
def test_rows_share_every_way(ranks: list[int], dtypes: Sequence[str]) -> None:
    rows = [name for name, row in ROWS.items() if not row.is_full and row.world_size in ranks and name != EVERY_WAY]
    shared_by = [ways_of(name, dtype) for name in rows for dtype in dtypes if dtype in dtypes_of(name)]
    assert {id(way) for ways in shared_by for way in ways} >= {id(way) for way in WAYS}


@dataclass
class Findings:
    """What one rank found.

    Attributes:
        unequal: ways that differ from their reference, and in what.
        moves: by way that swaps, how many copies came back, by kind.
        disk_bytes: by way with a disk.
        pieces: loss and gradients of the first step by global name, of each reference and of "exact".
        norms: of all references' gradients.
    """

    unequal: list[str] = field(default_factory=list)
    moves: list[dict[str, int]] = field(default_factory=list)
    disk_bytes: list[int] = field(default_factory=list)
    pieces: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    norms: list[float] = field(default_factory=list)


def examine(name: str, dtype: str, directory: str) -> Findings:
    """Everything about one row in one dtype, on one of its ranks."""
    row, found = ROWS[name], Findings()
    workplace = Workplace(tiny(row.model, **{**TRAINING, **row.values}), row.world_size)
    ways = ways_of(name, dtype)
    with profiled_once():
        for of in dict.fromkeys(["plain", *(way.of for way in ways)]):
            model = workplace.build(params_dtype=dtype, **reference_of(of, row.tiles))
            tiles = 1 if of == "plain" else row.tiles
            batches = workplace.batches(tiles, of == "swept")
            assert batches[0].documents is not None, "each row is one document: nothing is packed"
            if of == "plain" and dtype != "fp64":
                exact = workplace.build(params_dtype="fp64", **REFERENCES["plain"])
                copy_weights(exact, model)
                found.pieces["exact"] = workplace.step(exact, batches).pieces
            with first_gradients(model) as found.pieces[of]:
                expected = course_of(name, workplace, of, tiles, model)
            found.pieces[of]["loss"] = workplace.loss_of_all_ranks(
                torch.tensor(expected.figures[0][0], dtype=torch.float64)
            )
            found.norms += [figures[1] for figures in expected.figures if len(figures) == 3]
            for way in ways:
                if way.of == of:
                    different = unlike(course_on(name, workplace, way, tiles, dtype, directory, found), expected)
                    found.unequal += [f"{way}: {different}"] if different else []
    return found


def reference_of(of: Reference, tiles: int) -> dict[str, Any]:
    return REFERENCES[of] if of == "plain" else {**REFERENCES[of], "offload_tiles": tiles}


@contextlib.contextmanager
def first_gradients(model: ParallelModel) -> Iterator[Tensors]:
    """Yield what will hold the gradients of the first step by global name, before they are clipped."""
    update, gradients = model.optimizer.step, {}

    def step(*args: Any) -> tuple[float, bool]:
        if not gradients:
            gradients.update(global_pieces(model, "grad"))
        return update(*args)

    with patch.object(model.optimizer, "step", step):
        yield gradients


def course_of(name: str, workplace: Workplace, of: Reference, tiles: int, model: ParallelModel) -> Course:
    feed = workplace.feed(tiles, of == "swept")
    # The second step begins with what the first and an evaluation have left; where every way runs, the third does.
    steps = STEPS if name == EVERY_WAY else STEPS - 1
    return run_course(model, feed, workplace.config, steps, (steps - 1,))


def course_on(
    name: str, workplace: Workplace, way: Way, tiles: int, dtype: str, directory: str, found: Findings
) -> Course:
    """One way of the row, which must use what it is about."""
    values = {"params_dtype": dtype, **reference_of(way.of, tiles), **way.values}
    if "recompute_attention_layers" in values:
        in_chunk = workplace.config.parallel.layers_per_chunk(workplace.config.model.num_layers)
        values["recompute_attention_layers"] = min(way.values["recompute_attention_layers"], in_chunk)
    if way.disk:
        values["offload_nvme_path"] = directory
    with observed(copies=way.copies), shared(way.disk) if way.disk else contextlib.nullcontext():
        model = workplace.build(**values)
    streams = "offload_states" in values and values["offload_states"] != "none"
    assert not streams or (model.states is not None and model.states.host_bytes > 0)
    if model.swap is None:
        return course_of(name, workplace, way.of, tiles, model)
    if way.disk:
        check_disk(workplace, way, values, model)
        found.disk_bytes.append(model.swap.disk_bytes)
    with model.swap.recorded() as recorder:
        course = course_of(name, workplace, way.of, tiles, model)
    found.moves.append(Counter(span.kind for span in recorder.spans() if span.row == "prefetch"))
    return course


def check_disk(workplace: Workplace, way: Way, values: dict[str, Any], model: ParallelModel) -> None:
    """Records of each kind are on the disk; where all are, host memory is what the account says: staging and stays."""
    runtime = model.swap
    assert runtime is not None and model.chosen_swap is not None
    kinds = [runtime.swapper.records]
    if isinstance(runtime, SweepRuntime):
        assert (runtime.inputs is None) == (not values["recompute_attention_layers"])
        kinds += [runtime.key_swapper.records] + ([] if runtime.inputs is None else [runtime.inputs.records])
    # Half of the few inputs may be those of the layer that stays, and of a stage of two layers nothing may move.
    is_alone = workplace.config.parallel.pp == 1
    assert not is_alone or all(records.disk_bytes > 0 for records in kinds[: 3 if way.disk == 1.0 else 2])
    assert runtime.disk_bytes == sum(records.disk_bytes for records in kinds)
    if way.disk == 1.0:
        config, stages = workplace.config.override(values), (workplace.mesh.at.pp,)
        layout = slot_layout(config, model.chosen_swap.solution.tiles)
        ((foreseen, stays),) = host_records(config, workplace.world_size, stages, layout)
        assert runtime.host_bytes == sum(kind.staging_bytes for kind in foreseen) + stays


def parts(name: str) -> list[Any]:
    """Eight ranks, and four of all but one, are full; so are all rows in the dtypes of others, one process in fp32."""

    def part(dtype: str) -> Any:
        is_full = ROWS[name].is_full or dtype not in dtypes_of(name)
        return pytest.param(name, dtype, marks=[pytest.mark.full] * is_full, id=f"{name} in {dtype}")

    return [part(dtype) for dtype in (("fp64", "fp32", "bf16") if ROWS[name].world_size == 1 else DTYPES)]


@pytest.mark.parametrize(("name", "dtype"), [part for name in ROWS for part in parts(name)])
def test_every_way_gives_the_same_bits(name: str, dtype: str, tmp_path: Path) -> None:
    ranks = run_ranks(ROWS[name].world_size, examine, name, dtype, str(tmp_path))
    assert [found.unequal for found in ranks] == [[]] * len(ranks)
    assert list(tmp_path.iterdir()) == []
    assert max(ranks[0].norms) > TRAINING["clip_grad"], "clipping must be at work"
    for moves in zip(*(found.moves for found in ranks), strict=True):
        assert any(counts for counts in moves), "a way in which no rank moved anything"
    assert all(any(on_ranks) for on_ranks in zip(*(found.disk_bytes for found in ranks), strict=True))
    pieces = {of: assemble([found.pieces[of] for found in ranks]) for of in ranks[0].pieces}
    plain, exact = pieces["plain"], pieces.get("exact", {})
    for tiled in (pieces[of] for of in ("whole", "swept") if of in pieces):
        if dtype == "fp64":
            assert relative_error(tiled, plain) <= 1e-12
        else:
            assert too_wrong(tiled, plain, exact, dtype) == {}


def too_wrong(tiled: Tensors, plain: Tensors, exact: Tensors, dtype: str) -> dict[str, tuple[float, float]]:
    """Kinds of tensors of which a step on tiles is more than twice as wrong as a plain one."""
    wrong, ours = wrongness(plain, exact), wrongness(tiled, exact)
    # A single number may be right by chance: then one rounding of it counts.
    wrong["loss"] = max(wrong["loss"], exact["loss"].norm().item() * torch.finfo(torch_dtype(dtype)).eps)
    # So may one of few numbers. The sum over tiles rounds once a tile, in the wide dtype.
    size = wrongness(exact, {name: torch.zeros_like(value) for name, value in exact.items()})
    rounding = TILES**0.5 * torch.finfo(wide_dtype(torch_dtype(dtype))).eps
    wrong |= {kind: max(wrong[kind], rounding * size[kind]) for kind in wrong if kind.endswith("_norm.weight")}
    return {kind: (ours[kind], wrong[kind]) for kind in wrong if ours[kind] > 2 * wrong[kind]}


def wrongness(found: Tensors, exact: Tensors) -> dict[str, float]:
    """Distances from what is exact, by kind of tensor: all layers together, because some tensors are small."""
    kinds: dict[str, list[Tensor]] = {}
    for name, value in exact.items():
        kind = re.sub(r"^layers\.\d+\.", "", name)
        kinds.setdefault(kind, []).append((found[name].double() - value.double()).flatten())
    return {kind: torch.cat(distances).norm().item() for kind, distances in kinds.items()}


def examine_with_short_reach(name: str, directory: str) -> tuple[Findings, Tensors]:
    """As `examine` in fp64, where a call of attention takes at most 20 tokens; and what is uncut."""
    row = ROWS[name]
    workplace = Workplace(tiny(row.model, **{**TRAINING, **row.values}), 1)
    model = workplace.config.model
    uncut = workplace.step(workplace.build(**REFERENCES["plain"]), workplace.batches()).pieces
    reach.REACH = 20 * (model.num_attention_heads + 2 * model.kv_heads) * model.head_dim
    return examine(name, "fp64", directory), uncut


def test_what_is_cut_for_its_reach_keeps_its_bits_whatever_moves(tmp_path: Path) -> None:
    """Whole and swept layers are cut alike; their sums differ from those of uncut calls by rounding alone."""
    ((found, uncut),) = run_ranks(1, examine_with_short_reach, "qwen3", str(tmp_path))
    assert found.unequal == []
    for pieces in found.pieces.values():
        assert any(not torch.equal(pieces[name], uncut[name]) for name in uncut), "nothing was cut"
        assert relative_error(assemble([pieces]), assemble([uncut])) <= 1e-12


MICROBATCHES = 4


def examine_accumulation(values: dict[str, Any]) -> tuple[list[str], dict[str, Tensors]]:
    """What differs between placements of sharded gradients on one rank, and gradients of one step by strategy."""
    workplace = Workplace(tiny("llama-tiny", **{**ONE_STAGE, **values}), 2)
    batches = workplace.batches()
    plain, exact = workplace.build(params_dtype="fp32"), workplace.build(params_dtype="fp64")
    copy_weights(exact, plain)
    found, unequal = {"ZeRO-1": gradients(plain, batches), "exact": gradients(exact, batches)}, []
    for zero in ZEROS.values():
        for placement in ({}, ALL, PLACEMENTS["fractions"]):
            with observed():
                model = workplace.build(params_dtype="fp32", data_parallel_sharding_strategy=zero, **placement)
            ours = gradients(model, batches)
            first = found.setdefault("sharded", ours)
            unequal += [f"{zero}, {placement}: {x}" for x in first if not torch.equal(ours[x], first[x])]
    return unequal, found


def gradients(model: ParallelModel, batches: Any) -> Tensors:
    """Reduced gradients of one global batch: this rank's shards, wherever they are."""
    model.forward_backward(batches)
    if model.states is not None:
        model.states.await_gradients()
    return {f"{s.segment.range.name} {s.segment.start}": s.weight.grad.clone() for s in model.optimizer.segments}


@pytest.mark.parametrize("layout", [{}, pytest.param({"cp": 2}, marks=pytest.mark.full)], ids=["dp2", "cp2"])
def test_sharded_gradients_of_several_microbatches(layout: dict[str, Any]) -> None:
    """Each microbatch is reduced by itself, so sums have another order: at most twice as wrong as ZeRO-1 against fp64.

    Every placement under ZeRO-2 and ZeRO-3 gives the same bits.
    """
    values = {"global_batch_size": 2 * MICROBATCHES // layout.get("cp", 1), "ddp_bucket_size": 500, **layout}
    for unequal, found in run_ranks(2, examine_accumulation, values):
        assert unequal == []
        for name, value in found["exact"].items():
            plain, ours = ((found[run][name] - value).norm() for run in ("ZeRO-1", "sharded"))
            assert ours <= 2 * plain + 4 * torch.finfo(torch.float32).eps * value.norm(), name
