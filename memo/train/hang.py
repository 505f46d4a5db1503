"""Describes a rank whose step hangs: the Python stack of every thread, and a file with NCCL's flight record."""

import sys
import threading
import traceback
from pathlib import Path

import torch._C._distributed_c10d as _c10d
import torch.distributed as dist

from memo.artifacts.regular_file import replace_file


def describe_stacks() -> str:
    """The stacks of all Python threads except the calling one, with the most recent call last."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    found = []
    for ident, frame in sys._current_frames().items():
        if ident != threading.get_ident():
            found.append(f"thread {names.get(ident, ident)}:\n{''.join(traceback.format_stack(frame))}")
    return "".join(found)


def write_flight_record(log: str | None, rank: int) -> str:
    """Write torch's flight record of NCCL; returns words about its file for the end of a message, "" without a record.

    torch keeps the last 2000 messages of each rank (TORCH_FR_BUFFER_SIZE); `torchfrtrace` compares those of all ranks.
    """
    if log is None or not dist.is_initialized() or dist.get_backend() != "nccl":
        return ""
    path = Path(log).with_suffix(f".flight.rank{rank}.pickle")
    dump = getattr(_c10d, "_dump_fr_trace", None) or _c10d._dump_nccl_trace  # type: ignore[attr-defined]  # up to 2.12
    try:
        replace_file(path, dump())
    except (OSError, RuntimeError, AttributeError) as error:
        return f"; torch's flight record could not be written ({error})"
    return f"; torch's flight record: {path}"
