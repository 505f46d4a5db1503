"""Where the host waits for the device: what is counted and for whom, and that a training step waits nowhere else."""

import json
from pathlib import Path

import own_process
import pytest
import steady_steps
import torch

from memo.emulated_gpu.face import EmulatedGpu
from memo.emulated_gpu.launch import Device
from memo.executor.cuda_streams import CudaStreams
from memo.executor.streams import Stream

TWO_RANKS = ("dp 2", "pp 2", "pp 2, planned memory")


def test_waits_are_counted_with_the_functions_of_memo_that_wait(gpu: EmulatedGpu) -> None:
    streams = CudaStreams(torch.device("cuda", 0))
    host, pinned = torch.ones(8), torch.ones(8, pin_memory=True)
    with gpu.host_waits() as waits:
        device = pinned.to("cuda", non_blocking=True)
        event = streams.record(Stream.COMPUTE)
        assert not waits
        streams.wait(Stream.HOST, event)
        device.copy_(host, non_blocking=True)
        device.sum().item()
    found = {(wait.what, wait.functions): count for wait, count in waits.items()}
    assert found == {
        ("cudaEventSynchronize", ("memo.executor.cuda_streams.wait",)): 1,
        ("copy from pageable memory", ()): 1,
        ("cudaStreamSynchronize", ()): 1,
    }
    torch.cuda.synchronize()
    assert sum(waits.values()) == 3  # counted no more


@pytest.mark.parametrize("flow", [name for name in steady_steps.FLOWS if name not in TWO_RANKS])
def test_a_steady_step_waits_for_what_has_a_reason(any_schedule: EmulatedGpu, flow: str) -> None:
    """Once for all numbers of a step, and where the CPU computes; no copy is from or to pageable memory."""
    with steady_steps.trainer(flow) as training:
        for waits in steady_steps.steady_waits(training, any_schedule):
            assert waits == steady_steps.budget(training)


@pytest.mark.parametrize("flow", TWO_RANKS)
def test_a_steady_step_of_two_ranks_waits_for_nothing_else(tmp_path: Path, flow: str) -> None:
    device = Device(schedule="lazy", check_races=True)
    for out in own_process.run_ranks(tmp_path, 2, Path(steady_steps.__file__), device, [flow]):
        told = json.loads(out.splitlines()[-1])
        assert told["found"] == [told["budget"]] * steady_steps.MEASURED
        assert not told["races"]


def test_a_step_that_waits_elsewhere_is_told(gpu: EmulatedGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the tests above could not fail."""
    with steady_steps.trainer("plain") as training:
        feed = training.feed.next_global_batch
        monkeypatch.setattr(
            training.feed, "next_global_batch", lambda: [b for b in feed() if b.loss_weight.sum().item()]
        )
        for waits in steady_steps.steady_waits(training, gpu):
            assert waits.pop(steady_steps.READ) == 1
            ((told, count),) = waits.items()
            assert told.startswith("cudaStreamSynchronize in ") and told.endswith(" < memo.train.trainer.step")
            assert count == BASE_MICROBATCHES


BASE_MICROBATCHES = steady_steps.BASE["global_batch_size"] // steady_steps.BASE["micro_batch_size"]
