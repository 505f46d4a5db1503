"""Loses each call that orders streams once, to see whether the emulated GPU finds the error.

    python -m memo.emulated_gpu --check-races -- python tests/support/order_campaign.py [--flow states] [--most 2]

A flow trains a small model on one GPU or two, or drives the swap engine through a schedule (order_flows.py). An order
is a call by which memo orders streams, or a copy of the executor. Each order is lost in a step of its own: the call has
no effect, or the copy goes to the other copy stream (orders.py). The outcomes are:

    caught      the race checker reported it, in this step or the next; or a race or other numbers show without it
    redundant   by the checker's clocks it ordered nothing new: other orders already ensure that its event has happened
    needless    it ordered something new, but the step without it has no two conflicting accesses without an order

Each order that seems needless is also left out of a step entirely, and no race or other number may show. This proves
the order needless for this run only, and it must have a reason below. Over all flows an order of each place with a
reason must also be caught, so that each place is seen to matter.

All ranks lose an order at the same time, each an order of its own: a checker knows only its own process.
"""

import argparse
import functools
import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import rows
from order_flows import FLOWS, LAYOUTS, NUM_RANKS, start
from orders import Order, Watch, watched

from memo.emulated_gpu.face import EmulatedGpu

WARM_STEPS = 2  # after them all steps make the same calls
RESULTS = "lost_orders"
OUTCOMES = ("caught", "redundant", "needless")
TIMEOUT_S = 3600

REASONS: dict[str, str] = {
    "wait state_buffers.py offload_gradient: self.follow(Stream.OFFLOAD, Stream.COMPUTE)": (
        "a unit has several buckets, and all are complete before the first leaves; the next wait adds the norm alone"
    ),
    "recording state_buffers.py offload_gradient: self.follow(Stream.OFFLOAD, Stream.COMPUTE)": "as the wait for it",
    "copy state_buffers.py offload_gradient: "
    "self.backend.copy(Stream.OFFLOAD, bucket.gradient_shard, reduced, gradient_name(bucket), name)": (
        "gradients of the head are complete so early that the prefetch stream, too, has waited for compute since"
    ),
    "wait states.py upload_weights: self.backend.wait(Stream.COMPUTE, event)": (
        "uploads follow each other on one stream, so the wait for the last is enough where no weights are gathered"
    ),
    "recording states.py upload_weights: event = self.backend.record(Stream.PREFETCH)": "as the wait for it",
    "wait layer_states.py fetch_weights: backend.wait(Stream.PREFETCH, slot.free)": (
        "the first of a step waits for what forget() has recorded"
    ),
    "issuing layer_states.py fetch_weights: with backend.issuing(Stream.PREFETCH):": (
        "shards on the device are copied by nobody, so behind compute they are gathered later, and as well"
    ),
    "host wait states.py await_gradients: self._buffers.follow(Stream.HOST, stream)": (
        "where nothing is in host memory, the host only reads the norm next, for which it waits longer"
    ),
    "recording states.py await_gradients: self._buffers.follow(Stream.HOST, stream)": "as the wait for it",
    **dict.fromkeys(
        (
            "wait background.py _own_stream: stream.wait_event(after)",
            "recording background.py start: now = torch.cuda.current_stream(self.device).record_event() "
            'if self.device.type == "cuda" else None',
        ),
        "where all states are in host memory, a checkpoint reads nothing of the device",
    ),
    "host wait states.py _interrupt: self.backend.synchronize()": "swapping waits for all streams next",
    "host wait swapper.py reset: self.backend.synchronize()": "streamed states have waited for all streams",
    **dict.fromkeys(
        (
            "copy layer_states.py _offload_partial: "
            "self._backend.copy(Stream.OFFLOAD, given(bucket.partial), part, partial_name(bucket), slot.name)",
            "copy layer_states.py fetch_gradient: "
            "backend.copy(Stream.PREFETCH, part, given(bucket.partial), slot.name, partial_name(bucket))",
            "copy states.py upload_weights: "
            'self.backend.copy(Stream.PREFETCH, shard, source, name_of("weights", bucket), name)',
            "copy layer_states.py _bring_shards: self._backend.copy(Stream.PREFETCH, shard, source, name, place)",
        ),
        "after an exception the host waits for all streams, and swapping orders compute behind both copy streams",
    ),
    "recording layer_states.py return_weights: self.weights.slot.free = self._backend.record(Stream.COMPUTE)": (
        "a swapped backward has read its weights when it records that its rounding buffer is free, and the prefetch "
        "stream waits for that record first"
    ),
    "message data.py gather_weights: all_gather(bucket.weights[bucket.mine].clone(), self.group, out=bucket.weights)": (
        "the wait for the next bucket's gather, on the same stream of NCCL, orders the weights as well; the copy of "
        "the shard is in danger only where the next one gets its memory, which is not so under planned memory"
    ),
    "message stage_messages.py _finish_send: work.wait()": (
        "torch gives the memory of a message to nobody before an event behind it has come; planned memory relies on "
        "the wait instead, and whatever is asked for behind the last message of a step lies elsewhere"
    ),
    "recording states.py forget: updated = self.backend.record(Stream.COMPUTE)": (
        "whoever used a slot in a step has said when he was done; it is for evaluations that fail, and for shards that "
        "the device updates"
    ),
}
"""Reasons why single orders may be needless, by their place."""

