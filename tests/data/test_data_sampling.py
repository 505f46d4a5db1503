"""Mock data, the global batch sampler and microbatches."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from memo.config import RunConfig
from memo.config.grid import RankGrid
from memo.data.mock import MockDataset
from memo.data.sample import Sample, cut_sample
from memo.data.sampler import GlobalBatchSampler
from memo.errors import CheckpointError
from memo.train.feed import Feed, documents_of


def global_batch(sampler: GlobalBatchSampler, dp_size: int, micro_batch_size: int) -> list[int]:
    """The global batch in its documented order: microbatch by microbatch, within it rank by rank."""
    ranks = [sampler.indices(rank, dp_size, micro_batch_size) for rank in range(dp_size)]
    return [index for microbatch in zip(*ranks, strict=True) for part in microbatch for index in part]


@pytest.mark.parametrize("dp_size", [1, 2, 4])
@pytest.mark.parametrize("micro_batch_size", [1, 2])
def test_same_global_order_at_any_layout(dp_size: int, micro_batch_size: int) -> None:
    sampler = GlobalBatchSampler(8, seed=0)
    for step in range(3):
        expected = list(range(8 * step, 8 * step + 8))
        assert global_batch(sampler, dp_size, micro_batch_size) == expected
        sampler.advance()


def test_resume_equals_going_on() -> None:
    straight = GlobalBatchSampler(8, seed=5)
    batches = []
    for _ in range(6):
        batches.append(global_batch(straight, 2, 2))
        straight.advance()
    stopped = GlobalBatchSampler(8, seed=5)
    for _ in range(2):
        stopped.advance()
    resumed = GlobalBatchSampler(8, seed=5)
    resumed.resume(5, stopped.consumed_samples)
    for expected in batches[2:]:
        assert global_batch(resumed, 4, 1) == expected
        resumed.advance()
    assert resumed.consumed_samples == straight.consumed_samples == 48


def test_resume_with_another_global_batch_size_skips_nothing() -> None:
    first = GlobalBatchSampler(6, seed=0)
    seen = global_batch(first, 2, 1)
    first.advance()
    second = GlobalBatchSampler(4, seed=0)
    second.resume(0, first.consumed_samples)
    assert seen + global_batch(second, 2, 1) == list(range(10))


def test_before_the_first_sample_any_seed_will_do() -> None:
    """Imported weights carry a seed that nothing was read with; after one sample the seed is settled."""
    sampler = GlobalBatchSampler(8, seed=1)
    sampler.resume(2, 0)
    assert (sampler.seed, sampler.consumed_samples) == (1, 0)
    with pytest.raises(CheckpointError, match=r"seed = 2, this run has seed = 1: .*set seed = 2"):
        sampler.resume(2, 1)


def assert_equal(a: Sample, b: Sample) -> None:
    for name in ("tokens", "labels", "loss_mask", "positions", "cu_seqlens"):
        assert np.array_equal(getattr(a, name), getattr(b, name)), name


def test_mock_is_a_function_of_seed_and_index() -> None:
    first, again = MockDataset(100, 64, seed=1, mean_document_length=10), MockDataset(100, 64, 1, 10)
    for index in (3, 0, 10**12):
        assert_equal(first.sample(index), again.sample(index))
    assert not np.array_equal(first.sample(0).tokens, first.sample(1).tokens)
    assert not np.array_equal(first.sample(0).tokens, MockDataset(100, 64, 2, 10).sample(0).tokens)


@pytest.mark.parametrize("mean_document_length", [None, 20.0])
def test_mock_follows_its_rule(mean_document_length: float | None) -> None:
    vocab_size = 50
    for seed, index in ((0, 4), (9, 4), (0, 5)):  # one rule for all seeds and samples
        sample = MockDataset(vocab_size, 20_000, seed, mean_document_length).sample(index)
        assert 0 <= sample.tokens.min() <= sample.tokens.max() < vocab_size
        kept = (sample.tokens + 7919) % vocab_size == sample.labels
        inside = sample.loss_mask == 1
        assert kept[inside].mean() == pytest.approx(0.9 + 0.1 / vocab_size, abs=0.01)
        if mean_document_length is not None:
            assert kept[~inside].mean() == pytest.approx(1 / vocab_size, abs=0.03)
            assert np.diff(sample.cu_seqlens).mean() == pytest.approx(mean_document_length, rel=0.15)
            assert (sample.positions == 0).sum() == len(sample.cu_seqlens) - 1
        else:
            assert inside.all()
            assert sample.cu_seqlens.tolist() == [0, 20_000]


def test_documented_sample() -> None:
    sample = cut_sample(np.arange(7), np.array([3]))
    assert sample.tokens.tolist() == [0, 1, 2, 3, 4, 5]
    assert sample.labels.tolist() == [1, 2, 3, 4, 5, 6]
    assert sample.loss_mask.tolist() == [1, 1, 0, 1, 1, 1]
    assert sample.positions.tolist() == [0, 1, 2, 0, 1, 2]
    assert sample.cu_seqlens.tolist() == [0, 3, 6]


def test_document_that_ends_with_the_sample_masks_its_last_label() -> None:
    sample = cut_sample(np.arange(5), np.array([4]))
    assert sample.loss_mask.tolist() == [1, 1, 1, 0]
    assert sample.cu_seqlens.tolist() == [0, 4]


def test_a_microbatch_stacks_samples() -> None:
    dataset, mesh = MockDataset(100, 32, seed=0, mean_document_length=8), SimpleNamespace(grid=RankGrid(1, 1, 1, 1))
    mesh.at, config = mesh.grid.coordinates(0), RunConfig().override({"mbs": 3, "vocab_size": 100})
    feed = Feed(dataset, GlobalBatchSampler(3, seed=0), mesh, config, torch.device("cpu"))  # type: ignore[arg-type]
    samples = [dataset.sample(index) for index in range(3)]
    (batch,) = feed.next_global_batch(per_token=True)
    for name, dtype, of_sample in (
        ("tokens", torch.int32, "tokens"),
        ("labels", torch.int32, "labels"),
        ("loss_weight", torch.float64, "loss_mask"),
        ("positions", torch.int32, "positions"),
    ):
        columns = getattr(batch, name)
        assert (columns.shape, columns.dtype) == ((32, 3), dtype)
        for column, sample in zip(columns.unbind(1), samples, strict=True):
            assert np.array_equal(column.numpy(), getattr(sample, of_sample))
    assert batch.documents == tuple(tuple(sample.cu_seqlens.tolist()) for sample in samples)
    assert all(type(boundary) is int for row in batch.documents or () for boundary in row)


def test_samples_without_inner_boundaries() -> None:
    """None only if it holds for every row."""
    whole, split = cut_sample(np.arange(5), np.array([], dtype=int)), cut_sample(np.arange(5), np.array([2]))
    assert documents_of([whole, whole]) is None
    assert documents_of([whole, split]) == ((0, 4), (0, 2, 4))
