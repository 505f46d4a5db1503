"""A race is planted in each part of memo that orders streams or hands out memory, and the race checker tells of it."""

import contextlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import own_process
import pytest
import torch
from order_flows import ENGINE, Engine, start
from torch import Tensor

from memo.allocator import build
from memo.emulated_gpu.face import EmulatedGpu
from memo.errors import MemoError
from memo.executor import host_pool
from memo.executor.cuda_streams import CudaStreams
from memo.executor.host_pool import HostPool
from memo.executor.state_buffers import StateBuffers
from memo.executor.streams import Stream

STEPS = 2


def record_compute_instead(self: CudaStreams, stream: Stream) -> Any:
    """executor/cuda_streams.py: events of the offload stream stand for what compute has done."""
    event = torch.cuda.Event()
    event.record(self._stream(Stream.COMPUTE if stream is Stream.OFFLOAD else stream))
    return None if stream is Stream.HOST else event


def follow_nobody(self: StateBuffers, stream: Stream, other: Stream) -> None:
    """executor/state_buffers.py: gradients leave before they are complete."""


@pytest.mark.parametrize(
    ("owner", "name", "planted", "flow", "told"),
    [
        (CudaStreams, "record", record_compute_instead, "swap", "copy device to host"),
        (StateBuffers, "follow", follow_nobody, "states", "read after write: aten::add_"),
    ],
    ids=["cuda_streams.py", "state_buffers.py"],
)
def test_a_planted_race_is_told(
    gpu: EmulatedGpu,
    monkeypatch: pytest.MonkeyPatch,
    owner: type,
    name: str,
    planted: Callable[..., Any],
    flow: str,
    told: str,
) -> None:
    """The same flows without it are silent: test_training.py, test_lost_orders.py."""
    monkeypatch.setattr(owner, name, planted)
    running = start(flow)
    with contextlib.suppress(MemoError):  # what races may be refused as well, as a loss that is not finite
        for _ in range(STEPS):
            running.step()
    torch.cuda.synchronize()
    running.close()
    found = sorted(gpu.races())
    gpu.clear()
    assert any(told in text for text in found), found


@pytest.mark.parametrize("is_planted", [False, True])
def test_a_race_planted_in_the_host_pool_is_told(
    gpu: EmulatedGpu, monkeypatch: pytest.MonkeyPatch, is_planted: bool
) -> None:
    """executor/host_pool.py keeps an arena for the next pool, while copies of the last one are still under way."""
    arenas: dict[int, Tensor] = {}

    def kept(self: HostPool, *_: Any) -> Tensor:
        if self.num_bytes not in arenas:
            arenas[self.num_bytes] = torch.zeros(self.num_bytes, dtype=torch.uint8, pin_memory=True)
        return arenas[self.num_bytes]

    if is_planted:
        monkeypatch.setattr(HostPool, "_map", kept)
        monkeypatch.setattr(host_pool, "_pin", lambda *_: None)
    engines = [Engine(ENGINE["engine, pp 2 stage 0, 8 layers, 4 microbatches"]) for _ in range(2)]
    for engine in engines:
        engine.step(stop_after=4)  # an exception cuts it short, with offloads on their way
        engine.swapper.records.pool.close()
    torch.cuda.synchronize()
    found = sorted(gpu.races())
    gpu.clear()
    assert any("copy device to host" in text for text in found) == is_planted, found


def test_a_race_planted_in_the_cuda_allocator_is_told(tmp_path: Path) -> None:
    """A block that another stream uses is given on without the wait for that stream; test_settled_uses.py has it whole,
    and is silent."""
    wait = "C10_CUDA_CHECK(cudaStreamWaitEvent(stream.load(), event.get(), 0));"
    shutil.copytree(build.source_root(), tmp_path / "csrc")
    source = tmp_path / "csrc" / build.BINDINGS["cuda"]
    whole = source.read_text()
    assert whole.count(wait) == 1
    source.write_text(whole.replace(wait, "(void)event;"))
    done = own_process.run(tmp_path, Path(__file__).with_name("planned_uses.py"), None, [str(tmp_path / "csrc")])
    assert done.returncode == 0, done.stderr
    races = json.loads(done.stdout.splitlines()[-1])["races"]
    assert any("write after write" in race for race in races), races
