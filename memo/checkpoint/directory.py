"""The directory that --save names: which checkpoints it holds, and how they are published and deleted.

    DIR/iter_0000100/                          a whole checkpoint: index.json, tensors-*.bin, run_state.json
    DIR/latest_checkpointed_iteration.txt      the pointer to the newest checkpoint, under Megatron's name
    DIR/iter_0000200.partial/                  a checkpoint that is being written or deleted, or was when its run died
    DIR/iter_0000100.replaced/                 the old checkpoint of an iteration, while a second save replaces it

A checkpoint is written under a temporary name and renamed when it is whole. Then the pointer changes. Only then may an
older checkpoint be renamed and deleted. Each step is durable before the next begins, so whenever a process is killed or
a machine loses power, the pointer names a whole checkpoint.

None of these functions is collective. Only rank 0 may call those that change the directory. No torch here.
"""

import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

from memo.artifacts.reading import Source, is_there, read_text, shown
from memo.artifacts.regular_file import make_durable, other_kind, replace_file
from memo.artifacts.run_log import default_log, header_path
from memo.checkpoint.files import RUN_CONFIG, RUN_STATE
from memo.checkpoint.owner import OWNER
from memo.checkpoint.run_state import RunState, read_state, write_state
from memo.config.hugging_face import CONFIG_FILE
from memo.errors import CheckpointError

LATEST = "latest_checkpointed_iteration.txt"
_ITERATION = re.compile(r"[0-9]{1,15}")
_WHOLE_NAME = re.compile(r"iter_(\d{7,})")


def latest_checkpoint(directory: str | Path) -> Path:
    """The checkpoint that the pointer names, or the newest one if there is no pointer.

    Raises CheckpointError if there is none.
    """
    root = Path(directory)
    pointer = root / LATEST
    if not is_there(pointer):
        if whole := whole_checkpoints(root):  # the pointer is lost, or a run died between its first two renames
            return whole[-1]
        is_model = is_there(root / CONFIG_FILE)
        raise CheckpointError(
            f"--load {root}: {LATEST} is not there, so it holds no whole checkpoint: give "
            + (f"it as --model {root}" if is_model else "the directory that an earlier run named with --save")
        )
    source = Source(f"--load {root}: {LATEST}", CheckpointError, "write the number of an iteration there")
    text = read_text(pointer, source).strip()
    if not _ITERATION.fullmatch(text):
        raise source.refusal(f"holds {shown(text)}, not the number of an iteration", "write that number there")
    final = root / f"iter_{int(text):07d}"
    for found in (final, replaced(final)):  # replaced: a run died between the two renames of publish
        if found.is_dir():
            return found
    raise CheckpointError(
        f"--load {root}: {LATEST} names {final.name}, which is not there: write the number of one that is"
    )


def resolve_checkpoint(directory: str | Path) -> Path:
    """The checkpoint at a path such as DIR/iter_0000100, else the newest in that directory. Raises the errors of
    latest_checkpoint."""
    named = Path(directory)
    return named if is_there(named / RUN_STATE) else latest_checkpoint(named)


def has_checkpoint(directory: str | Path) -> bool:
    """Whether `directory` is a checkpoint, or a run has saved there; the checkpoint may be damaged."""
    root = Path(directory)
    return is_there(root / RUN_STATE) or has_pointer(root) or bool(whole_checkpoints(root))


def has_pointer(directory: str | Path) -> bool:
    return is_there(Path(directory) / LATEST)


def newest_but(final: Path) -> Path | None:
    """The newest whole checkpoint older than `final` in its directory, else the newest besides `final`; None if there
    is none."""
    others = [path for path in whole_checkpoints(final.parent) if path.name != final.name]
    number = _WHOLE_NAME.match(final.name)
    older = [path for path in others if number and _iteration(path) < int(number[1])]
    return max(older or others, key=_iteration, default=None)


def partial(final: Path) -> Path:
    """The name of a checkpoint while it is written or deleted."""
    return final.with_name(f"{final.name}.partial")


def replaced(final: Path) -> Path:
    """The name of a checkpoint while a new save of its iteration replaces it."""
    return final.with_name(f"{final.name}.replaced")


