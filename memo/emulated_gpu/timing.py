"""Virtual time in a process on an emulated GPU: memo's model of the hardware computes the time of all work.

The emulator asks for the time of each kernel, copy and collective (csrc/emulated_gpu/runtime/timeline.h combines the
answers). time.perf_counter is the clock of the emulated host, and messages of a rank of --simulate-world take the
modelled time of real messages. time.monotonic and time.time are not changed, because time-outs are about real time.
"""

import contextlib
import ctypes
import functools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from memo.config.training import Dtype
from memo.estimate.hardware import Hardware
from memo.simulate.kernels import Group, Kernels

_DTYPES: dict[str, Dtype] = {"Float": "fp32", "Double": "fp64"}
"""{torch's name: dtype}; all narrower dtypes have the peak of bf16."""

_SECONDS: dict[str, Callable[..., float]] = {
    "product": lambda kernels, m, n, k: kernels.matmul_s(m, n, k),
    "grouped product": lambda kernels, m, n, k: kernels.matmul_s(m, n, k) / kernels.hardware.efficiency.expert_matmul,
    "attention forward": lambda kernels, flops, head_dim: kernels.attention_s(flops, head_dim, backward=False),
    "attention backward": lambda kernels, flops, head_dim: kernels.attention_s(flops, head_dim, backward=True),
    "memory": lambda kernels, num_bytes: kernels.memory_s(num_bytes),
    "offload": lambda kernels, num_bytes: num_bytes / (kernels.hardware.offload_gb_per_s * 1e9),
    "prefetch": lambda kernels, num_bytes: num_bytes / (kernels.hardware.prefetch_gb_per_s * 1e9),
    "gather": lambda kernels, num_bytes, size, stride: kernels.gather_s(num_bytes, _group(size, stride)),
    "all_reduce": lambda kernels, num_bytes, size, stride: kernels.all_reduce_s(num_bytes, _group(size, stride)),
    "all_to_all": lambda kernels, num_bytes, size, stride: kernels.all_to_all_s(num_bytes, _group(size, stride)),
    "message": lambda kernels, num_bytes, size, stride: kernels.message_s(num_bytes, _group(size, stride)),
}
"""{kind of work: function of its sizes that returns seconds}. The bytes of a collective are those of its larger buffer;
its group has `size` ranks with a distance of `stride`."""

_Answer = ctypes.CFUNCTYPE(
    ctypes.c_double, ctypes.c_char_p, ctypes.c_char_p, ctypes.POINTER(ctypes.c_double), ctypes.c_int
)


class Model:
    """Seconds of work on one machine."""

    def __init__(self, hardware: Hardware) -> None:
        self._kernels: dict[Dtype, Kernels] = {dtype: Kernels(hardware, dtype) for dtype in ("bf16", "fp32", "fp64")}
        self.seconds = functools.lru_cache(maxsize=1 << 16)(self._seconds)

    def _seconds(self, kind: str, dtype: str, *sizes: float) -> float:
        """`kind` is a key of _SECONDS; `dtype` is torch's name of the dtype of a matrix product or of attention."""
        return _SECONDS[kind](self._kernels[_DTYPES.get(dtype, "bf16")], *sizes)


class TimedLink:
    """The messages of one simulated group, which take time on a separate stream, one after another."""

    def __init__(self, runtime: ctypes.CDLL, model: Model, ranks: Sequence[int]) -> None:
        self._runtime, self._model = runtime, model
        self._stride = (ranks[-1] - ranks[0]) // max(1, len(ranks) - 1)
        self._size = len(ranks)
        self._stream: Any = None

    @contextlib.contextmanager
    def message(self, kind: str, num_bytes: int) -> Iterator[Callable[[], None]]:
        """A context whose work on the device represents a message and takes no time; the message begins with the work.

        Call the yielded function to wait for the message.
        """
        import torch

        if self._stream is None:
            self._stream = torch.cuda.Stream()
        over = torch.cuda.Event()
        self._stream.wait_stream(torch.cuda.current_stream())
        self._runtime.emulated_take_no_time(1)
        try:
            yield lambda: torch.cuda.current_stream().wait_event(over)
        finally:
            self._runtime.emulated_take_no_time(-1)
        seconds = self._model.seconds(kind, "", float(num_bytes), self._size, self._stride)
        self._runtime.emulated_message(ctypes.c_void_p(self._stream.cuda_stream), ctypes.c_double(seconds))
        over.record(self._stream)


def install(runtime: ctypes.CDLL, hardware: Hardware) -> None:
    """Make time virtual in this process from now on, with `hardware` as the machine."""
    from memo.mesh import simulated

    model = Model(hardware)
    answer = _Answer(
        lambda kind, dtype, sizes, num_sizes: model.seconds(kind.decode(), dtype.decode(), *sizes[:num_sizes])
    )
    _KEPT.append(answer)
    runtime.emulated_set_model(answer)
    runtime.emulated_now_s.restype = ctypes.c_double
    vars(time)["perf_counter"] = runtime.emulated_now_s
    simulated.links = functools.partial(TimedLink, runtime, model)


_KEPT: list[object] = []
"""Keeps the callbacks of the runtime alive until the process ends."""


def _group(size: float, stride: float) -> Group:
    return Group(int(size), int(stride))
