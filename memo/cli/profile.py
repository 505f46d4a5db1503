"""`memo profile`: one layer of a run, measured before there is a run."""

from collections.abc import Sequence
from dataclasses import dataclass

from memo.config.checks import check
from memo.config.derived import world_size_from_env
from memo.config.flags import parse_command
from memo.config.require import require
from memo.errors import is_reporting_rank

ABOUT = (
    "Measure one layer and the link to host memory, and print the plan that `memo train` would make with the same "
    "flags. Training then starts from what was measured. Takes every flag of `memo train`, also under torchrun; data "
    "are not read and need not be given."
)


@dataclass(frozen=True)
class _Options:
    """What is measured, and where it goes."""

    out: str | None = None
    """File for the layer's profile, for --layer-profile of `memo train`."""


def main(argv: Sequence[str]) -> None:
    """Raises MemoError for a run that cannot be, before torch is loaded where that is known by then."""
    config, options = parse_command(
        argv, _Options(), prog="memo profile", about=ABOUT, print_errors=is_reporting_rank()
    )
    require(
        config.memory.layer_profile is None,
        f"--layer-profile {config.memory.layer_profile} is of an earlier measurement, and memo profile measures: "
        "leave it out, or give it to memo train",
    )
    if config.data.data_path is None:
        config = config.override({"mock_data": True})
    check(config, world_size_from_env())
    from memo.train.profile import profile_run

    profile_run(config, options.out)
