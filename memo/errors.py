"""The errors that a user can meet. Each message names the field, the values and the remedy.

The exit status of a command is decided here alone: 0 when it finished, or stopped and saved; EXIT_REFUSED for input
that it refuses; EXIT_FAILED for a failure after a good start; EXIT_OUTPUT where its output cannot be written. A fault
of memo itself ends in Python's traceback, status 1.
"""

import contextlib
import errno
import os
import signal
import sys
import warnings
from collections.abc import Iterator

from memo.standard_streams import OutputError, drop_output, use_streams, visible

EXIT_REFUSED = 2
"""Exit status of a command that refuses its input."""

EXIT_FAILED = 3
"""Exit status of a command that failed after a good start: out of memory, a lost rank, a full disk, damaged data."""

RIGHTS = "give the user who runs memo the right to it, or name another path"
"""The remedy where permissions forbid something."""

EXIT_OUTPUT = 128 + signal.SIGPIPE
"""Exit status of a command whose output cannot be written: that of `cat` in a shell when its reader goes away."""


class MemoError(Exception):
    """Base of every error that memo raises on purpose.

    Attributes:
        exit_status: the status of a command that ends with this error.
        teller: the rank that raised it, such as "rank 3 (node7, tp 1 cp 0 pp 1 dp 0)"; None in a single process, and
            before the process groups of a run exist.
        is_known: whether another rank has already told the same, so that one rank of each node is enough to repeat it.
        has_lines: whether the message has several lines, such as those of a compiler.
    """

    exit_status = EXIT_REFUSED
    has_lines = False
    teller: str | None = None
    is_known = False

    def failed_by(self, teller: str | None, has_started: bool = True) -> None:
        """Note that the error ended a run. After a good start (`has_started`) its status is EXIT_FAILED; a refused
        configuration stays a refusal even then."""
        self.teller = teller
        if has_started and not isinstance(self, ConfigError):
            self.exit_status = EXIT_FAILED


class ConfigError(MemoError, ValueError):
    """A configuration that cannot run; raised before any process group starts."""


class DataError(MemoError, ValueError):
    """A corpus, tokenizer or dataset file that cannot be used."""


class CheckpointError(MemoError, RuntimeError):
    """A checkpoint that cannot be written, found or loaded."""


class ResourceError(MemoError, RuntimeError):
    """A run that this machine cannot hold or finish; names what is needed and what is available."""


class ScheduleError(MemoError, RuntimeError):
    """A pipeline schedule that would deadlock or that misses an action."""


class ArtifactError(MemoError, ValueError):
    """A file that one stage of the work wrote for another stage, and that cannot be used."""


class TraceError(ArtifactError):
    """A recorded sequence of memory requests that makes no sense."""


class PlanError(MemoError, RuntimeError):
    """A plan that cannot be made or obeyed; names the limit that binds."""


class HostMemoryError(ResourceError):
    """Activations or states that do not fit in host memory; names what is needed, what is available, and the remedy."""


class DiskError(ResourceError):
    """Activations that a disk cannot hold, write or read back; names directory and record, and the remedy."""


class OutOfMemory(ResourceError):
    """A training step that ran out of memory; names the component that grew, and what makes room."""

    exit_status = EXIT_FAILED


class FileError(MemoError, RuntimeError):
    """An operation on a file, a folder or a process that the system refuses; names the path and the reason."""

    @classmethod
    def of(cls, error: OSError) -> "FileError":
        """The FileError that replaces an error of the system; a refusal (EXIT_REFUSED) if another path or mode
        helps."""
        found = cls(reason_of(error) + (f": {RIGHTS}" if isinstance(error, PermissionError) else ""))
        if not isinstance(error, FileNotFoundError | NotADirectoryError | IsADirectoryError | PermissionError):
            found.exit_status = EXIT_FAILED
        return found


class RankLost(MemoError, RuntimeError):
    """Another rank of the run has ended, hangs or never came; names the first such rank, and the reason."""

    exit_status = EXIT_FAILED


class GradientError(MemoError, RuntimeError):
    """Gradients that are not finite, in a step that can no longer be skipped."""


class DivergenceError(MemoError, RuntimeError):
    """Training whose numbers are no longer finite; names the iterations or the tensor."""


