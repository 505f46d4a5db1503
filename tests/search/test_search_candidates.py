"""The layouts that are looked at are exactly those that memo can run."""

from dataclasses import replace
from itertools import product

import pytest

from memo.config.checks import check
from memo.config.derived import resolved_a2a_size
from memo.errors import ConfigError
from memo.search.candidates import (
    AUTO,
    FULL,
    GRID,
    KEEP,
    Layout,
    can_tile,
    config_of,
    exchanges,
    grids,
    layouts_of,
    parse_layout,
)
from memo.search.question import Question, ask


def generated(question: Question) -> set[Layout]:
    found = [way for grid, why in grids(question) if not why for way in layouts_of(question, grid)]
    assert len(found) == len(set(found))
    return set(found)


def is_refused(question: Question, layout: Layout) -> bool:
    try:
        check(config_of(question, layout), question.gpus, needs_data=False)
    except ConfigError:
        return True
    return False


@pytest.mark.parametrize(
    ("model", "gpus", "batch", "seq_len"),
    [
        ("gpt-tiny", 6, 12, 2 * 6 * 11),
        ("qwen3-tiny", 4, 6, 40),
        pytest.param("llama-tiny", 8, 8, 1024, marks=pytest.mark.full),
    ],
)
def test_every_layout_that_the_checks_accept(model: str, gpus: int, batch: int, seq_len: int) -> None:
    question = ask(model, gpus, global_batch_size=batch, seq_len=seq_len)
    found = generated(question)
    sizes = [size for size in (1, 2, 3, 4, 6, 8) if size <= gpus]
    for tp, cp, pp, vpp, mbs in product(sizes, sizes, sizes, (1, 2, 3, 4), (1, 2, 4, 8)):
        if tp * cp * pp > gpus and (vpp, mbs) != (1, 1):  # refused whatever the others are
            continue
        kinds = {
            way.cp_comm_type for way in found if (way.tp, way.cp, way.pp, way.vpp, way.mbs) == (tp, cp, pp, vpp, mbs)
        }
        for kind in ("p2p", "all_gather", "a2a"):
            layout = Layout(tp, cp, pp, vpp, mbs, kind)  # type: ignore[arg-type]
            accepted = not is_refused(question, layout) and (cp > 1 or kind == "p2p")
            assert (kind in kinds) == accepted, layout
        if "a2a+p2p" in kinds:  # where it is neither of the other two
            mixed = config_of(question, Layout(tp, cp, pp, vpp, mbs, "a2a+p2p"))
            assert 1 < resolved_a2a_size(mixed.model, mixed.parallel) < cp
    assert all(not is_refused(question, layout) for layout in found)


def test_mixed_exchange_where_the_heads_do_not_suffice() -> None:
    question = ask("llama-tiny", 8, seq_len=1024)  # 2 key/value heads
    kinds = [way.cp_comm_type for way in exchanges(question, Layout(cp=4))]
    assert kinds == ["p2p", "all_gather", "a2a+p2p"]
    assert [way.cp_comm_type for way in exchanges(question, Layout(cp=2))] == ["p2p", "all_gather", "a2a"]
    assert exchanges(question, Layout(tp=2)) == [Layout(tp=2)]


def test_refused_grids_say_why() -> None:
    question = ask("llama-tiny", 16, global_batch_size=8, seq_len=1024)
    reasons = {layout: why for layout, why in grids(question) if why}
    assert "--num-attention-heads 4 does not divide by --tp 8" in reasons[Layout(8, 1, 1)]
    assert "--num-layers 4 does not divide by --pp 8" in reasons[Layout(1, 1, 8)]
    assert "--global-batch-size 8 does not divide by --micro-batch-size 1 x dp 16" in reasons[Layout(1, 1, 1)]


def test_tiles_of_a_given_alpha() -> None:
    question = ask("gpt-tiny", 2, seq_len=1020)
    assert not can_tile(question, Layout(tp=2))
    assert can_tile(replace(question, seq_len=1024), Layout(tp=2))
    assert not can_tile(replace(question, seq_len=16), Layout(cp=2))  # 2 cp tiles = 32
    for strategy in (AUTO, FULL, KEEP):
        check(config_of(question, Layout(tp=2), strategy), 2, needs_data=False)
    with pytest.raises(ConfigError, match="offload-tiles"):
        check(config_of(question, Layout(tp=2), GRID[0]), 2, needs_data=False)


@pytest.mark.parametrize("layout", [Layout(), Layout(4, 2, 2, 4, 8, "a2a"), Layout(cp=2, cp_comm_type="a2a+p2p")])
def test_a_layout_is_read_as_it_is_written(layout: Layout) -> None:
    assert parse_layout(str(layout)) == layout


def test_other_spellings_of_a_layout() -> None:
    assert parse_layout("tp=4, cp=2") == Layout(4, 2)
    with pytest.raises(ConfigError, match="--explain 'tp4 dp2': 'dp2' is no part of a layout: write it as the table"):
        parse_layout("tp4 dp2")
    with pytest.raises(ConfigError, match="'tp0' is no part"):
        parse_layout("tp0")
