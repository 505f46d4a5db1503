"""The errors that a user can meet. Each message names the field, the values and the remedy."""

import contextlib
import os
import sys
from collections.abc import Iterator

EXIT_REFUSED = 2
"""Exit status of a command that refuses its input."""


class MemoError(Exception):
    """Base of every error that memo raises on purpose."""


class ConfigError(MemoError, ValueError):
    """A configuration that cannot run; raised before any process group starts."""


class DataError(MemoError, ValueError):
    """A corpus, tokenizer or dataset file that cannot be used."""


class CheckpointError(MemoError, RuntimeError):
    """A checkpoint that cannot be written, found or loaded."""


class ResourceError(MemoError, RuntimeError):
    """A run that this machine cannot hold or finish; names what is needed and what there is."""


class ScheduleError(MemoError, RuntimeError):
    """A pipeline schedule that would deadlock or that misses an action."""


class ArtifactError(MemoError, ValueError):
    """A file that one stage wrote for another and that cannot be used."""


class TraceError(ArtifactError):
    """A recorded sequence of memory requests that makes no sense."""


class PlanError(MemoError, RuntimeError):
    """A plan that cannot be made or obeyed; names the limit that binds."""


class HostMemoryError(ResourceError):
    """Activations or states that do not fit in host memory; names what is needed, what there is, and the remedy."""


class OutOfMemory(ResourceError):
    """A training step that memory did not suffice for; names the component that grew, and what makes room."""


class GradientError(MemoError, RuntimeError):
    """Gradients that are not finite, in a step that can no longer be skipped."""


class DivergenceError(MemoError, RuntimeError):
    """Training that has left the finite numbers; names the iterations or the tensor."""


class ReplicaError(MemoError, RuntimeError):
    """Copies of weights on several ranks that no longer hold the same bits; names ranks and tensors."""


class ClosedError(MemoError, RuntimeError):
    """A trainer that is used after its close()."""


class AllocatorError(MemoError, RuntimeError):
    """The native allocator cannot be built for the running torch, or put into it; names the reason."""


class RaceError(MemoError, RuntimeError):
    """Two accesses to one buffer that no event orders, at least one of them a write."""


def is_reporting_rank() -> bool:
    """One rank of each node reports what is wrong; without a launcher there is only one."""
    return os.environ.get("LOCAL_RANK") in (None, "", "0")


@contextlib.contextmanager
def exit_on_error(print_errors: bool = True) -> Iterator[None]:
    """An error of memo's becomes `error: ...` on standard error and exit status 2.

    Out of memory is told by whichever rank meets it: the others only see that it is gone.
    """
    try:
        yield
    except MemoError as error:
        if print_errors or isinstance(error, OutOfMemory):
            print(f"error: {error}", file=sys.stderr)
        raise SystemExit(EXIT_REFUSED) from None
