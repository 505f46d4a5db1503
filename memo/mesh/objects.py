"""Exchanges Python objects and errors over a group of all ranks; a group of None is a single process."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed import ProcessGroup

from memo.errors import MemoError

T = TypeVar("T")


def of_all_ranks(value: T, group: ProcessGroup | None) -> list[T]:
    """Return the values of all ranks, by rank; collective."""
    if group is None:
        return [value]
    everyone: list[Any] = [None] * group.size()
    dist.all_gather_object(everyone, value, group=group)
    return everyone


def from_rank_zero(action: Callable[[], T], group: ProcessGroup | None) -> T:
    """Run `action` on rank 0, and return or raise its outcome on every rank; collective."""
    return from_rank(0, action, group)


def from_rank(source: int, action: Callable[[], T], group: ProcessGroup | None) -> T:
    """Run `action` on rank `source`, and return or raise its outcome on every rank; collective."""
    if group is None:
        return action()
    outcome: list[Any] = [None, None]
    if group.rank() == source:
        try:
            outcome[0] = action()
        except (OSError, MemoError) as error:
            outcome[1] = type(error)(str(error))  # without its traceback, which cannot travel
        except Exception as error:
            outcome[1] = RuntimeError(f"{type(error).__name__}: {error}")
    dist.broadcast_object_list(outcome, src=source, group=group)
    if outcome[1] is not None:
        raise outcome[1]
    value: T = outcome[0]
    return value