FEW_IN: dict[tuple[str, str], tuple[int, str]] = {
    (
        "swept, attention again",
        "copy swapper.py _copy: self.backend.copy(stream, dst, src, dst_name, src_name)",
    ): (
        4,
        "two slots are filled with inputs as soon as the last first forward is over, in each of two microbatches; "
        "before a second forward reads them, compute waits for offloads that were issued later",
    ),
    **{
        (flow, "copy swapper.py _copy: self.backend.copy(stream, dst, src, dst_name, src_name)"): (
            num,
            "copies of hidden states, of keys and values and of activations share two streams; a copy on the other "
            "stream comes before a later copy there for which the same operation waits",
        )
        for flow, num in (("swept, hidden states", 56), ("pp, hidden states", 28))
    },
    **{
        ("states, not clipped", place): (
            1,
            "a thread updates each layer as soon as its gradient is in host memory: where it waits for that before the "
            "layer whose order is lost is issued, the one clock of the host orders that as well; caught in other runs",
        )
        for place in (
            "host wait layer_states.py wait: self._backend.wait(Stream.HOST, event)",
            "recording layer_states.py finish_reduction: "
            "released = self._backend.record(Stream.OFFLOAD if on_host else Stream.COMPUTE)",
        )
    },
    **{
        ("delta nets, swept", place): (
            2,
            "keys and values of a delta net's layer come back as any layer's, in two parts, and nobody reads them",
        )
        for place in (
            "wait swapper.py _await: self.backend.wait(Stream.COMPUTE, event)",
            "recording swapper.py _prefetch: done = backend.record(Stream.PREFETCH)",
        )
    },
}
"""By flow and place, how many orders may be needless there, with the reason; all other orders of the place may not be.
"""

ELSEWHERE = {
    "recording states.py forget: updated = self.backend.record(Stream.COMPUTE)",
    "host wait states.py _interrupt: self.backend.synchronize()",
}
"""Places that tests/executor/test_failures.py shows to matter, on a CPU."""


@dataclass(frozen=True)
class Verdict:
    order: Order
    outcome: str
    told: str = ""
    rank: int = 0


