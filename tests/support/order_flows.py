"""Flows of order_campaign.py: small runs in which every step makes the same calls."""

import tempfile
from collections import ChainMap
from collections.abc import Callable
from typing import Any, Protocol

import emulated_flows
import torch
from emulated_flows import PLANNED, SEQ_LENGTH, VOCABULARY, Injected, during_backward, raise_injected
from swap_runs import MOVED_BYTES, OWN_PLAN, SCHEDULES, make_swapper

import memo
from memo.data import MockDataset
from memo.executor.cuda_streams import CudaStreams
from memo.planner.swap import SwapPlan, swap_plan

NEVER = 10**6  # a step that no flow comes to
BASE: dict[str, Any] = {
    **emulated_flows.BASE,
    "model": "llama-tiny",
    "seq_length": SEQ_LENGTH // 2,
    "train_iters": NEVER,
    "log_interval": NEVER,  # a step whose copies are timed records more events, and reading them may hide races
    "device": "cuda",
}
HALF = {"offload_alpha": 0.5, "offload_tiles": 2}
ALL = {"offload_states": "all"}
SWEPT = {"offload_alpha": 0.5, "offload_granularity": "tile", "offload_tiles": 4, "offload_slot_tiles": 2}
EXPERTS: dict[str, Any] = {"model": "glm-4.5-tiny", "moe_layer_freq": "[0]+[1]*2", "moe_aux_loss_coeff": 0.1}
# The sum over ranks of the output of shared experts would also order the sum of the other experts' output.
EXPERTS |= {"moe_shared_expert_intermediate_size": 0}
DELTA_NETS: dict[str, Any] = {"model": "qwen3.5-tiny"}
LATENTS: dict[str, Any] = {"model": "deepseek-tiny", "moe_layer_freq": "[0]+[1]*2"}


class Flow(Protocol):
    def step(self) -> None: ...

    def numbers(self) -> list[float]:
        """Return the numbers that the steps so far have computed; they are equal to the bit in any two runs."""

    def close(self) -> None: ...


class Training:
    """Steps of a trainer."""

    def __init__(self, **options: Any) -> None:
        self.trainer = memo.Trainer(**{**BASE, **options})
        self.found: list[float] = []
        is_planned = options.get("memory_planner") == "auto"
        assert not is_planned or given(self.trainer.parts.transients).planned is not None, "no plan is obeyed"

    def step(self) -> None:
        self.found.append(self.trainer.step().lm_loss)

    def numbers(self) -> list[float]:
        return self.found

    def close(self) -> None:
        self.trainer.close()


class Evaluating(Training):
    """An evaluation follows each step."""

    def __init__(self, **options: Any) -> None:
        held_out = MockDataset(VOCABULARY, BASE["seq_length"], seed=5)
        super().__init__(eval_data=held_out, vocab_size=VOCABULARY, **options)

    def step(self) -> None:
        super().step()
        self.found.append(self.trainer.evaluate(1))


class Interrupted(Training):
    """Each step is repeated after an exception in its backward."""

    def step(self) -> None:
        sampler = self.trainer.feed.sampler.consumed_samples
        try:
            with during_backward(2, raise_injected):
                self.trainer.step()
        except Injected:
            self.trainer.feed.sampler.consumed_samples = sampler
        super().step()


class Saving(Training):
    """A checkpoint is written beside each step, and loaded after it."""

    def __init__(self, **options: Any) -> None:
        self.folder = tempfile.TemporaryDirectory()
        folder = self.folder.name
        super().__init__(save=folder, load=folder, async_save=True, keep_latest_k=1, **options)

    def step(self) -> None:
        self.trainer.save()
        super().step()
        self.trainer.persistence.finish()
        self.trainer.persistence.load()
        self.trainer.step()

    def close(self) -> None:
        super().close()
        self.folder.cleanup()


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
                slot.fill_(-1)  # a backward writes into its slot, because it recomputes activations that did not move
            self.swapper.end(op.kind, op.layer)
        if stop_after is None:
            self.swapper.next_step()

    def numbers(self) -> list[float]:
        return [float(self.num_wrong)]

    def close(self) -> None:
        torch.cuda.synchronize()
        self.swapper.records.pool.close()


