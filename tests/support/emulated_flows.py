"""What memo does on one device, as flows: each trains a few steps its own way and tells its numbers.

Flows of one family have the same bits, on a CPU as on a GPU, whenever the work of the device runs: swapping, streaming,
planning, and what is done between steps change nothing. Layers on tiles add up in another order than whole ones, so
they are a family of their own. Run by tests/emulated_gpu/test_flows.py and by emulated_campaign.py.
"""

import json
import tempfile
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import memo
from memo.data import MockDataset
from memo.parallel.context import ContextAttention
from memo.train.metrics import StepRecord

STEPS = 3
SEQ_LENGTH = 64
VOCABULARY = 257
"""Of the bytes, as mock data has by itself."""
BASE: dict[str, Any] = {
    "mock_data": True,
    "num_layers": 3,
    "seq_length": SEQ_LENGTH,
    "micro_batch_size": 1,
    "global_batch_size": 2,
    "train_iters": STEPS,
    "lr": 1e-3,
    "num_threads": 1,
    "progress": False,
    "offload_alpha": "off",
    "attention_backend": "flash",
    "params_dtype": "bf16",
    "memory_planner": "off",
}
PLANNED = {"memory_planner": "auto", "memory_planner_min_bytes": 4096}


class Numbers(NamedTuple):
    """Of one run: `steps` are the same in all flows of a family, `more` is the flow's own."""

    steps: list[float]
    """Loss and gradient norm of each step."""
    more: list[float]


def steps_of(trainer: memo.Trainer, count: int = STEPS) -> list[float]:
    records = [trainer.step() for _ in range(count)]
    return [number for record in records for number in (record.lm_loss, record.grad_norm)]


def train(model: str = "llama-tiny", **options: Any) -> Numbers:
    with memo.Trainer(model, **options) as trainer:
        return Numbers(steps_of(trainer), [])


def packed(**options: Any) -> Numbers:
    """Several documents in each sample."""
    documents = MockDataset(VOCABULARY, SEQ_LENGTH, seed=3, mean_document_length=23)
    assert all(len(documents.sample(index).cu_seqlens) > 2 for index in range(2)), "a sample is one document"
    with memo.Trainer("llama-tiny", train_data=documents, vocab_size=VOCABULARY, **options) as trainer:
        return Numbers(steps_of(trainer), [])


def evaluated(**options: Any) -> Numbers:
    """Evaluations between the steps."""
    held_out = MockDataset(VOCABULARY, SEQ_LENGTH, seed=5)
    with memo.Trainer("llama-tiny", eval_data=held_out, vocab_size=VOCABULARY, **options) as trainer:
        steps: list[float] = []
        more: list[float] = []
        for _ in range(STEPS):
            steps += steps_of(trainer, 1)
            more.append(trainer.evaluate(1))
        return Numbers(steps, more)


class Injected(Exception):
    pass


@contextmanager
def failing_backward(at_call: int) -> Any:
    """The attention's backward raises after its work, in the middle of a step."""
    function, calls = ContextAttention.backward, []

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        calls.append(None)
        if len(calls) == at_call:
            raise Injected
        return result

    with patch.object(ContextAttention, "backward", wrapper):
        yield


def interrupted(**options: Any) -> Numbers:
    """The second step raises half-way and is taken again."""
    with memo.Trainer("llama-tiny", **options) as trainer:
        steps = steps_of(trainer, 1)
        sampler = trainer.feed.sampler.state_dict()
        try:
            with failing_backward(at_call=2):
                trainer.step()
        except Injected:
            trainer.feed.sampler.load_state_dict(sampler)
        else:
            raise AssertionError("nothing was raised")
        return Numbers(steps + steps_of(trainer, STEPS - 1), [])


def resumed(**options: Any) -> Numbers:
    """A checkpoint is written beside the second step; another trainer goes on from it, to the same numbers."""
    with tempfile.TemporaryDirectory() as folder:
        with memo.Trainer("llama-tiny", save=folder, async_save=True, **options) as trainer:
            steps = steps_of(trainer, 1)
            trainer.save()
            beside = steps_of(trainer, STEPS - 1)
        with memo.Trainer("llama-tiny", load=folder, **options) as trainer:
            again = steps_of(trainer, STEPS - 1)
        assert again == beside, "the run that went on from the checkpoint has other numbers"
        return Numbers(steps + again, [])


