"""How a Trainer ends: close(), the with block, process groups that it owns or not, and what comes after."""

import gc
import os
import signal
import weakref
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch.distributed as dist
from ranks import run_ranks
from trainers import SMALL_RUN

import memo
from memo.config.parallel import ParallelConfig
from memo.errors import ClosedError, HostMemoryError
from memo.mesh import init_distributed, local_device
from memo.train.watchdog import Watchdog


def trainer(**overrides: Any) -> memo.Trainer:
    return memo.Trainer(
        "gpt-tiny", **{**SMALL_RUN, "mock_data": True, "eval_interval": 1, "offload_alpha": "off", **overrides}
    )


CALLS: list[Callable[[memo.Trainer], object]] = [
    lambda made: made.train(),
    lambda made: made.step(),
    lambda made: made.evaluate(),
    lambda made: made.benchmark(1),
    lambda made: made.save("nowhere"),
    lambda made: made.print_header(),
    lambda made: made.print("text"),
    lambda made: made.feed,
    lambda made: made.parts,
    lambda made: made.mesh,
]


def test_a_closed_trainer_says_so_and_may_be_closed_again() -> None:
    with trainer() as made:
        assert made.step().iteration == 1
        model = weakref.ref(made.parts.data_parallel)
    made.close()
    for call in CALLS:
        with pytest.raises(ClosedError, match=r"this Trainer is closed .*: use it before close\(\), or make another"):
            call(made)
    gc.collect()
    assert model() is None  # although the trainer is still at hand
    assert made.iteration == 1


def test_an_error_inside_the_block_closes_and_goes_on() -> None:
    with pytest.raises(KeyError, match="mine"), trainer() as made:
        raise KeyError("mine")
    with pytest.raises(ClosedError):
        made.step()


def _keeps_the_groups_of_others() -> bool:
    with trainer(tp=2) as made:
        made.step()
    return dist.is_initialized()


def test_groups_that_the_user_started_stay() -> None:
    assert run_ranks(2, _keeps_the_groups_of_others) == [True, True]


def _under_a_launcher(port: int) -> list[bool]:
    """As torchrun starts a rank: no process group yet, and a store that lives longer than any."""
    dist.barrier()  # nobody is still connecting
    dist.destroy_process_group()
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    os.environ |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"}
    seen = []
    closed: list[memo.Trainer] = []
    for _ in range(2):
        with trainer(tp=2) as owner:
            with trainer(tp=2) as other:
                other.step()
            for earlier in [other, *closed]:
                earlier.close()  # once more: these groups are not theirs
            closed.append(owner)
            seen.append(dist.is_initialized())
            owner.step()
        seen.append(dist.is_initialized())
    with pytest.raises(HostMemoryError):
        trainer(tp=2, num_layers=4, offload_alpha=0.5, offload_host_memory_gib=1e-9)
    seen.append(dist.is_initialized())
    init_distributed(local_device("cpu"), ParallelConfig(distributed_timeout_minutes=1.0))  # what run_ranks will end
    return seen


def test_a_trainer_ends_the_groups_it_started_and_a_second_starts_its_own() -> None:
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    for seen in run_ranks(2, _under_a_launcher, store.port):
        assert seen == [True, False, True, False, False]


def test_a_signal_does_not_cut_short_why_a_run_ends() -> None:
    """Where one rank fails, torchrun sends SIGTERM to the others, which may be waiting to hear which one it was."""
    handlers: list[object] = []

    def explain(watchdog: Watchdog, error: BaseException, **_: object) -> BaseException:
        handlers.append(signal.getsignal(signal.SIGTERM))
        return error

    with patch.object(Watchdog, "explain", explain), pytest.raises(KeyError), trainer():
        raise KeyError("a fault")
    assert handlers and signal.SIG_DFL not in handlers
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
