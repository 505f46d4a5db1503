"""Damaged files of every parser are read, or refused by one error of memo's; tests/support/mutation_campaign.py with
--mutations 1000 says more."""

import subprocess
import sys
from pathlib import Path

import pytest
from mutations import mutated

CAMPAIGN = Path(__file__).parents[1] / "support" / "mutation_campaign.py"


@pytest.mark.parametrize("mutations", [16, pytest.param(64, marks=pytest.mark.full)])
def test_damaged_files_are_read_or_refused(mutations: int) -> None:
    done = subprocess.run(
        [sys.executable, str(CAMPAIGN), "--mutations", str(mutations)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-5000:]
    table = done.stdout.splitlines()
    assert len(table) > 20
    refused = [int(line[24:].split()[1]) for line in table[1:] if line]
    assert min(refused) > 0  # else nothing was damaged


def test_damages_are_functions_of_their_seed() -> None:
    content = b'{"a": [1, {"b": "c"}], "d": null}'
    found = [mutated(content, "x", seed) for seed in range(200)]
    assert found == [mutated(content, "x", seed) for seed in range(200)]
    assert len(set(found)) > 150
