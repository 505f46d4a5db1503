"""run_state.json of a checkpoint: the state of its run, and checksums of this file and of the index of tensors."""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from memo.artifacts.checksum import ALGORITHM, checksum_of, checksum_of_json
from memo.artifacts.fields import Count, build
from memo.artifacts.reading import read_json, shown
from memo.artifacts.regular_file import replace_file
from memo.checkpoint.files import INDEX, RUN_STATE, DamagedError, checkpoint_file, damaged
from memo.config.identity import Fact
from memo.errors import CheckpointError

SCHEMA_VERSION = 3
INDEX_CHECKSUM = f"index_{ALGORITHM}"


@dataclass(frozen=True)
class RunState:
    """The state of a run besides its tensors.

    memo draws random numbers only for the initial weights: the order of samples and mock data are functions of (seed,
    consumed_samples), and the learning rate is a function of the iteration. So this state, masters and moments suffice
    to resume.
    """

    iteration: Count
    consumed_samples: Count
    seed: Count
    optimizer_steps: Count
    skipped_iterations: Count
    nan_iterations: Count
    global_batch_size: Count = 0
    """Samples of one step; 0 if the checkpoint does not have it."""
    model: dict[str, Fact] = field(default_factory=dict)
    """{flag: value} of all that the model computes (memo.config.identity); empty if the checkpoint does not have it."""
    data: dict[str, Fact] = field(default_factory=dict)
    """The identity of the run's data; empty if the checkpoint does not have it."""
    consecutive_skips: Count = 0
    """Number of steps skipped since the last update; 0 if the checkpoint does not have it."""
    expert_load: list[list[Count]] = field(default_factory=list)
    """For each layer, how often each expert was chosen in the last step; empty unless --moe-aux-loss-coeff reads it."""
    base: str = ""
    """Fingerprint of the files with frozen weights, which the checkpoint lacks; empty if it has all weights."""
    by_time: bool = False
    """Whether only --save-interval-minutes asked for this checkpoint; it is then deleted once a newer one is whole."""


def write_state(folder: Path, state: RunState) -> None:
    """Write the state, with the checksum of the folder's index, if there is one. Raises OSError."""
    index = folder / INDEX
    content: dict[str, Any] = {"schema_version": SCHEMA_VERSION, **asdict(state)}
    content[INDEX_CHECKSUM] = checksum_of(index.read_bytes()) if index.exists() else ""
    content[ALGORITHM] = checksum_of_json(content)
    replace_file(folder / RUN_STATE, json.dumps(content, indent=1))


def read_state(final: Path) -> RunState:
    """The state of one checkpoint; raises the CheckpointErrors of read_sealed_state."""
    return read_sealed_state(final)[0]


def read_sealed_state(final: Path, *, verify: bool = True) -> tuple[RunState, str]:
    """(state, checksum that the index must have).

    Raises CheckpointError if the file is missing, damaged, or has another version of memo's schema.
    """
    source = damaged(RUN_STATE)
    found = read_json(checkpoint_file(final, RUN_STATE), source)
    version = found.pop("schema_version", None) if isinstance(found, dict) else None
    if type(version) is not int:
        raise source.refusal("it has no schema_version")
    if version != SCHEMA_VERSION:
        raise CheckpointError(
            f"{RUN_STATE} is of schema {shown(version)}, but this version of memo reads schema {SCHEMA_VERSION}; use "
            "the version that wrote it"
        )
    checksum = found.pop(ALGORITHM, None)
    if verify and checksum != checksum_of_json({"schema_version": version, **found}):
        raise DamagedError(f"{RUN_STATE} has another checksum than it says: it is damaged")
    index_checksum = str(found.pop(INDEX_CHECKSUM, None))
    return build(RunState, found, source), index_checksum
