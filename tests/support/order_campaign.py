"""Which orders among streams does the emulated GPU miss when one is lost? Each is left out once.

    python -m memo.emulated_gpu --check-races -- python tests/support/order_campaign.py [--flow states] [--every 1]

A flow trains a small model, or drives the swap engine through a schedule. In a step of its own each wait, each
recording of an event and each wait of the host that memo's code makes is left out, and each copy of the executor goes
to the other copy stream. What became of it:

    caught      the race checker told of it, in that step or the next, or the step failed
    redundant   its clocks say that it ordered nothing new: what it waits for had happened before by other ways
    needless    it ordered something new, but the step without it has no two accesses that nothing orders

A needless order is proven so for this run alone, and must have a reason below. Over all flows each place with a reason
is also seen to matter: an order of it is caught.
"""

import argparse
import contextlib
import linecache
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent))

from swap_runs import MOVED_BYTES, OWN_PLAN, SCHEDULES, make_swapper

import memo
from memo.emulated_gpu.face import EmulatedGpu
from memo.errors import MemoError
from memo.executor.streams import CudaStreams, Stream
from memo.planner.swap import SwapPlan, swap_plan

BASE: dict[str, Any] = {
    "mock_data": True,
    "num_layers": 3,
    "seq_length": 32,
    "micro_batch_size": 1,
    "global_batch_size": 2,
    "train_iters": 1000,
    "lr": 1e-3,
    "num_threads": 1,
    "progress": False,
    "offload_alpha": "off",
    "log_interval": 1000,  # reading numbers each step would hide races between steps
    "attention_backend": "flash",
    "device": "cuda",
    "memory_planner": "off",
}
HALF = {"offload_alpha": 0.5, "offload_tiles": 2}
TRAINING: dict[str, dict[str, Any]] = {
    "swap": {**HALF, "num_layers": 5},
    "states": {"offload_states": "all"},
    "states, one microbatch": {"offload_states": "all", "global_batch_size": 1},
    "states, not clipped": {"offload_states": "all", "clip_grad": 0.0, "global_batch_size": 1},
    "optimizer": {"offload_states": "optimizer"},
    "swap, states": {**HALF, "offload_states": "all"},
}
ENGINE = {"engine, own plan": OWN_PLAN, **{f"engine, {name}": swap_plan(ops) for name, ops in SCHEDULES.items()}}
FLOWS = [*TRAINING, *ENGINE]

WARM_STEPS = 2  # after them all steps make the same calls

REASONS: dict[str, str] = {
    "wait state_gradients.py _offload: self._follow(Stream.OFFLOAD, Stream.COMPUTE)": (
        "a unit has several buckets, and all are complete before the first leaves; the next wait adds the norm alone"
    ),
    "recording state_gradients.py _offload: self._follow(Stream.OFFLOAD, Stream.COMPUTE)": "as the wait for it",
    "copy state_gradients.py _offload: "
    "self.backend.copy(Stream.OFFLOAD, bucket.gradient_shard, reduced, gradient_name(bucket), name)": (
        "gradients of the head are complete so early that the prefetch stream, too, has waited for compute since"
    ),
    "wait states.py upload_weights: self.backend.wait(Stream.COMPUTE, event)": (
        "uploads follow each other on one stream, so the wait for the last is enough where no weights are gathered"
    ),
    "recording states.py upload_weights: event = self.backend.record(Stream.PREFETCH)": "as the wait for it",
    "recording states.py forget: updated = self.backend.record(Stream.COMPUTE)": (
        "whoever used a slot in a step has said when he was done; it is for evaluations that fail, and for shards that "
        "the device updates"
    ),
}
"""Why single orders may be needless, by their place."""

ELSEWHERE = {"recording states.py forget: updated = self.backend.record(Stream.COMPUTE)"}
"""Seen to matter in tests/executor/test_streamed_failures.py, on a CPU."""

_MEMO = str(Path(memo.__file__).parent)
_SHELL = {"streams.py", "recorder.py", "state_recorder.py", "checker.py"}  # they pass on what others ask for
_OTHER = {Stream.OFFLOAD: Stream.PREFETCH, Stream.PREFETCH: Stream.OFFLOAD}


class Flow(Protocol):
    def step(self) -> None: ...

    def numbers(self) -> list[float]:
        """What the steps so far have computed; the same of any two runs, to the bit."""

    def close(self) -> None: ...


class Training:
    def __init__(self, options: dict[str, Any]) -> None:
        self.trainer = memo.Trainer("llama-tiny", **{**BASE, **options})
        self.losses: list[float] = []

    def step(self) -> None:
        self.losses.append(self.trainer.step().lm_loss)

    def numbers(self) -> list[float]:
        return self.losses

    def close(self) -> None:
        self.trainer.close()


