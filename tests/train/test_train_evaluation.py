"""Evaluation by position and by distance: against plain PyTorch, the same in every layout, and unseen by training."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from answers import Answers
from memory_peaks import counted, run_config
from ranks import run_ranks
from torch import Tensor, nn
from trainers import SMALL_RUN

import memo
from memo.config import derived
from memo.data import MockDataset, NeedleDataset, Sample, SampleDataset
from memo.errors import ConfigError, DataError
from memo.parallel.loss import LossSettings, losses_and_greedy_tokens
from memo.train.console import Console
from memo.train.evaluation import LossByPosition, NeedleRecall, PositionBucket, compare_positions

SEQ_LENGTH, VOCABULARY = SMALL_RUN["seq_length"], 61
RUN: dict[str, Any] = {**SMALL_RUN, "num_query_groups": 2, "ffn_hidden_size": 48, "vocab_size": VOCABULARY}
RUN |= {"train_iters": 4, "loss_chunk_size": 24, "mock_data": True, "params_dtype": "fp64", "offload_alpha": "off"}
EDGES = [3, 8, 20, 500]
HELD_OUT = Answers(VOCABULARY, SEQ_LENGTH)
# Few ids for values: a model that has learned just these finds some by chance.
NEEDLES = NeedleDataset(MockDataset(5, SEQ_LENGTH, 1), 7, num_needles=4, key_length=2, value_length=1, values=range(5))


def trainer(**overrides: Any) -> memo.Trainer:
    return memo.Trainer("llama-tiny", **{"eval_data": HELD_OUT, **RUN, **overrides})


def logits_and_samples(of: memo.Trainer, data: SampleDataset, count: int) -> tuple[Tensor, list[Sample]]:
    """[count, s, v] of the whole model on one rank, and what it was shown."""
    found: list[Tensor] = []
    feed = of.parts.feed(data)
    for _ in range(count // of.global_batch_size):
        of.parts.at_head(feed, lambda head, x, *_: found.append((head.norm(x) @ head.weight.t()).transpose(0, 1)))
    return torch.cat(found)[..., :VOCABULARY], [data.sample(index) for index in range(count)]


def test_losses_by_position_are_those_of_plain_pytorch() -> None:
    of = trainer(micro_batch_size=2)
    of.train()
    logits, samples = logits_and_samples(of, HELD_OUT, 12)
    labels, positions, mask = (
        torch.from_numpy(np.stack([getattr(s, name) for s in samples])) for name in ("labels", "positions", "loss_mask")
    )
    mask = mask.double()
    losses = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view(12, -1)
    result = of.evaluate_positions(iters=3, edges=EDGES)
    assert [(b.first, b.end) for b in result.buckets] == [(0, 3), (3, 8), (8, 20), (20, SEQ_LENGTH)]
    for bucket in result.buckets:
        here = (positions >= bucket.first) & (positions < bucket.end)
        expected = (losses * mask)[here].sum() / mask[here].sum()
        assert bucket.num_tokens == int(mask[here].sum())
        assert bucket.loss == pytest.approx(expected.item(), rel=1e-12)  # fp64
        assert bucket.perplexity == pytest.approx(expected.exp().item(), rel=1e-12)
    assert result.loss == pytest.approx(of.evaluate(iters=3), rel=1e-12)
    assert sum(b.num_tokens for b in result.buckets) == int(mask.sum())


def peaks_of_a_step_and_an_evaluation(*runs: dict[str, Any]) -> list[tuple[int, int]]:
    """Bytes that torch allocates at most, on tiles of 256 tokens and with an MLP that takes much more than weights."""
    derived.RESIDENT_TILE_TOKENS = 256
    counter, peaks = counted(), []
    sizes = {"num_layers": 1, "ffn_hidden_size": 1024, "loss_chunk_size": 64, "vocab_size": 256, "seq_length": 2048}
    for flags in runs:
        with memo.Trainer(config=run_config("llama-tiny", **sizes, **flags), eval_interval=1) as of:
            of.step()
            counter.take_peak_bytes()
            of.step()
            step = counter.take_peak_bytes()
            of.evaluate(iters=1)
            peaks.append((step, counter.take_peak_bytes()))
    return peaks


def test_an_evaluation_takes_no_more_memory_than_a_step() -> None:
    """Without a plan of memory. Its layers run on tiles too: all their tokens at once would take more."""
    swept = {"offload_alpha": 0.0, "offload_granularity": "tile"}
    runs = {"recompute_granularity": "full"}, {"offload_alpha": 0.0}, swept
    (peaks,) = run_ranks(1, peaks_of_a_step_and_an_evaluation, *runs)
    assert all(evaluation <= step for step, evaluation in peaks), peaks


CUTS = [(1, 1, 12), (2, 1, 6), (4, 2, 3), (6, 3, 2), (12, 4, 1)]


def test_tokens_weigh_and_not_batches() -> None:
    """The same 12 samples, with none to 64 tokens that count, in every cut; in fp64, where 768 roundings are 1e-13."""
    found = []
    for global_batch_size, micro_batch_size, iters in CUTS:
        with trainer(global_batch_size=global_batch_size, micro_batch_size=micro_batch_size, train_iters=1) as of:
            found.append((of.evaluate(iters), of.evaluate_positions(iters, EDGES)))
            if iters == 1:
                logits, samples = logits_and_samples(of, HELD_OUT, 12)
    labels, mask = (torch.from_numpy(np.stack([getattr(s, name) for s in samples])) for name in ("labels", "loss_mask"))
    assert len({int(row.sum()) for row in mask}) > 3 and 0 in mask.sum(1)
    ignored = labels.masked_fill(mask == 0, -100)
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ignored.flatten(), ignore_index=-100).item()
    for loss, positions in found:
        assert loss == pytest.approx(expected, rel=1e-12)
        assert positions.loss == pytest.approx(expected, rel=1e-12)
        for bucket, same in zip(positions.buckets, found[0][1].buckets, strict=True):
            assert bucket.num_tokens == same.num_tokens
            assert bucket.loss == pytest.approx(same.loss, rel=1e-12)


def test_an_evaluation_in_which_no_token_counts_is_told() -> None:
    """Sample 0 has no answers."""
    of = trainer(global_batch_size=1)
    for evaluation in (of.evaluate, of.evaluate_positions):
        with pytest.raises(DataError, match=r"no token counts in the 1 samples .* every label .* masked.*--eval-iters"):
            evaluation(1)
        evaluation(2)


def test_found_needles_are_those_of_plain_pytorch() -> None:
    of = trainer(train_data=NEEDLES, mock_data=False)
    of.train()
    logits, samples = logits_and_samples(of, NEEDLES, 12)
    result = of.evaluate_needles(NEEDLES, iters=3, edges=[30])
    rows = []
    for index, sample in enumerate(samples):
        questions = NEEDLES.questions(index)
        for (place,), distance in zip(questions.labels, questions.distances, strict=True):
            label, at = int(sample.labels[place]), logits[index, place]
            rows.append((int(distance), float(at.argmax() == label), (at.logsumexp(0) - at[label]).item()))
    distances, found, losses = (np.array(column) for column in zip(*rows, strict=True))
    assert 0 < found.mean() < 0.5
    for bucket, here in zip(result.buckets, (distances < 30, distances >= 30), strict=True):
        assert bucket.num_questions == here.sum()
        assert bucket.accuracy == found[here].mean()
        assert bucket.loss == pytest.approx(losses[here].mean(), rel=1e-12)
    assert (result.accuracy, result.loss) == (found.mean(), pytest.approx(losses.mean(), rel=1e-12))


def greedy_on_rank(hidden: Tensor, weight: Tensor) -> Tensor:
    """hidden [tp, n, b, h], weight [tp, rows, h]: each rank's part."""
    rank = dist.get_rank()
    labels = torch.zeros(12, 2, dtype=torch.int64)
    settings = LossSettings(nn.Identity(), vocab_size=100, chunk_size=5, group=dist.group.WORLD)
    return losses_and_greedy_tokens(hidden[rank], weight[rank], labels, settings)[1]


