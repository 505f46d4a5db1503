"""Needles: what a sample hides and asks for, against a reading of the sample token by token."""

import numpy as np
import pytest

from memo.data import MockDataset, NeedleDataset
from memo.data.needle import check_needles
from memo.errors import ConfigError

HAYSTACK_VOCABULARY = 50


def make(seq_length: int = 301, seed: int = 5, **options: object) -> NeedleDataset:
    return NeedleDataset(MockDataset(HAYSTACK_VOCABULARY, seq_length, 3, 40), seed, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(("num_needles", "key_length", "value_length"), [(8, 4, 4), (1, 1, 1), (5, 1, 3), (15, 9, 1)])
def test_every_answer_stands_in_the_text_behind_its_key(num_needles: int, key_length: int, value_length: int) -> None:
    options = {"num_needles": num_needles, "key_length": key_length, "value_length": value_length}
    dataset = make(**options, keys=range(100, 120), values=range(200, 220))
    for index in range(6):
        sample, questions = dataset.sample(index), dataset.questions(index)
        window = np.append(sample.tokens, sample.labels[-1])
        assert window.shape == (302,) and (sample.tokens[1:] == sample.labels[:-1]).all()
        assert sample.cu_seqlens.tolist() == [0, 301] and (sample.positions == np.arange(301)).all()
        assert questions.labels.shape == (num_needles, value_length) and questions.distances.shape == (num_needles,)
        assert set(np.flatnonzero(sample.loss_mask)) == set(questions.labels.flatten())
        text_length = 302 - num_needles * (key_length + value_length)
        for labels, distance in zip(questions.labels, questions.distances, strict=True):
            asked = np.arange(labels[0] + 1 - key_length, labels[-1] + 2)  # the key and its value, in the window
            assert asked[0] >= text_length > asked[0] - distance + len(asked) - 1
            assert (window[asked] == window[asked - distance]).all()
            assert (window[asked[:key_length]] // 100 == 1).all() and (window[asked[key_length:]] // 100 == 2).all()
        # Of each key the first token is its own, so an answer cannot be another pair's.
        firsts = [window[labels[0] + 1 - key_length] for labels in questions.labels]
        assert len(set(firsts)) == num_needles
        assert np.isin(window, range(100, 220)).sum() == 2 * num_needles * (key_length + value_length)


def test_needles_lie_at_all_depths_and_questions_follow_no_order() -> None:
    dataset = make(num_needles=4, key_length=1, value_length=1)
    distances = np.stack([dataset.questions(index).distances for index in range(400)])
    assert distances.min() < 20 and distances.max() > 290
    counts, _ = np.histogram(distances, bins=4, range=(0, 300))
    assert counts.min() > 300  # of 1600, about 400 each
    longest_first = (np.argmax(distances, axis=1) == 0).mean()
    assert 0.15 < longest_first < 0.35  # one of four by chance


def test_samples_are_a_function_of_seed_and_index() -> None:
    one, same, other = make(), make(), make(seed=6)
    assert (one.sample(3).tokens == same.sample(3).tokens).all()
    assert (one.sample(3).tokens != one.sample(4).tokens).any()
    assert (one.questions(3).distances != other.questions(3).distances).any()
    haystack = MockDataset(HAYSTACK_VOCABULARY, 301, 3, 40).sample(3)
    assert (one.sample(3).tokens == haystack.tokens).mean() > 0.5  # the rest is hidden or asked


def test_keys_and_values_are_of_the_text_and_avoid_what_they_must() -> None:
    dataset = make(avoid=(7, 8, 9))
    for index in range(5):
        sample, text = dataset.sample(index), MockDataset(HAYSTACK_VOCABULARY, 301, 3, 40).sample(index)
        pairs = sample.labels[dataset.questions(index).labels[0, 0] - 4 :]
        assert np.isin(pairs, text.tokens).all() and not np.isin(pairs, (7, 8, 9)).any()
        assert len(np.unique(pairs)) > 10


def test_what_does_not_fit_is_refused() -> None:
    check_needles(127, 8, 4, 4)
    assert make(127).sample(0).loss_mask.sum() == 32
    message = r"--num-needles 8 x \(--key-length 4 \+ --value-length 4\) tokens, .* --seq-length 126: give at least 127"
    with pytest.raises(ConfigError, match=message):
        make(126)
    with pytest.raises(ConfigError, match=r"--value-length is 0: give at least 1"):
        make(value_length=0)
    with pytest.raises(ConfigError, match=r"--num-needles is 4, but the keys must .* 3 ids"):
        make(num_needles=4, keys=(1, 2, 3)).sample(0)
    with pytest.raises(ConfigError, match=r"of \(5,\) for values none is left"):
        make(values=(5,), avoid=(5,)).sample(0)
