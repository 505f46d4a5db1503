"""What lets a search leave candidates uncounted is never wrong about them."""

import pytest

from memo.search.axis import single_layouts
from memo.search.candidates import batches, num_microbatches
from memo.search.longest import remedies
from memo.search.placed import costs_of, frugal_strategies, placed_strategies
from memo.search.question import Question, ask
from memo.search.sizing import may_fit
from memo.search.state_costs import Costs
from memo.search.states import fits, nearest

TOO_LARGE = [
    ask("gpt-7b", 8, seq_len=65536, global_batch_size=1 << 20),  # the batch does not fit on a GPU
    ask("llama-3.1-8b", 8, seq_len=1 << 30, hardware="h100-80"),  # nor inputs of layers in any memory
    ask("gpt-65b", 4, seq_len=65536),
    ask("gpt-7b", 2, seq_len=1 << 20, host_memory_gib=100),
]
"""Of each some layouts fit, or few do."""


def costs(question: Question, every: int) -> list[Costs]:
    """Of one in so many of the candidates that need least."""
    pairs = [(layout, way) for layout in single_layouts(question) for way in frugal_strategies(question, layout)]
    return [costs_of(question, *pair) for pair in pairs[::every]]


@pytest.mark.parametrize("question", TOO_LARGE)
def test_what_a_layout_takes_at_least_is_no_more_than_it_takes(question: Question) -> None:
    refused = [layout for layout in single_layouts(question) if not may_fit(question, layout)]
    for layout in refused:
        assert not any(fits(costs_of(question, layout, way)) for way in frugal_strategies(question, layout))


def test_some_layouts_are_refused_by_their_least() -> None:
    assert not any(may_fit(question, layout) for question in TOO_LARGE[:2] for layout in single_layouts(question))
    small = ask("gpt-7b", 8)
    assert all(may_fit(small, layout) for layout in single_layouts(small))


@pytest.mark.parametrize("question", TOO_LARGE)
def test_nothing_that_fits_is_said_to_lack_memory(question: Question) -> None:
    assert all(max(each.excess(*nearest(each))) <= 1 or not fits(each) for each in costs(question, 19))


@pytest.mark.parametrize(
    "question",
    [
        ask("gpt-7b", 4, seq_len=32768, global_batch_size=16, gpu_memory_gib=24),
        pytest.param(ask("llama-3.1-70b", 8, seq_len=32768, hardware="h100-80"), marks=pytest.mark.full),
    ],
)
def test_of_several_microbatches_none_fit_where_the_least_do_not(question: Question) -> None:
    """One alone may, whose gradients need not wait in host memory to be added to."""
    fitting = 0
    for small in single_layouts(question):
        for layout in batches(question, small):
            if small.cp_comm_type != "p2p" or num_microbatches(question, layout) == 1:
                continue
            for way in placed_strategies(question, layout):
                if fits(costs_of(question, layout, way)):
                    fitting += 1
                    assert fits(costs_of(question, small, way._replace(order="depth_first")))
    assert fitting > 10


def test_a_refusal_counts_few_of_its_candidates(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each kind of remedy was once looked for candidate by candidate, which took a minute."""
    counted = []

    def counting(costs: Costs) -> bool:
        counted.append(costs)
        return fits(costs)

    monkeypatch.setattr("memo.search.axis.can_be_placed", counting)
    assert remedies(TOO_LARGE[0]) == ["--seq-len 28672", "--gpus 32"]
    assert len(counted) < 600
