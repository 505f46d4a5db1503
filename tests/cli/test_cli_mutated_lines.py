"""A few of the mutated command lines of tests/support/command_campaign.py, which runs hundreds."""

from pathlib import Path

import pytest
from command_campaign import SEEDS, mutated_line, run_line

from memo.cli.main import COMMANDS


def test_the_campaign_has_every_command() -> None:
    assert {line.split()[0] for line in SEEDS} >= {command.name for command in COMMANDS}


@pytest.mark.parametrize("seed", (0, 1, 3, 4))
def test_a_mutated_command_line_ends_with_a_known_status(seed: int, tmp_path: Path) -> None:
    assert run_line(seed, tmp_path)[1] == "", mutated_line(seed)