def traced(**options: Any) -> Numbers:
    """The second step is recorded; the file has its copies, if there are any."""
    with tempfile.TemporaryDirectory() as folder, memo.Trainer("llama-tiny", **options) as trainer:
        steps, path = steps_of(trainer, 1), Path(folder) / "trace.json"
        found: list[StepRecord] = []
        step = trainer.step
        with patch.object(trainer, "step", lambda: found.append(step())):
            trainer.trace(path)
        streams = {event.get("cat") for event in json.loads(path.read_text())["traceEvents"]}
        assert {"offload", "prefetch"} <= streams if trainer.parts.swap else "compute" in streams, streams
        steps += [found[0].lm_loss, found[0].grad_norm]
        return Numbers(steps + steps_of(trainer, STEPS - 2), [])


Act = Callable[..., Numbers]
"""Trains under the options that it is given."""


@dataclass(frozen=True)
class Flow:
    family: str
    options: dict[str, Any] = field(default_factory=dict)
    act: Act = train

    def run(self, device: str) -> Numbers:
        """On a CPU the attention is the CPU's, and nothing is planned, because a planned allocator stays in its
        process."""
        options = {**BASE, **self.options, "device": device}
        if device == "cpu":
            options["attention_backend"] = "auto"
            options = {name: value for name, value in options.items() if name not in PLANNED}
        return self.act(**options)


STREAMED: dict[str, dict[str, Any]] = {
    "optimizer": {"offload_states": "optimizer"},
    "half of the optimizer": {"offload_states": "optimizer", "optimizer_offload_fraction": 0.5},
    "all": {"offload_states": "all"},
    "all, no copy of weights": {"offload_states": "all", "offload_weight_copy": False},
    "all, breadth first": {"offload_states": "all", "gradient_accumulation_order": "breadth_first"},
}

