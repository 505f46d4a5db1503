"""A few random configurations of tests/support/layout_campaign.py, which tries many."""

import pytest
from layout_campaign import drawn, fault_of


@pytest.mark.full
@pytest.mark.parametrize("seed", range(20))
def test_a_random_configuration_equals_one_process(seed: int) -> None:
    found = drawn(seed)
    assert not fault_of(found), found


def test_a_difference_is_told() -> None:
    found = drawn(0)
    assert "losses differ by" in fault_of(found._replace(own={**found.own, "seed": 5}))