def test_greedy_tokens_are_the_first_of_the_largest_logits_over_all_ranks() -> None:
    """100 tokens on 2 ranks of 64 rows, of which the last 28 would win; fp64, exact."""
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(2, 6, 2, 16, dtype=torch.float64, generator=generator)
    weight = torch.randn(128, 16, dtype=torch.float64, generator=generator)
    weight[100:] *= 100
    weight[[20, 90]] = 3 * hidden[1, 4, 0]  # equal logits there, one on each rank
    expected = (hidden.flatten(0, 1) @ weight[:100].t()).argmax(-1)
    assert expected[6 + 4, 0] == 20 and (expected < 64).any() and (expected >= 64).any()
    for found in run_ranks(2, greedy_on_rank, hidden, weight.view(2, 64, 16)):
        assert torch.equal(found, expected)


def test_a_needle_is_found_when_all_its_tokens_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Values of two tokens, and models that know both, the first or the second."""
    needles = NeedleDataset(MockDataset(9, SEQ_LENGTH, 1), 7, num_needles=3, key_length=1, value_length=2)
    of = trainer(global_batch_size=1)

    def knows(tokens: list[int]) -> Callable[..., tuple[Tensor, Tensor]]:
        answer = torch.full((SEQ_LENGTH, 1), -1)
        places = needles.questions(0).labels[:, tokens].flatten()
        answer[places, 0] = torch.from_numpy(needles.sample(0).labels[places])
        return lambda head, x, labels: (torch.zeros(SEQ_LENGTH, 1), answer)

    for known, accuracy in (([0, 1], 1.0), ([0], 0.0), ([1], 0.0)):
        monkeypatch.setattr("memo.model.transformer.Head.losses_and_greedy_tokens", knows(known))
        assert of.evaluate_needles(needles, iters=1).accuracy == accuracy


Numbers = tuple[float, LossByPosition, NeedleRecall]


def numbers(**overrides: Any) -> Numbers:
    with trainer(train_data=NEEDLES, mock_data=False, train_iters=2, **overrides) as of:
        of.train()
        return (of.evaluate(2), of.evaluate_positions(2, EDGES), of.evaluate_needles(NEEDLES, 3, [10, 30]))


@pytest.fixture(scope="module")
def alone() -> Numbers:
    found: Numbers = run_ranks(1, numbers)[0]
    return found


SWAPPING = {"offload_alpha": 0.5, "offload_tiles": 2}
HIDDEN = {
    "offload_alpha": 0.5,
    "offload_tiles": 4,
    "offload_granularity": "tile",
    "offload_slot_tiles": 1,
    "offload_hidden_states": True,
}


@pytest.mark.parametrize(
    ("world_size", "layout"),
    [
        (2, {"tp": 2, **SWAPPING}),
        (2, {"cp": 2, "cp_comm_type": "all_gather", **HIDDEN}),
        pytest.param(2, {"cp": 2, "cp_comm_type": "a2a"}, marks=pytest.mark.full),
        (2, {"micro_batch_size": 2}),
        (2, {"pp": 2, "num_virtual_stages_per_pipeline_rank": 1, **HIDDEN}),
        pytest.param(2, {"tp": 2, **HIDDEN}, marks=pytest.mark.full),
        pytest.param(4, {"tp": 2, "cp": 2, "recompute_granularity": "full"}, marks=pytest.mark.full),
        pytest.param(4, {"cp": 2, "pp": 2, **SWAPPING}, marks=pytest.mark.full),
    ],
    ids=["tp", "cp-hidden", "a2a", "dp", "pp-hidden", "tp-hidden", "tp-cp", "cp-pp"],
)
def test_every_layout_gives_the_numbers_of_one_process(world_size: int, layout: dict[str, Any], alone: Numbers) -> None:
    results = run_ranks(world_size, numbers, **layout)
    assert all(result == results[0] for result in results)  # every rank is told the same
    loss, positions, needles = results[0]
    expected_loss, expected_positions, expected_needles = alone
    assert loss == pytest.approx(expected_loss, rel=1e-9)  # after 2 optimizer steps in fp64
    assert positions.loss == pytest.approx(loss, rel=1e-12)
    pairs = [*zip(positions.buckets, expected_positions.buckets, strict=True)]
    pairs += zip(needles.buckets, expected_needles.buckets, strict=True)
    assert len(pairs) == 4 + 3 and 0 < needles.accuracy < 1
    for bucket, expected in pairs:
        assert dataclasses.replace(bucket, loss=0.0) == dataclasses.replace(expected, loss=0.0)
        assert bucket.loss == pytest.approx(expected.loss, rel=1e-9)
    assert needles.accuracy == expected_needles.accuracy and needles.loss == pytest.approx(expected_needles.loss, 1e-9)


def bits(of: memo.Trainer) -> list[Tensor]:
    return [tensor.clone() for bucket in of.parts.data_parallel.buckets for tensor in (bucket.weights, bucket.master)]


def evaluate_in_all_ways(of: memo.Trainer) -> None:
    of.evaluate(1)
    of.evaluate_positions(1)
    of.evaluate_needles(NEEDLES, 1)
    of.generate([1, 2], 2)
    samples = [NEEDLES.sample(0)]
    of.log_probs(samples)
    if of.config.model.lora_rank:
        of.log_probs(samples, reference=True)


def with_and_without(**overrides: Any) -> tuple[list[float], list[float], bool]:
    """Losses of a run that is asked before each step in all ways, of one that is not, and: equal weights?"""
    overrides = {"params_dtype": "fp32", "num_layers": 3, "global_batch_size": 2, **overrides}
    losses: list[list[float]] = []
    weights: list[list[Tensor]] = []
    for evaluates in (True, False):
        with trainer(**overrides) as of:
            losses.append([])
            for _ in range(2):
                if evaluates:
                    evaluate_in_all_ways(of)
                losses[-1].append(of.step().lm_loss)
            if of.parts.transients is not None:
                statistics = of.parts.transients.statistics()
                assert statistics is not None and statistics.hits > 0, of.parts.transients.reason
            weights.append(bits(of))
    return losses[0], losses[1], all(torch.equal(a, b) for a, b in zip(*weights, strict=True))


PLANNED = {"memory_planner": "auto", "memory_planner_min_bytes": 1024, "memory_planner_from": "rehearsal"}
BETWEEN: dict[str, tuple[int, dict[str, Any]]] = {
    "plain": (1, {"params_dtype": "bf16"}),
    "alpha-half": (1, {**SWAPPING, "offload_check_races": True}),
    "hidden-breadth-first": (
        1,
        {**HIDDEN, "offload_backend": "threads", "gradient_accumulation_order": "breadth_first"},
    ),
    "planned-swapping": (1, {**PLANNED, **SWAPPING}),
    "pp-hidden": (2, {"pp": 2, "num_layers": 4, **HIDDEN, "offload_check_races": True}),
    "adapters": (1, {"lora_rank": 2}),
}
"""tests/executor/test_bits.py evaluates after steps in every other way."""


@pytest.mark.parametrize("name", BETWEEN)
def test_evaluation_between_any_two_steps_changes_no_bit(name: str) -> None:
    world_size, how = BETWEEN[name]
    for evaluated, plain, weights_are_equal in run_ranks(world_size, with_and_without, **how):
        assert evaluated == plain
        assert weights_are_equal


def test_every_evaluation_is_told_and_logged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "log.jsonl"
    options = {"eval_interval": 2, "eval_iters": 2, "eval_positions": True, "log_jsonl": str(log)}
    with trainer(**options) as of:
        of.train()
        last = of.evaluate_positions()
    printed = capsys.readouterr().out
    assert last.table() in printed and "validation loss " in printed and ", at iteration 2" in printed
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    evaluations = [line for line in lines if "evaluation" in line]
    assert [line["iteration"] for line in evaluations] == [2, 4] and len(lines) == 4 + 2
    assert evaluations[-1]["evaluation"] == json.loads(json.dumps(dataclasses.asdict(last)))  # full precision
    with trainer(**{**options, "eval_positions": False, "log_jsonl": str(tmp_path / "plain.jsonl")}) as of:
        of.train()
    lines = [json.loads(line) for line in (tmp_path / "plain.jsonl").read_text().splitlines()]
    assert [line["evaluation"] for line in lines if "evaluation" in line][1] == {"loss": pytest.approx(last.loss)}


def test_what_cannot_be_evaluated_is_refused() -> None:
    of = trainer()
    for evaluation in (of.evaluate, of.evaluate_positions, lambda n: of.evaluate_needles(NEEDLES, n)):
        for iters in (0, -1):
            with pytest.raises(ConfigError, match=rf"got iters = {iters}: give at least 1, .* --eval-iters 10"):
                evaluation(iters)
    for edges in ([8, 8], [20, 8], [0, 8], [-1]):
        with pytest.raises(ConfigError, match=r"edges of buckets are \[.*: give increasing numbers above 0"):
            of.evaluate_positions(1, edges)
    with pytest.raises(ConfigError, match=r"--seq-length is 64, but the samples of the given data have 32 tokens"):
        of.evaluate_needles(NeedleDataset(MockDataset(9, 32, 1), 7, num_needles=1))


@pytest.mark.parametrize(("seq_length", "edges"), [(512, []), (1024, [512]), (1536, [512, 1024]), (64, [])])
def test_buckets_are_doublings_of_512(seq_length: int, edges: list[int]) -> None:
    with trainer(seq_length=seq_length, eval_data=MockDataset(VOCABULARY, seq_length, 5), num_layers=1) as of:
        found = [(bucket.first, bucket.end) for bucket in of.evaluate_positions(1).buckets]
    assert found == list(zip([0, *edges], [*edges, seq_length], strict=True))


@pytest.mark.parametrize(
    ("loss", "short", "megatron"),
    [(30.0, "1.069e+13", "1.068647E+13"), (800.0, "inf", "INF"), (float("nan"), "nan", "NAN")],
)
def test_the_perplexity_that_is_told_is_that_of_the_loss(
    loss: float, short: str, megatron: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for form in ("short", "megatron"):
        config = memo.RunConfig().override({"log_format": form, "progress": False})
        Console(config, 0).evaluated(1, "", loss)
    lines = capsys.readouterr().out.splitlines()
    assert f", perplexity {short}, at iteration 1" in lines[0] and f"lm loss PPL: {megatron} |" in lines[1]


def test_tables() -> None:
    short = PositionBucket(0, 512, 1000, 2.0)
    one = LossByPosition(1.5, (short, PositionBucket(512, 131072, 1000, 1.0)))
    assert one.table().splitlines() == [
        "  position  tokens    loss  perplexity",
        "   0 - 512   1,000  2.0000       7.389",
        "512 - 128K   1,000  1.0000       2.718",
        "       all   2,000  1.5000       4.482",
    ]
    other = LossByPosition(800.0, (short, PositionBucket(512, 131072, 1000, 3.0)))
    assert compare_positions({"before": one, "after": other}).splitlines()[2:] == [
        "512 - 128K   2.718  20.09",
        "       all   4.482    inf",
    ]