class Campaign:
    """The campaign of one flow, in one process."""

    def __init__(self, name: str, gpu: EmulatedGpu) -> None:
        self.name, self.gpu, self.watch = name, gpu, Watch(gpu)
        gpu.set_schedule("lazy")  # every query of the host finds work unfinished
        gpu.check_races()
        gpu.clear()

    def run(self, most: int | None = None) -> list[Verdict]:
        """Lose the orders of a step, at most `most` of each place, and return the verdicts.

        An order that seems needless is caught after all if a race or other numbers show when it is left out. A lost
        order keeps its place in time. So the thread that writes a checkpoint begins to copy after the update for which
        it waits; by then the training thread may have waited as well, and the host has one clock.
        """
        with watched(self.watch):
            self.flow = start(self.name)
            verdicts = [self._lose(order) for order in _as_long_everywhere(some_of(self._warm_up(), most))]
            found = [verdict for verdict in verdicts if verdict is not None]
            needless = _as_long_everywhere([verdict.order for verdict in found if verdict.outcome == "needless"])
            self.flow.close()
            if not needless or not self._shows(needless):
                return found
            telling = {order: self._shows([order]) for order in needless}
        return [replace(v, outcome="caught", told=telling[v.order]) if telling.get(v.order) else v for v in found]

    def _warm_up(self) -> list[Order]:
        for _ in range(WARM_STEPS):
            self._step()
        watch = replace(self.watch)  # the last step's watch: its waits are judged when there is more work
        self.usual = watch.turns
        self._step()
        assert not self.gpu.races(), self.gpu.races()
        return watch.finish()

    def _step(self, lost: Order | None = None, leaves_out: bool = False) -> None:
        self.watch.begin(lost, leaves_out)
        self.flow.step()

    def _lose(self, order: Order | None) -> Verdict | None:
        for lost in (order, None):  # the error may also show in the next step
            self._step(lost)
            self._check_calls()
        torch.cuda.synchronize()
        told = sorted(self.gpu.races())
        self.gpu.clear()
        if order is None:
            return None
        outcome = "caught" if told else "redundant" if order.is_redundant else "needless"
        return Verdict(order, outcome, told[0] if told else "", int(os.environ.get("RANK", "0")))

    def _check_calls(self) -> None:
        """Check that the step made the calls of the warm-up; else a lost order might be another call, or none."""
        usual, made = self.usual, self.watch.turns
        other = {place: (usual[place], made[place]) for place in usual | made if usual[place] != made[place]}
        assert not other, f"a step makes other calls than the warm-up; (usual, made) by place: {other}"

    def _shows(self, orders: Sequence[Order | None]) -> str:
        """Leave out these orders one by one; return what shows on any rank, as all ranks leave theirs out together."""
        expected, (numbers, races) = self._run([None] * len(orders)), self._run(orders)
        if numbers != expected[0]:
            return "other numbers"
        return max(races)

    def _run(self, left_out: Sequence[Order | None]) -> tuple[list[list[float]], list[str]]:
        """Return the numbers of each rank, and the races that it saw."""
        self.flow = start(self.name)
        self._warm_up()
        for order in left_out:
            self._step(order, leaves_out=True)
            self._step()
        torch.cuda.synchronize()
        seen = [(self.flow.numbers(), min(self.gpu.races(), default=""))]
        if dist.is_initialized():
            mine, seen = seen[0], seen * dist.get_world_size()
            dist.all_gather_object(seen, mine)
        self.flow.close()
        self.gpu.clear()
        return [numbers for numbers, _ in seen], [race for _, race in seen]


def some_of(orders: Sequence[Order], most: int | None) -> list[Order]:
    """Return at most `most` orders of each place, with the first and the last if `most` is above 1; None: all."""
    if most is None:
        return list(orders)
    last = Counter(order.place for order in orders)
    wanted = {
        (place, round(at * (num - 1) / max(most - 1, 1))) for place, num in last.items() for at in range(min(most, num))
    }
    return [order for order in orders if (order.place, order.turn) in wanted]


def _as_long_everywhere(orders: list[Order]) -> list[Order | None]:
    """Append None until the list is as long as the longest of all ranks, so that all ranks take equally many steps."""
    num = torch.tensor(len(orders), device="cuda")
    if dist.is_initialized():
        dist.all_reduce(num, dist.ReduceOp.MAX)
    return [*orders, *[None] * (int(num) - len(orders))]


def verdicts_of(names: Sequence[str], most: int | None = None) -> dict[str, list[Verdict]]:
    """Return the verdicts by flow: flows of one GPU run in this process, others in processes of their own in turn."""
    gpu = EmulatedGpu()
    found = {name: Campaign(name, gpu).run(most) for name in names if name in FLOWS}
    layouts = [name for name in names if name in LAYOUTS]
    if layouts:
        found |= _verdicts_of_ranks(layouts, most)
    return found


