"""Blends: the order is Megatron-LM's rule, sample by sample, in any layout; each corpus goes on epoch after epoch."""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from documents import write_corpus

from memo.config import RunConfig
from memo.config.blend import Blend, read_blend
from memo.config.data import DataConfig
from memo.config.grid import rank_grid
from memo.data import BlendedDataset, GlobalBatchSampler, open_corpora, open_corpus
from memo.data import blended as order_module
from memo.data.blended import BlendOrder
from memo.data.corpus import with_epochs
from memo.parallel.zigzag import token_indices
from memo.train.feed import Feed


def by_definition(weights: list[float], size: int) -> list[int]:
    """The corpus of each sample, in a loop over samples as the rule is written down."""
    normal = [float(each) for each in np.array(weights) / np.sum(weights)]
    normal = [float(each) for each in np.array(normal) / np.sum(normal)]
    counts, found = [0] * len(weights), []
    for sample in range(size):
        best = 0
        for corpus in range(1, len(weights)):
            lag = normal[corpus] * float(max(sample, 1)) - float(counts[corpus])
            if lag > normal[best] * float(max(sample, 1)) - float(counts[best]):
                best = corpus
        counts[best] += 1
        found.append(best)
    return found


WEIGHTS = [
    [1.0],
    [0.7, 0.3],
    [1, 1, 1],
    [5, 0, 5],
    [0.1, 0.2, 0.3, 0.4],
    [1, 1, 4],
    [1e-4, 1.0],
    [67.0, 15.0, 4.5, 4.5, 4.5, 2.5, 2.0],
    [2**0.5, 3**0.5, 5**0.5],
    [123457.0, 8191.0, 99991.0, 3.0],
]