FLOWS: dict[str, Flow] = {
    "plain": Flow("whole layers"),
    "logged seldom": Flow("whole layers", {"log_interval": 100}),
    **{f"states: {name}": Flow("whole layers", options) for name, options in STREAMED.items()},
    "planned: paper": Flow("whole layers", {**PLANNED, "memory_planner": "paper"}),
    "planned: flat": Flow("whole layers", {**PLANNED, "memory_planner": "flat"}),
    "planned, states": Flow("whole layers", {"offload_states": "optimizer", **PLANNED}),
    "recompute: full": Flow("whole layers", {"recompute_granularity": "full"}),
    "recompute: selective": Flow("whole layers", {"recompute_granularity": "selective"}),
    "evaluation": Flow("whole layers", act=evaluated),
    "exception": Flow("whole layers", act=interrupted),
    "checkpoint": Flow("whole layers", act=resumed),
    "checkpoint, states": Flow("whole layers", {"offload_states": "all"}, resumed),
    "trace": Flow("whole layers", act=traced),
    "alpha 1": Flow("tiles", {"offload_alpha": 1.0}),
    "alpha 0": Flow("tiles", {"offload_alpha": 0.0}),
    "alpha 1/8": Flow("tiles", {"offload_alpha": 0.125}),
    "alpha 1/2": Flow("tiles", {"offload_alpha": 0.5}),
    "alpha 1/2, paper's policy": Flow("tiles", {"offload_alpha": 0.5, "offload_policy": "paper"}),
    # One CPU kernel stands for cuDNN's and for flash, so that even these agree.
    "alpha 1/2, cuDNN": Flow("tiles", {"offload_alpha": 0.5, "attention_backend": "cudnn"}),
    "alpha 1/2, states": Flow("tiles", {"offload_alpha": 0.5, "offload_states": "all"}),
    "alpha 1/2, planned": Flow("tiles", {"offload_alpha": 0.5, **PLANNED}),
    "alpha 1/2, planned, states": Flow("tiles", {"offload_alpha": 0.5, "offload_states": "all", **PLANNED}),
    "alpha 1/2, evaluation": Flow("tiles", {"offload_alpha": 0.5}, evaluated),
    "alpha 1/2, exception": Flow("tiles", {"offload_alpha": 0.5}, interrupted),
    "alpha 1/2, states, exception": Flow("tiles", {"offload_alpha": 0.5, "offload_states": "all"}, interrupted),
    "alpha 1/2, checkpoint": Flow("tiles", {"offload_alpha": 0.5}, resumed),
    "alpha 1/2, trace": Flow("tiles", {"offload_alpha": 0.5}, traced),
    "two tiles": Flow("two tiles", {"offload_alpha": 0.5, "offload_tiles": 2}),
    "two tiles, alpha 1": Flow("two tiles", {"offload_alpha": 1.0, "offload_tiles": 2}),
    "packed": Flow("packed", act=packed),
    "packed, states": Flow("packed", {"offload_states": "all"}, packed),
    "packed, alpha 1": Flow("packed tiles", {"offload_alpha": 1.0}, packed),
    "packed, alpha 1/2": Flow("packed tiles", {"offload_alpha": 0.5}, packed),
    # Each layer's update then follows its own gradient at once, with no wait for a norm.
    "unclipped": Flow("unclipped", {"clip_grad": 0.0}),
    "unclipped, states": Flow("unclipped", {"clip_grad": 0.0, "offload_states": "all"}),
    "GPT, alpha 1": Flow("GPT", {"model": "gpt-tiny", "offload_alpha": 1.0}),
    "GPT, alpha 1/2": Flow("GPT", {"model": "gpt-tiny", "offload_alpha": 0.5}),
    "one rank of 16": Flow(
        "one rank of 16", {"simulate_world": "tp=2,cp=2,pp=2,dp=2", "simulate_rank": 15, "num_layers": 4}
    ),
}
"""By name; the first of each family is the one that others are compared with."""

LAYOUT: dict[str, Any] = {**BASE, "num_layers": 4, "global_batch_size": 4, "device": "cuda"}
LAYOUTS: dict[int, dict[str, dict[str, Any]]] = {
    2: {
        "tp": {"tp": 2},
        "tp, alpha 1/2": {"tp": 2, "offload_alpha": 0.5},
        "cp by p2p": {"cp": 2},
        "cp by all_gather": {"cp": 2, "cp_comm_type": "all_gather"},
        "cp by a2a": {"cp": 2, "cp_comm_type": "a2a"},
        "cp by p2p, planned": {"cp": 2, **PLANNED},
        "pp": {"pp": 2},
        "pp, planned": {"pp": 2, **PLANNED},
        "pp, alpha 1/2": {"pp": 2, "offload_alpha": 0.5},
        "pp, alpha 1/2, planned": {"pp": 2, "offload_alpha": 0.5, **PLANNED},
        "dp": {},
        "dp, states": {"offload_states": "all"},
        "dp, weights in shards": {"data_parallel_sharding_strategy": "optim_grads_params"},
    },
    4: {
        "cp by a2a+p2p": {"cp": 4, "cp_comm_type": "a2a+p2p", "cp_a2a_size": 2},
        "tp, cp": {"tp": 2, "cp": 2},
        "tp, pp": {"tp": 2, "pp": 2},
        "pp in chunks, dp": {"pp": 2, "vpp": 2},
        "pp in chunks, dp, planned": {"pp": 2, "vpp": 2, **PLANNED},
        "four stages": {"pp": 4},
        "four stages, planned": {"pp": 4, **PLANNED},
    },
    8: {"tp, cp, pp": {"tp": 2, "cp": 2, "pp": 2}, "tp, pp, dp": {"tp": 2, "pp": 2}},
}
"""By number of ranks; dp is what remains. What is "planned" is compared with the same without a plan."""


def first_of(family: str) -> Flow:
    return next(flow for flow in FLOWS.values() if flow.family == family)
