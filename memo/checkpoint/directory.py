"""The directory that --save names: which checkpoints it holds, and how one comes and goes.

    DIR/iter_0000100/                          a whole checkpoint: index.json, tensors-*.bin, run_state.json
    DIR/latest_checkpointed_iteration.txt      Megatron's name for the pointer to the newest
    DIR/iter_0000200.partial/                  one on its way in or out, or left by a run that died meanwhile
    DIR/iter_0000100.replaced/                 the older of two of one iteration, until the newer is in its place

A checkpoint is written aside and renamed when it is whole; then the pointer moves; only then may an older one go,
renamed before it is deleted. Each of these becomes durable before the next begins, so whenever a process is killed
or a machine loses power, the pointer names a whole checkpoint.

All functions are for one process alone, and all but the two that look are for rank 0. No torch here.
"""

import os
import re
import shutil
from pathlib import Path

from memo.artifacts.reading import Source, read_text, shown
from memo.checkpoint.files import RUN_STATE
from memo.checkpoint.run_state import RunState, read_state, write_state
from memo.errors import CheckpointError

LATEST = "latest_checkpointed_iteration.txt"
_ITERATION = re.compile(r"[0-9]{1,15}")
_WHOLE_NAME = re.compile(r"iter_(\d{7,})")


def latest_checkpoint(directory: str | Path) -> Path:
    """The one that the pointer names, without a pointer the newest; raises CheckpointError if there is none."""
    root = Path(directory)
    pointer = root / LATEST
    if not os.path.exists(pointer):  # of os.path, as here and below: a name that no file can have is not there either
        if whole := whole_checkpoints(root):  # the pointer is lost, or a run died between its first two renames
            return whole[-1]
        raise CheckpointError(
            f"--load {root}: {LATEST} is not there, so it holds no whole checkpoint: "
            "give the directory that an earlier run named with --save"
        )
    source = Source(f"--load {root}: {LATEST}", CheckpointError, "write the number of an iteration there")
    text = read_text(pointer, source).strip()
    if not _ITERATION.fullmatch(text):
        raise source.refusal(f"holds {shown(text)}, not the number of an iteration", "write that number there")
    final = root / f"iter_{int(text):07d}"
    for found in (final, replaced(final)):  # the second: a run died between the two renames of publish
        if found.is_dir():
            return found
    raise CheckpointError(
        f"--load {root}: {LATEST} names {final.name}, which is not there: write the number of one that is"
    )


def resolve_checkpoint(directory: str | Path) -> Path:
    """What a path names: one checkpoint, as DIR/iter_0000100, or the newest in it. Raises as latest_checkpoint."""
    named = Path(directory)
    return named if os.path.exists(named / RUN_STATE) else latest_checkpoint(named)


def has_checkpoint(directory: str | Path) -> bool:
    """Whether it is a checkpoint, or a run has ever saved there; what it saved may be damaged since."""
    root = Path(directory)
    return os.path.exists(root / RUN_STATE) or has_pointer(root) or bool(whole_checkpoints(root))


def has_pointer(directory: str | Path) -> bool:
    return os.path.exists(Path(directory) / LATEST)


def newest_but(final: Path) -> Path | None:
    """The newest whole checkpoint before `final` beside it, else the newest of all others; None if there is none."""
    others = [path for path in whole_checkpoints(final.parent) if path.name != final.name]
    number = _WHOLE_NAME.match(final.name)
    older = [path for path in others if number and _iteration(path) < int(number[1])]
    return max(older or others, key=_iteration, default=None)


def partial(final: Path) -> Path:
    """Where a checkpoint is written before it is whole, and goes to be deleted."""
    return final.with_name(f"{final.name}.partial")


def replaced(final: Path) -> Path:
    return final.with_name(f"{final.name}.replaced")


def prepare(final: Path) -> None:
    """Clear what runs left that died here, and make an empty partial(final). Raises OSError."""
    root = final.parent
    root.mkdir(parents=True, exist_ok=True)
    for left in root.glob("iter_*.replaced"):
        newer = left.with_name(left.name.removesuffix(".replaced"))
        if newer.exists():
            shutil.rmtree(left)
        else:
            os.replace(left, newer)
    for left in root.glob("iter_*.partial"):
        shutil.rmtree(left)
    partial(final).mkdir()


def publish(final: Path, state: RunState) -> None:
    """partial(final), whose tensors are all written, becomes the newest checkpoint. Raises OSError."""
    written, root = partial(final), final.parent
    write_state(written, state)
    _make_durable(written)
    if final.exists():  # the same iteration saved twice: the newer one counts
        os.replace(final, replaced(final))
    os.replace(written, final)
    _make_durable(root)
    pointer = root / LATEST
    _write_durably(pointer.with_suffix(".tmp"), f"{state.iteration}\n")
    os.replace(pointer.with_suffix(".tmp"), pointer)
    _make_durable(root)
    shutil.rmtree(replaced(final), ignore_errors=True)


def remove_older(final: Path, keep_latest_k: int) -> list[Path]:
    """Delete whole checkpoints older than `final`, which is published, so that with it the newest K remain.

    0 keeps all. What is newer than `final` (a run that went back to an older one left it), what is a link, and
    what is not whole counts for nothing and stays. So does the last one that was saved before a run of skipped steps
    that has not ended. Returns what was deleted, the oldest first. Raises OSError.
    """
    if keep_latest_k == 0:
        return []
    older = [path for path in whole_checkpoints(final.parent) if _iteration(path) < _iteration(final)]
    spared = next((path for path in (final, *reversed(older)) if _is_before_skips(path)), None)
    gone = [path for path in older[: max(0, len(older) - (keep_latest_k - 1))] if path != spared]
    for path in gone:
        os.replace(path, partial(path))  # a kill from here on leaves no half checkpoint under a whole one's name
        shutil.rmtree(partial(path))
    return gone


def whole_checkpoints(root: Path) -> list[Path]:
    """By iteration, the oldest first; no links, as their target belongs to somebody else."""
    if not os.path.isdir(root):
        return []
    found = [
        path
        for path in root.glob("iter_*")
        if _WHOLE_NAME.fullmatch(path.name) and not path.is_symlink() and (path / RUN_STATE).exists()
    ]
    return sorted(found, key=_iteration)


def _is_before_skips(final: Path) -> bool:
    """Whether the step before this checkpoint was not skipped; one that cannot be read is no good either."""
    try:
        return read_state(final).consecutive_skips == 0
    except CheckpointError:
        return False


def _iteration(final: Path) -> int:
    match = _WHOLE_NAME.fullmatch(final.name)
    assert match is not None, f"{final} is not named as a checkpoint"
    return int(match[1])


def _write_durably(path: Path, text: str) -> None:
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _make_durable(directory: Path) -> None:
    """The names in it; their files are synced by whoever writes them."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