class Engine:
    """Layers that write a pattern of (step, microbatch, layer) and check it; the host waits for nothing."""

    def __init__(self, plan: SwapPlan) -> None:
        device = torch.device("cuda", torch.cuda.current_device())
        self.swapper = make_swapper(plan, CudaStreams(device), device=device)
        self.num_wrong = torch.zeros((), dtype=torch.int64, device=device)
        self.num_steps = 0

    def step(self, stop_after: int | None = None) -> None:
        self.num_steps += 1
        for step in self.swapper.plan.steps[:stop_after]:
            op = step.op
            slot = self.swapper.slots[self.swapper.begin(op.kind, op.layer)].view(torch.int64)
            pattern = 10**6 * self.num_steps + 1000 * op.microbatch + op.layer
            if op.kind == "F":
                slot.fill_(pattern)
            else:
                self.num_wrong += (slot[: MOVED_BYTES // 8] != pattern).sum()
                slot.fill_(-1)  # backwards write into their slot: they rebuild what did not move
            self.swapper.end(op.kind, op.layer)
        if stop_after is None:
            self.swapper.next_step()

    def numbers(self) -> list[float]:
        return [float(self.num_wrong)]

    def close(self) -> None:
        torch.cuda.synchronize()
        self.swapper.pool.close()


def start(name: str) -> Flow:
    return Training(TRAINING[name]) if name in TRAINING else Engine(ENGINE[name])


@dataclass(frozen=True)
class Order:
    """One call that orders streams, or a copy that relies on it: of those of its place in a step, number `turn`."""

    place: str  # kind, file, function, source
    turn: int
    is_redundant: bool = False

    def is_like(self, other: "Order | None") -> bool:
        return other is not None and (self.place, self.turn) == (other.place, other.turn)


@dataclass
class Watch:
    """Sees each order of a step, in turn; leaves out the one at `lost`."""

    gpu: EmulatedGpu
    lost: Order | None = None
    orders: list[Order] = field(default_factory=list)
    waits: dict[int, tuple[int, int]] = field(default_factory=dict)  # by place in orders: its number, its event's id
    recordings: dict[int, int] = field(default_factory=dict)  # place in orders of the latest, by event id

    turns: Counter[str] = field(default_factory=Counter)

    def begin(self, lost: Order | None = None) -> None:
        self.lost, self.orders, self.waits, self.recordings, self.turns = lost, [], {}, {}, Counter()

    def order(self, kind: str, act: Callable[[], object], otherwise: Callable[[], object] = lambda: None) -> bool:
        """Whether it is one of memo's orders."""
        place = _place(sys._getframe(1))
        if place is None:
            act()
            return False
        order = Order(f"{kind} {place}", self.turns[f"{kind} {place}"])
        self.turns[order.place] += 1
        self.orders.append(order)
        (otherwise if order.is_like(self.lost) else act)()
        return True

    def wait(self, kind: str, event: torch.cuda.Event, act: Callable[[], object]) -> None:
        number = self.gpu.num_waits()
        if self.order(kind, act):
            self.waits[len(self.orders) - 1] = number, id(event)

    def finish(self) -> list[Order]:
        """The orders of a step that was whole, with what the checker knows of them once the next one has run.

        A recording is redundant where all waits for it are, in its own step and the next.
        """
        needed = set()
        for place, (number, event) in self.waits.items():
            is_redundant = self.gpu.is_wait_redundant(number)
            self.orders[place] = replace(self.orders[place], is_redundant=is_redundant)
            if not is_redundant:
                needed.add(event)
        for event, place in self.recordings.items():
            self.orders[place] = replace(self.orders[place], is_redundant=event not in needed)
        return self.orders


def _place(frame: FrameType | None) -> str | None:
    """Who asks, behind this file, torch and the shell; None: it is not memo."""
    while frame is not None:
        path, name = Path(frame.f_code.co_filename), frame.f_code.co_name
        is_memo = str(path).startswith(_MEMO)
        if is_memo and path.name not in _SHELL and name != "_follow":
            return f"{path.name} {name}: {linecache.getline(str(path), frame.f_lineno).strip()}"
        if not is_memo and not {"torch", "contextlib.py", Path(__file__).name} & set(path.parts):
            return None
        frame = frame.f_back
    return None


@contextlib.contextmanager
def watched(watch: Watch) -> Iterator[None]:
    """memo's waits, recordings and copies go by the watch."""
    wait, record, synchronize = torch.cuda.Stream.wait_event, torch.cuda.Event.record, torch.cuda.Event.synchronize
    copy = CudaStreams.copy
    kept: list[torch.cuda.Event] = []  # so that no other event gets the id of one

    def watched_wait(stream: torch.cuda.Stream, event: torch.cuda.Event) -> None:
        watch.wait("wait", event, lambda: wait(stream, event))

    def watched_synchronize(event: torch.cuda.Event) -> None:
        watch.wait("host wait", event, lambda: synchronize(event))

    def watched_record(event: torch.cuda.Event, stream: torch.cuda.Stream | None = None) -> None:
        kept.append(event)
        if watch.order("recording", lambda: record(event, stream)):
            watch.recordings[id(event)] = len(watch.orders) - 1

    def watched_copy(self: CudaStreams, stream: Stream, dst: Tensor, src: Tensor, to: str, source: str) -> None:
        wrong = _OTHER[stream]
        watch.order(
            "copy", lambda: copy(self, stream, dst, src, to, source), lambda: copy(self, wrong, dst, src, to, source)
        )

    stream, event, shell = torch.cuda.Stream, torch.cuda.Event, CudaStreams
    with contextlib.ExitStack() as undo:
        for owner, name, made in (
            (stream, "wait_event", watched_wait),
            (event, "record", watched_record),
            (event, "synchronize", watched_synchronize),
            (shell, "copy", watched_copy),
        ):
            undo.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, made)
        yield


@dataclass(frozen=True)
class Verdict:
    order: Order
    outcome: str
    told: str = ""


class Campaign:
    """Of one flow, in one process."""

    def __init__(self, name: str, gpu: EmulatedGpu) -> None:
        self.name, self.gpu, self.watch = name, gpu, Watch(gpu)
        gpu.set_schedule("lazy")  # under which no question of the host's is answered yes
        gpu.check_races()
        gpu.clear()

    def run(self, every: int = 1, first: int = 0) -> list[Verdict]:
        """Leaves out the orders of a step whose place is `first` modulo `every`. Raises AssertionError.

        That is when a run without needless orders computes other numbers: the checker would miss what it must see.
        """
        with watched(self.watch):
            self.flow = start(self.name)
            orders = self._warm_up()
            verdicts = [self._lose(order) for order in orders[first::every]]
            self.flow.close()
            self._check_numbers([verdict.order for verdict in verdicts if verdict.outcome == "needless"])
        return verdicts

    def _warm_up(self) -> list[Order]:
        for _ in range(WARM_STEPS):
            self._step()
        watch = replace(self.watch)  # of the last step, whose waits are judged when there is more work
        self._step()
        assert not self.gpu.races(), self.gpu.races()
        return watch.finish()

    def _step(self, lost: Order | None = None) -> None:
        self.watch.begin(lost)
        self.flow.step()

    def _lose(self, order: Order) -> Verdict:
        told = []
        try:
            self._step(lost=order)
            assert any(order.is_like(seen) for seen in self.watch.orders), order
            self._step()  # where it may show as well
        except MemoError as error:
            told.append(str(error))
        torch.cuda.synchronize()
        told += sorted(self.gpu.races())
        self.gpu.clear()
        outcome = "caught" if told else "redundant" if order.is_redundant else "needless"
        return Verdict(order, outcome, told[0] if told else "")

    def _check_numbers(self, needless: list[Order]) -> None:
        numbers = []
        for is_whole in (True, False):
            self.flow = start(self.name)
            self._warm_up()
            for order in needless:
                self._step(None if is_whole else order)
                self._step()
            numbers.append(self.flow.numbers())
            self.flow.close()
        assert numbers[0] == numbers[1], numbers


def unexplained(verdicts: list[Verdict]) -> list[str]:
    """Places with a needless order and no reason for it."""
    return sorted({v.order.place for v in verdicts if v.outcome == "needless" and v.order.place not in REASONS})


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--flow", choices=FLOWS, action="append", help="default: all")
    parser.add_argument("--every", type=int, default=1, help="try one order in so many")
    parser.add_argument("--verbose", action="store_true", help="a line for each order")
    options = parser.parse_args()
    gpu, verdicts = EmulatedGpu(), list[Verdict]()
    for name in options.flow or FLOWS:
        found = Campaign(name, gpu).run(options.every)
        verdicts += found
        print(f"{name}:", summary(found))
        for verdict in found if options.verbose else ():
            print(f"  {verdict.outcome:9} {verdict.order.place}", verdict.told)
    print("together:", summary(verdicts))
    seen = Counter((v.order.place, v.outcome) for v in verdicts)
    for place in sorted({place for place, _ in seen}):
        print(f"  {place}:", ", ".join(f"{n} {o}" for (p, o), n in sorted(seen.items()) if p == place))
    faults = [f"needless without a reason: {place}" for place in unexplained(verdicts)]
    if options.flow is None and options.every == 1:
        faults += [
            f"never seen to matter: {place}" for place in REASONS.keys() - ELSEWHERE if not seen[place, "caught"]
        ]
    print(*faults, sep="\n")
    return 1 if faults else 0


def summary(verdicts: list[Verdict]) -> str:
    counts = Counter((v.order.place.partition(" ")[0].replace("host", "host wait"), v.outcome) for v in verdicts)
    return f"{len(verdicts)} orders: " + ", ".join(f"{n} {k} {o}" for (k, o), n in sorted(counts.items()))


if __name__ == "__main__":
    sys.exit(main())
