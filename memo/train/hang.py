"""What a rank shows when a step stands still: every thread's Python stack, and NCCL's record of messages."""

import sys
import threading
import traceback
from pathlib import Path

import torch._C._distributed_c10d as _c10d
import torch.distributed as dist


def describe_stacks() -> str:
    """Of all threads of Python, the most recent call last; this one's own is left out."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    found = []
    for ident, frame in sys._current_frames().items():
        if ident != threading.get_ident():
            found.append(f"thread {names.get(ident, ident)}:\n{''.join(traceback.format_stack(frame))}")
    return "".join(found)


def write_flight_record(log: str | None, rank: int) -> str:
    """Where torch's record of NCCL's messages lies now, as the end of a clause; "" where there is none.

    torch keeps the last 2000 messages of each rank (TORCH_FR_BUFFER_SIZE); `torchfrtrace` compares those of all ranks.
    """
    if log is None or not dist.is_initialized() or dist.get_backend() != "nccl":
        return ""
    path = Path(log).with_suffix(f".flight.rank{rank}.pickle")
    dump = getattr(_c10d, "_dump_fr_trace", None) or _c10d._dump_nccl_trace  # type: ignore[attr-defined]  # up to 2.12
    try:
        path.write_bytes(dump())
    except (OSError, RuntimeError, AttributeError) as error:
        return f"; torch's flight record could not be written ({error})"
    return f"; torch's flight record: {path}"
