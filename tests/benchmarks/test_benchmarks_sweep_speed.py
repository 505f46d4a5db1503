"""sweep_speed.py: a search that is offered some sizes of tiles answers with these, and with whole layers alone."""

import pytest
import sweep_speed as benchmark

from memo.search import ask, search


@pytest.mark.parametrize("sizes", [(4096,), ()])
def test_a_search_knows_what_it_is_offered(sizes: tuple[int, ...]) -> None:
    """A million tokens on one GPU have to be swept, unless there is no such way."""
    length = 1 << 20
    question = ask("llama-3.1-8b", 1, seq_len=length, hardware="h100-80", global_batch_size=1, host_memory_gib=1024)
    free = search(question, top=1).best
    with benchmark.offering(sizes):
        found = search(question, top=1).best
    assert search(question, top=1).best == free  # all as before
    assert free is not None and free.strategy.tiles
    if sizes:
        assert found is not None and found.strategy.tiles == length // sizes[0]
    else:
        assert found is None or not found.strategy.tiles