def given(value: Any) -> Any:
    assert value is not None
    return value


def _training(*options: dict[str, Any], kind: Callable[..., Flow] = Training, **more: Any) -> Callable[[], Flow]:
    return lambda: kind(**dict(ChainMap(more, *options)))


def _engine(plan: SwapPlan) -> Callable[[], Flow]:
    return lambda: Engine(plan)


ENGINE = {"engine, own plan": OWN_PLAN, **{f"engine, {name}": swap_plan(ops) for name, ops in SCHEDULES.items()}}

FLOWS: dict[str, Callable[[], Flow]] = {
    "swap": _training(HALF, num_layers=5),
    "states": _training(ALL),
    "states, one microbatch": _training(ALL, global_batch_size=1),
    "states, not clipped": _training(ALL, clip_grad=0.0, global_batch_size=1),
    "optimizer": _training(offload_states="optimizer"),
    "swap, states": _training(HALF, ALL),
    "swept": _training(SWEPT, num_layers=3),
    "swept, attention again": _training(SWEPT, num_layers=4, offload_slot_tiles=1, recompute_attention_layers=2),
    "swept, hidden states": _training(SWEPT, num_layers=3, offload_slot_tiles=1, offload_hidden_states=True),
    "experts, swap": _training(EXPERTS, HALF),
    "delta nets, swept": _training(DELTA_NETS, SWEPT, num_layers=2, offload_tiles=2, offload_slot_tiles=1),
    "latents, swap": _training(LATENTS, HALF),
    "latents, swept": _training(LATENTS, SWEPT, num_layers=2, moe_layer_freq="[0,1]", offload_slot_tiles=1),
    "evaluation": _training(HALF, kind=Evaluating),
    "evaluation, states": _training(ALL, kind=Evaluating),
    "exception": _training(HALF, kind=Interrupted),
    "exception, states": _training(ALL, kind=Interrupted),
    "exception, swap, states": _training(HALF, ALL, kind=Interrupted),
    "checkpoint": _training(kind=Saving),
    "checkpoint, states": _training(ALL, kind=Saving),
    **{name: _engine(plan) for name, plan in ENGINE.items()},
}
"""Flows on one GPU."""

TWO = {"num_layers": 2}
SHARDED = {"data_parallel_sharding_strategy": "optim_grads_params", "global_batch_size": 4}
LAYOUTS: dict[str, Callable[[], Flow]] = {
    "tp": _training(TWO, tp=2),
    "tp, swap": _training(TWO, HALF, tp=2),
    "cp by p2p": _training(TWO, cp=2),
    "cp by p2p, planned": _training(TWO, PLANNED, cp=2),
    "cp by all_gather": _training(TWO, cp=2, cp_comm_type="all_gather"),
    "cp by a2a": _training(TWO, cp=2, cp_comm_type="a2a"),
    "cp by a2a, delta nets": _training(DELTA_NETS, TWO, cp=2, cp_comm_type="a2a"),
    "tp, experts": _training(EXPERTS, TWO, tp=2, moe_layer_freq="[0,1]"),
    "tp, latents": _training(LATENTS, TWO, tp=2, moe_layer_freq="[0,1]"),
    "pp": _training(TWO, pp=2),
    "pp, planned": _training(TWO, PLANNED, pp=2),
    "pp in chunks": _training(num_layers=4, pp=2, vpp=2),
    "pp, hidden states": _training(SWEPT, TWO, pp=2, offload_slot_tiles=1, offload_hidden_states=True),
    "dp": _training(TWO),
    "dp, not overlapped": _training(TWO, overlap_grad_reduce=False),
    "dp, states": _training(TWO, ALL, global_batch_size=4),
    "dp, states, one microbatch": _training(TWO, ALL, clip_grad=0.0),
    "dp, weights in shards": _training(TWO, SHARDED),
    "dp, weights in shards, states": _training(TWO, SHARDED, ALL),
    "dp, weights in shards, states, experts": _training(
        EXPERTS, TWO, SHARDED, ALL, moe_layer_freq="[0,1]", global_batch_size=2
    ),
}
"""Flows on two GPUs, each with a process of its own."""

NUM_RANKS = 2


def start(name: str) -> Flow:
    return (FLOWS | LAYOUTS)[name]()
