"""--num-epochs: steps from samples and batches, in place of --train-iters."""

import pytest

from memo.config import RunConfig
from memo.config.checks import check
from memo.data import build_corpus
from memo.data.corpus import open_corpus, with_epochs
from memo.errors import ConfigError


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("corpus")
    (folder / "a.txt").write_text("word " * 2000)
    build_corpus([folder / "a.txt"], folder / "a")
    return str(folder / "a")


def run(corpus: str, **fields: object) -> RunConfig:
    return RunConfig().override({"data_path": corpus, "seq_length": 64, "gbs": 8, **fields})


@pytest.mark.parametrize(("epochs", "world_size"), [(1, 1), (2.5, 1), (0.01, 1), (3, 4)])
def test_steps_are_the_fewest_that_show_so_many_samples(corpus: str, epochs: float, world_size: int) -> None:
    config = run(corpus, num_epochs=epochs)
    samples = open_corpus(corpus, config.data, seed=1).samples_per_epoch
    assert samples > 100
    found = with_epochs(config, world_size).training
    assert (found.train_iters - 1) * 8 < epochs * samples <= found.train_iters * 8
    assert found.num_epochs is None, "so that the run's config.toml says its length once"


def test_without_a_batch_size_each_copy_of_the_model_takes_one_sample(corpus: str) -> None:
    config = run(corpus, num_epochs=1, gbs=None)
    assert with_epochs(config, 1).training.train_iters == 4 * with_epochs(config, 4).training.train_iters


def test_without_it_nothing_changes(corpus: str) -> None:
    assert with_epochs(run(corpus), 1) == run(corpus)


def test_the_later_one_of_two_lengths_counts(corpus: str) -> None:
    assert run(corpus, num_epochs=2).override({"train_iters": 7}).training.num_epochs is None
    assert run(corpus, train_iters=7).override({"num_epochs": 2}).training.train_iters == 100


def test_rules_about_steps_wait_until_they_are_known(corpus: str) -> None:
    config = run(corpus, num_epochs=1, lr_warmup_iters=5000)
    check(config, 1)
    with pytest.raises(ConfigError, match="--lr-warmup-iters 5000 is above --train-iters"):
        check(with_epochs(config, 1), 1)
    check(run(corpus, num_epochs=1, lr_decay_style="WSD", lr_wsd_decay_iters=500), 1)


def test_what_has_no_end_is_refused(corpus: str) -> None:
    class Endless:
        seq_length = 64

    with pytest.raises(ConfigError, match="the given dataset has no samples_per_epoch"):
        with_epochs(run(corpus, num_epochs=2), 1, Endless())  # type: ignore[arg-type]