def _verdicts_of_ranks(names: Sequence[str], most: int | None) -> dict[str, list[Verdict]]:
    found: dict[str, list[Verdict]] = {name: [] for name in names}
    with tempfile.TemporaryDirectory() as folder:
        launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={NUM_RANKS}"]
        command = [sys.executable, *launcher, __file__, "--as-rank", folder]
        command += [] if most is None else ["--most", str(most)]
        command += [word for name in names for word in ("--flow", name)]
        done = subprocess.run(
            command,
            check=False,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        assert done.returncode == 0, done.stderr[-6000:]
        for rank in range(NUM_RANKS):
            for name, told in json.loads(Path(folder, str(rank)).read_text()).items():
                found[name] += [Verdict(**{**verdict, "order": Order(**verdict["order"])}) for verdict in told]
    return found


def _be_a_rank(names: Sequence[str], most: int | None, folder: str) -> None:
    gpu = EmulatedGpu()
    found = {name: [asdict(verdict) for verdict in Campaign(name, gpu).run(most)] for name in names}
    Path(folder, os.environ["RANK"]).write_text(json.dumps(found))


def unexplained(flow: str, verdicts: Sequence[Verdict]) -> list[str]:
    """Return the places with needless orders that have no reason."""
    places = Counter(v.order.place for v in verdicts if v.outcome == "needless")
    return sorted(place for place, num in places.items() if not _is_explained(flow, place, num))


def _is_explained(flow: str, place: str, num_needless: int) -> bool:
    most, _ = FEW_IN.get((flow, place), (0, ""))
    return place in REASONS or num_needless <= most


def row_of(name: str, most: int | None, verdicts: Sequence[Verdict]) -> dict[str, Any]:
    """Return the row for benchmarks/results: the number of orders by outcome, in all and by place."""
    places: dict[str, dict[str, int]] = {}
    for (place, outcome), num in sorted(Counter((v.order.place, v.outcome) for v in verdicts).items()):
        places.setdefault(place, {})[outcome] = num
    return {
        "evidence": "on the emulated GPU",
        "flow": name,
        "most_of_a_place": most,
        "orders": len(verdicts),
        **{outcome: sum(v.outcome == outcome for v in verdicts) for outcome in OUTCOMES},
        "places": places,
    }


def _found(name: str, most: int | None) -> tuple[str, list[Verdict]]:
    return name, verdicts_of([name], most)[name]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--flow", choices=[*FLOWS, *LAYOUTS], action="append", help="default: all")
    parser.add_argument("--most", type=int, help="try so many orders of each place; default: all")
    parser.add_argument("--processes", type=int, default=1, help="flows at a time; default: 1")
    parser.add_argument("--verbose", action="store_true", help="a line for each order")
    parser.add_argument(
        "--keep",
        action="store_true",
        help=f"rows go to benchmarks/results/{RESULTS}.jsonl; a flow with one of this commit is not run again",
    )
    parser.add_argument("--as-rank", metavar="FOLDER", help=argparse.SUPPRESS)
    options = parser.parse_args()
    names = options.flow or [*FLOWS, *LAYOUTS]
    if options.as_rank:
        _be_a_rank(names, options.most, options.as_rank)
        return 0
    found: dict[str, dict[str, Any]] = {}
    if options.keep:
        commit = rows.environment()["commit"]
        kept = [row for row in rows.read(RESULTS) if row["flow"] in names and row["commit"] == commit]
        found = {row["flow"]: row for row in kept if row["most_of_a_place"] in (None, options.most)}
    left = [name for name in names if name not in found]
    with multiprocessing.get_context("spawn").Pool(options.processes) as pool:
        for name, verdicts in pool.imap_unordered(functools.partial(_found, most=options.most), left):
            row = found[name] = row_of(name, options.most, verdicts)
            print(f"{name}:", ", ".join(f"{row[what]} {what}" for what in ("orders", *OUTCOMES)), flush=True)
            for verdict in verdicts if options.verbose else ():
                print(f"  {verdict.outcome:9} rank {verdict.rank} {verdict.order.place}", verdict.told)
            if options.keep:
                rows.Journal(RESULTS).replace(row, "flow")
    faults = _tell(list(found.values()), is_whole=options.flow is None and options.most is None)
    print(*faults, sep="\n")
    return 1 if faults else 0


def _tell(found: Sequence[dict[str, Any]], is_whole: bool) -> list[str]:
    """Print the outcomes of each place over all flows; return the faults."""
    places: dict[str, Counter[str]] = {}
    for row in found:
        for place, outcomes in row["places"].items():
            places.setdefault(place, Counter()).update(outcomes)
    print("together:", ", ".join(f"{sum(row[what] for row in found)} {what}" for what in ("orders", *OUTCOMES)))
    for place, outcomes in sorted(places.items()):
        print(f"  {place}:", ", ".join(f"{num} {outcome}" for outcome, num in sorted(outcomes.items())))
    faults = [
        f"needless without a reason: {row['flow']}: {place}"
        for row in found
        for place, outcomes in row["places"].items()
        if not _is_explained(row["flow"], place, outcomes.get("needless", 0))
    ]
    if is_whole:
        faults += [
            f"never seen to matter: {place}"
            for place in sorted(REASONS.keys() - ELSEWHERE)
            if not places.get(place, Counter())["caught"]
        ]
    return faults


if __name__ == "__main__":
    sys.exit(main())