class ReplicaError(MemoError, RuntimeError):
    """Copies of weights on several ranks that no longer hold the same bits; names ranks and tensors."""


class ClosedError(MemoError, RuntimeError):
    """A trainer that is used after its close()."""


class AllocatorError(MemoError, RuntimeError):
    """The native allocator cannot be built for the running torch, or put into it; names the reason."""

    has_lines = True


class EmulatorError(MemoError, RuntimeError):
    """The emulated GPU cannot be built for the installed torch; names the reason."""

    has_lines = True


class RaceError(MemoError, RuntimeError):
    """Two accesses to one buffer that no event orders, at least one of them a write."""


def is_first_of_node() -> bool:
    """Whether this rank is the one of its node that works for all of them; true without a launcher."""
    return os.environ.get("LOCAL_RANK") in (None, "", "0")


def is_reporting_rank() -> bool:
    """Whether this rank prints errors that occur on all ranks alike: one rank of each node does.

    A rank that torchrun did not start may have its own terminal or log, so it always prints.
    """
    return is_first_of_node() or "TORCHELASTIC_RUN_ID" not in os.environ


@contextlib.contextmanager
def errors_of_files_are_told() -> Iterator[None]:
    """Turn an error of the system into a FileError, except for an OutputError, which exit_on_error judges."""
    try:
        yield
    except OutputError:
        raise
    except OSError as error:
        raise FileError.of(error) from error


@contextlib.contextmanager
def writing(what: object, kind: type[MemoError]) -> Iterator[None]:
    """Turn an error of the system into one of `kind`; `what` is the path that is written, or the flag that gave it."""
    try:
        yield
    except OSError as error:
        raise kind(
            f"{what} could not be written ({reason_of(error)}): check the path, its permissions and the free disk space"
        ) from error


@contextlib.contextmanager
def exit_on_error(needs_output: bool = True) -> Iterator[None]:
    """Turn an error of memo or of the system into one message on standard error, and its exit status.

    Errors that occur on all ranks alike are printed only where `is_reporting_rank` says so; a rank always prints an
    error of its own. If standard output is lost, a command that `needs_output` ends with EXIT_OUTPUT, quietly if only
    the reader has gone away, as in `memo solve ... | head`. Training goes on.
    """
    use_streams()
    try:
        with errors_of_files_are_told():
            try:
                yield
            except SystemExit as end:
                if not end.code:
                    sys.stdout.flush()
                raise
            sys.stdout.flush()
    except OutputError as error:
        drop_output()
        if needs_output:
            if error.errno != errno.EPIPE:
                print(f"error: {reason_of(error)}", file=sys.stderr)
            raise SystemExit(EXIT_OUTPUT) from None
    except MemoError as error:
        if is_reporting_rank() or (error.teller is not None and not error.is_known):
            print(error_line(error), file=sys.stderr, flush=True)
        raise SystemExit(error.exit_status) from None
    finally:
        try:
            sys.stdout.flush()
        except OutputError:  # Python would try again when it ends, and change the exit status to 120
            drop_output()


def error_line(error: MemoError) -> str:
    """The line that is printed: `error: ...`, after the name of the rank if there are several.

    Names that strangers choose, such as those of files and hosts, cannot change a terminal or begin a line of their
    own.
    """
    text = str(error)
    lines = text.splitlines() if error.has_lines else [text]
    told = "\n".join(visible(line) for line in lines)
    return f"error: {told}" if error.teller is None else f"{visible(error.teller)}: error: {told}"


def reason_of(error: OSError) -> str:
    """`PATH: reason`, as far as the system tells them."""
    why = error.strerror or str(error) or type(error).__name__
    return why if error.filename is None else f"{error.filename}: {why}"


def tell(text: str) -> None:
    """Print a line on standard error, as `visible` shows it."""
    print(visible(text), file=sys.stderr, flush=True)


def warn(text: str) -> None:
    """Warn with one line, as `visible` shows it; the warning points to the caller of the function that calls this
    one."""
    warnings.warn(visible(text), stacklevel=3)


def host_name() -> str:
    """Of this machine, without its domain."""
    return os.uname().nodename.split(".")[0]