@pytest.mark.parametrize("weights", WEIGHTS, ids=str)
def test_the_order_is_the_rule(weights: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks that are computed side by side are the loop, whichever sample is asked for first."""
    monkeypatch.setattr(order_module, "_BLOCK", 64)
    size = 64 * 40
    expected, order = by_definition(weights, size), BlendOrder(weights)
    assert order.locate(size - 1)[0] == expected[-1]
    found = [order.locate(sample) for sample in range(size)]
    assert [corpus for corpus, _ in found] == expected
    for corpus in range(len(weights)):  # its samples from 0 on, each once
        assert [number for which, number in found if which == corpus] == list(range(expected.count(corpus)))
    for at in (0, 1, 63, 64, 1000, size):
        assert order.counts(at).tolist() == [expected[:at].count(corpus) for corpus in range(len(weights))]


@pytest.mark.parametrize("weights", WEIGHTS, ids=str)
def test_after_any_number_of_samples_each_corpus_has_its_share(weights: list[float]) -> None:
    order = BlendOrder(weights)
    for samples in (10, 999, 12_345, 200_000):
        assert np.abs(order.counts(samples) - order.weights * samples).max() < 2


def test_guesses_that_do_not_agree_are_mended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counts far from what any sample leads to, in all blocks but the first."""
    monkeypatch.setattr(order_module, "_BLOCK", 16)
    monkeypatch.setattr(BlendOrder, "_guessed", lambda self, samples: np.outer(samples, [0.0, 0.0, 1.0]))
    order = BlendOrder([3, 2, 1])
    assert [order.locate(i)[0] for i in reversed(range(320))][::-1] == by_definition([3, 2, 1], 320)


def write(prefix: Path, num_documents: int, base: int) -> str:
    """Documents of 40 tokens, all from `base` on, so that a token says whose it is."""
    return write_corpus(prefix, (base + (np.arange(40) + 7 * document) % 50 for document in range(num_documents)))


@pytest.fixture(scope="module")
def corpora(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    folder = tmp_path_factory.mktemp("corpora")
    return tuple(write(folder / name, size, base) for name, size, base in (("a", 30, 0), ("b", 9, 100), ("c", 3, 200)))


DATA = DataConfig(seq_length=16)
LAYOUTS = [
    # dp, cp, tp, micro batch, global batch
    (1, 1, 1, 1, 8),
    (1, 1, 1, 4, 8),
    (2, 1, 1, 1, 8),
    (2, 2, 1, 2, 8),
    (4, 1, 2, 1, 8),
    (4, 1, 1, 2, 8),
    (1, 4, 2, 1, 8),
    (1, 2, 1, 8, 8),
    (2, 1, 1, 2, 4),
    (1, 1, 1, 3, 6),
]


@pytest.mark.parametrize(("dp", "cp", "tp", "micro", "batch"), LAYOUTS)
def test_all_layouts_read_the_same_samples(
    corpora: tuple[str, ...], dp: int, cp: int, tp: int, micro: int, batch: int
) -> None:
    """24 samples as the ranks' feeds hand them out, put together again, are the corpora's own by the definition."""
    words = ("0.5", corpora[0], "0.3", corpora[1], "0.2", corpora[2])
    fields = {"tp": tp, "cp": cp, "mbs": micro, "gbs": batch, "seq_length": 16, "vocab_size": 300}
    config = RunConfig().override({**fields, "data_path": list(words)})
    world_size = dp * cp * tp
    assert config.parallel.dp(world_size) == dp
    grid = rank_grid(config.parallel, world_size)
    pieces: dict[tuple[int, int], torch.Tensor] = {}
    for rank in range(world_size):
        at = grid.coordinates(rank)
        mesh = SimpleNamespace(grid=grid, at=at, dp=None)
        dataset, sampler = open_corpora("--data-path", words, DATA, seed=3), GlobalBatchSampler(batch, seed=3)
        feed = Feed(dataset, sampler, mesh, config, torch.device("cpu"))  # type: ignore[arg-type]
        for step in range(24 // batch):
            for number, one in enumerate(feed.next_global_batch(per_token=True)):
                for row in range(micro):
                    sample = step * batch + (number * dp + at.dp) * micro + row
                    whole = pieces.setdefault((sample, at.tp), torch.full((16,), -1))
                    whole[token_indices(16, cp, at.cp)] = one.tokens[:, row].long()
    alone = [open_corpus(prefix, DATA, seed=3) for prefix in corpora]
    given = [0, 0, 0]
    for sample, corpus in enumerate(by_definition([0.5, 0.3, 0.2], 24)):
        for rank in range(tp):
            np.testing.assert_array_equal(pieces[sample, rank].numpy(), alone[corpus].sample(given[corpus]).tokens)
        given[corpus] += 1
    assert len(pieces) == 24 * tp


def test_a_corpus_that_ends_begins_again_in_another_order(corpora: tuple[str, ...]) -> None:
    """c has 7 samples and half of the blend: its samples are its own first, second and third epoch."""
    blend = open_corpora("--data-path", ("1", corpora[0], "1", corpora[2]), DATA, seed=3)
    assert isinstance(blend, BlendedDataset)
    (long, short), epoch = blend.corpora, blend.corpora[1].samples_per_epoch
    assert epoch == 7
    starts = [int(blend.sample(i).tokens[0]) for i in range(6 * epoch) if blend.order.locate(i)[0] == 1]  # three epochs
    assert starts == [int(short.sample(i).tokens[0]) for i in range(3 * epoch)]
    assert len({tuple(starts[i * epoch : (i + 1) * epoch]) for i in range(3)}) == 3
    assert blend.samples_per_epoch == long.samples_per_epoch + 7
    assert blend.where(0, 3).startswith(f"{corpora[0]}.bin, document ")


def test_without_weights_each_corpus_counts_by_its_size(corpora: tuple[str, ...]) -> None:
    """An epoch of such a blend is an epoch of each corpus, to a sample."""
    blend = open_corpora("--data-path", corpora, DATA, seed=3)
    assert isinstance(blend, BlendedDataset)
    sizes = [corpus.samples_per_epoch for corpus in blend.corpora]
    np.testing.assert_allclose(blend.order.weights, np.array(sizes) / sum(sizes), rtol=1e-15)
    assert np.abs(blend.order.counts(blend.samples_per_epoch) - sizes).max() <= 1


def test_epochs_count_the_samples_of_all_corpora(corpora: tuple[str, ...]) -> None:
    config = RunConfig().override({"data_path": ["9", corpora[0], "1", corpora[1]], "seq_length": 16, "gbs": 8})
    sizes = [open_corpus(prefix, DATA, seed=1).samples_per_epoch for prefix in corpora[:2]]
    found = with_epochs(config.override({"num_epochs": 2.0}), 1).training.train_iters
    assert (found - 1) * 8 < 2 * sum(sizes) <= found * 8


def test_what_a_blend_says_of_itself(corpora: tuple[str, ...]) -> None:
    first = open_corpora("--data-path", ("0.7", corpora[0], "0.3", corpora[1]), DATA, seed=3)
    other = open_corpora("--data-path", ("0.6", corpora[0], "0.4", corpora[1]), DATA, seed=3)
    scaled = open_corpora("--data-path", ("70", corpora[0], "30", corpora[1]), DATA, seed=3)
    assert first.identity() == scaled.identity() != other.identity()
    assert first.identity().keys() == {"data_path", "packing"}
    assert isinstance(first, BlendedDataset)
    header, *lines = first.describe(num_samples=1000).splitlines()
    assert header == "a blend of 2 corpora, 96 samples an epoch"
    assert lines[1].startswith(f"  30 % {corpora[1]}: 360 tokens of 9 documents in 22 samples; 13.6 passes")


def test_one_corpus_is_no_blend(corpora: tuple[str, ...]) -> None:
    for words in ((corpora[0],), ("0.4", corpora[0])):
        assert not isinstance(open_corpora("--data-path", words, DATA, seed=3), BlendedDataset)


def test_words_that_are_blends() -> None:
    assert read_blend("--data-path", ["30", "a", "70", "b"]) == Blend(("a", "b"), (30.0, 70.0))
    assert read_blend("--data-path", ["a", "b", "c"]) == Blend(("a", "b", "c"))
    assert read_blend("--data-path", ["2024_01"]) == Blend(("2024_01",))
    assert read_blend("--data-path", ["1e-3", "./0.7", "0", "b"]) == Blend(("./0.7", "b"), (1e-3, 0.0))
