"""The link of the scaled node (benchmarks/scaled_node.py): copies at a given number of bytes a second."""

import time

from torch import Tensor

from memo.executor.cpu_streams import ThreadStreams
from memo.executor.streams import Stream


class PacedStreams(ThreadStreams):
    """A link with a given number of bytes a second in each direction, for the copies of a plan."""

    def __init__(self, bytes_per_s: float) -> None:
        super().__init__()
        self.bytes_per_s = bytes_per_s

    def copy(self, stream: Stream, dst: Tensor, src: Tensor, dst_name: str, src_name: str) -> None:
        self._issue(stream, lambda: self._paced(dst, src))

    def _paced(self, dst: Tensor, src: Tensor) -> None:
        begin_s = time.perf_counter()
        dst.copy_(src)
        time.sleep(max(0.0, src.nbytes / self.bytes_per_s - (time.perf_counter() - begin_s)))