def check_names(root: Path, flag: str) -> None:
    """Raises CheckpointError if a name that a run writes in `root` is taken by another kind of file, and OSError.

    A whole checkpoint may be a link to a checkpoint, also while it is replaced.
    """
    log = str(default_log(str(root), None))
    names = (root / OWNER, root / RUN_CONFIG, root / LATEST, Path(log), header_path(log))
    wrong = {name: other_kind(name) for name in names}
    for path in root.glob("iter_*"):
        is_link = path.is_symlink() and path.suffix != ".partial"
        wrong[path] = None if path.is_dir() and (is_link or not path.is_symlink()) else other_kind(path) or "a file"
    for path, kind in wrong.items():
        if kind is not None:
            raise CheckpointError(
                f"{flag} {root}: {path.name} is {kind}, but memo writes there under that name: remove it, or give "
                "another directory"
            )


def _remove(old: Path) -> None:
    """Remove a replaced checkpoint; if it is a link, only the link."""
    if old.is_symlink():
        old.unlink()
    else:
        shutil.rmtree(old, ignore_errors=True)


def prepare(final: Path) -> None:
    """Remove the leftovers of runs that died here, and make an empty partial(final). Raises OSError."""
    root = final.parent
    root.mkdir(parents=True, exist_ok=True)
    for left in root.glob("iter_*.replaced"):
        newer = left.with_name(left.name.removesuffix(".replaced"))
        if newer.exists():
            _remove(left)
        else:
            os.replace(left, newer)
    for left in root.glob("iter_*.partial"):
        shutil.rmtree(left)
    for left in (*root.glob(f"{LATEST}.*.partial"), *root.glob(f"{RUN_CONFIG}.*.partial")):
        left.unlink()
    partial(final).mkdir()


def publish(final: Path, state: RunState) -> None:
    """Make partial(final), whose tensors are all written, the newest checkpoint. Raises OSError."""
    written, root = partial(final), final.parent
    write_state(written, state)  # syncs the folder as well
    if final.exists():  # the same iteration was saved before: the new checkpoint counts
        os.replace(final, replaced(final))
    os.replace(written, final)
    make_durable(root)
    replace_file(root / LATEST, f"{state.iteration}\n")
    _remove(replaced(final))


def remove_older(final: Path, keep_latest_k: int) -> None:
    """Delete whole checkpoints older than the published `final`, so that the newest K remain, `final` included.

    0 deletes only checkpoints that --save-interval-minutes alone asked for. Checkpoints newer than `final` (they remain
    if a run goes back to an older one), links, and incomplete checkpoints are neither counted nor deleted. While steps
    are being skipped, the last checkpoint from before the first skip is kept as well. Raises OSError.
    """
    older = [path for path in whole_checkpoints(final.parent) if _iteration(path) < _iteration(final)]
    if keep_latest_k:
        gone = older[: max(0, len(older) - (keep_latest_k - 1))]
    else:
        gone = [path for path in older if _says(path, lambda state: state.by_time)]
    newest_first = (final, *reversed(older))
    spared = next((path for path in newest_first if _says(path, lambda state: state.consecutive_skips == 0)), None)
    for path in gone:
        if path != spared:
            os.replace(path, partial(path))  # a process killed during rmtree leaves no damaged checkpoint of this name
            shutil.rmtree(partial(path))


def whole_checkpoints(root: Path) -> list[Path]:
    """All whole checkpoints by iteration, the oldest first; no links, because other runs may own their targets."""
    if not os.path.isdir(root):
        return []
    found = [
        path
        for path in root.glob("iter_*")
        if _WHOLE_NAME.fullmatch(path.name) and not path.is_symlink() and (path / RUN_STATE).exists()
    ]
    return sorted(found, key=_iteration)


def _says(final: Path, what: Callable[[RunState], bool]) -> bool:
    """Whether `what` is true of the state of a checkpoint; false if the state cannot be read."""
    try:
        return what(read_state(final))
    except CheckpointError:
        return False


def _iteration(final: Path) -> int:
    match = _WHOLE_NAME.fullmatch(final.name)
    assert match is not None, f"{final} is not named as a checkpoint"
    return int(match[1])
