"""Flows are kinds of runs on one device: each trains a few steps in its own way and returns its numbers.

Flows of one family give the same bits on a CPU and on a GPU, at whatever time the device does its work: swapping,
streaming, planning, and work between steps change nothing. Layers on tiles sum in another order than whole layers, so
they are a family of their own. tests/emulated_gpu/test_training.py and emulated_campaign.py run the flows.
"""

import dataclasses
import json
import pickle
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from custom_layers import PARALLEL
from disk_runs import shared
from pairs import some_pairs, write_pairs

import memo
from memo.artifacts.attention_table import AttentionTable
from memo.artifacts.layer_profile import LayerProfile
from memo.artifacts.memory_trace import Malloc, Trace
from memo.config import RunConfig, preset
from memo.data import MockDataset
from memo.errors import OutOfMemory
from memo.parallel import context_sweep
from memo.parallel.context import ContextAttention
from memo.train.metrics import StepRecord
from memo.train.profile import profile_run

STEPS = 3
SEQ_LENGTH = 64
VOCABULARY = 257
"""Size of a vocabulary of bytes, as of mock data."""
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
PLANNED = {"memory_planner": "auto", "memory_planner_min_bytes": 4096, "memory_planner_from": "rehearsal"}
PLANNED_FROM_TRAINING = {**PLANNED, "memory_planner_from": "training"}
"""The third step is served as planned; packings are rehearsed before it."""
SWEPT = {"offload_granularity": "tile", "offload_slot_tiles": 1, "offload_tiles": 8}
HIDDEN = {"offload_hidden_states": True}
AGAIN = {"recompute_attention_layers": 1}
GEMMA: dict[str, Any] = {"model": "gemma-3-tiny"}
GEMMA_4: dict[str, Any] = {"model": "gemma-4-moe-tiny", "window_size": 11, "lr": 1e-4, "query_pre_attn_scalar": 24}
CAPS: dict[str, Any] = {"model": "gemma-2-tiny", "attn_logit_softcapping": 0.5, "final_logit_softcapping": 0.3}
CAPS |= {"attention_backend": "torch", "lr": 1e-4}
DELTA_NETS: dict[str, Any] = {"model": "qwen3.5-tiny"}
EXPERTS: dict[str, Any] = {"model": "qwen3-moe-tiny", "moe_aux_loss_coeff": 0.1, "moe_z_loss_coeff": 0.01}
SOME_EXPERTS = {**EXPERTS, "moe_layer_freq": "[0]+[1]*2", "moe_ffn_hidden_size": 48}
SOME_EXPERTS |= {"moe_shared_expert_intermediate_size": 40, "moe_shared_expert_gate": True}
BY_SIGMOID: dict[str, Any] = {"model": "glm-4.5-tiny", "moe_layer_freq": "[0]+[1]*2", "moe_aux_loss_coeff": 0.1}
LATENTS: dict[str, Any] = {"model": "deepseek-tiny", "moe_layer_freq": "[0]+[1]*2", "lora_rank": 3}
# Adam makes whole steps of gradients that are nearly zero, even if rounding changes their sign.
ACROSS_HEADS: dict[str, Any] = {"model": "olmo-3-tiny", "window_size": 11, "lr": 1e-4, "no_rope_freq": "[0,1,0]"}
SLIDING = {"window_size": 11}
SINKS: dict[str, Any] = {"attention_sinks": True}
OF_QUERIES = {"rope_scaling_type": "yarn", "rope_scaling_factor": 4.0, "rope_llama_4_scaling_beta": 0.3}
OF_QUERIES |= {"rope_original_max_position_embeddings": 16}
"""Queries have a table of RoPE of their own."""
SCALED = {**SINKS, **OF_QUERIES}
LATENTS |= OF_QUERIES
WINDOW = {"window_size": 7, "layer_types": "sliding,full,sliding"}


class Numbers(NamedTuple):
    """Numbers of one run: `steps` are equal in all flows of a family, `more` belongs to the flow."""

    steps: list[float]
    """Loss and gradient norm of each step."""
    more: list[float]


def steps_of(trainer: memo.Trainer, count: int = STEPS) -> list[float]:
    records = [trainer.step() for _ in range(count)]
    return [number for record in records for number in (record.lm_loss, record.grad_norm)]


def train(model: str = "llama-tiny", **options: Any) -> Numbers:
    with memo.Trainer(model, **options) as trainer:
        return Numbers(steps_of(trainer), [])


def packed(model: str = "llama-tiny", **options: Any) -> Numbers:
    """Train with several documents in each sample."""
    documents = MockDataset(VOCABULARY, SEQ_LENGTH, seed=3, mean_document_length=23)
    assert all(len(documents.sample(index).cu_seqlens) > 2 for index in range(2)), "a sample is one document"
    with memo.Trainer(model, train_data=documents, vocab_size=VOCABULARY, **options) as trainer:
        return Numbers(steps_of(trainer), [])


def evaluated(**options: Any) -> Numbers:
    """Train with evaluations between the steps."""
    held_out = MockDataset(VOCABULARY, SEQ_LENGTH, seed=5)
    with memo.Trainer("llama-tiny", eval_data=held_out, vocab_size=VOCABULARY, **options) as trainer:
        steps: list[float] = []
        more: list[float] = []
        for _ in range(STEPS):
            steps += steps_of(trainer, 1)
            more.append(trainer.evaluate(1))
        return Numbers(steps, more)


def preferred(**options: Any) -> Numbers:
    """Train by DPO: two forwards before each step, one of them without adapters; log-probs go to the host and weights
    back."""
    with tempfile.TemporaryDirectory() as folder:
        prefix = write_pairs(Path(folder) / "pairs", some_pairs(20, VOCABULARY), VOCABULARY)
        data = {"mock_data": False, "data_path": prefix, "preference": "dpo", "lora_rank": 4}
        with memo.Trainer("llama-tiny", **{**options, **data}) as trainer:
            return Numbers(steps_of(trainer), [])


def on_disk(act: "Callable[..., Numbers]", **options: Any) -> Numbers:
    """Train with all records of activations on a disk."""
    with tempfile.TemporaryDirectory() as folder, shared(1.0):
        numbers = act(**options, offload_nvme_path=folder)
        assert not list(Path(folder).iterdir()), "a file was left behind"
    return numbers


class Injected(Exception):
    pass


@contextmanager
def during_backward(at_call: int, act: Callable[[], object]) -> Iterator[None]:
    """Call `act` after the work of the attention's backward, in the middle of a step."""
    calls = []

    def acting(function: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            result = function(*args, **kwargs)
            calls.append(None)
            if len(calls) == at_call:
                act()
            return result

        return wrapper

    with ExitStack() as stack:
        # One function for whole layers, and one for swept layers.
        for owner, name in ((ContextAttention, "backward"), (context_sweep, "backward_rows")):
            stack.enter_context(patch.object(owner, name, acting(getattr(owner, name))))
        yield


def raise_injected() -> None:
    raise Injected


def interrupted(**options: Any) -> Numbers:
    """Train with a second step that raises half-way and is repeated."""
    with memo.Trainer("llama-tiny", **options) as trainer:
        steps = steps_of(trainer, 1)
        sampler = trainer.feed.sampler.consumed_samples
        try:
            with during_backward(2, raise_injected):
                trainer.step()
        except Injected:
            trainer.feed.sampler.consumed_samples = sampler
        else:
            raise AssertionError("nothing was raised")
        return Numbers(steps + steps_of(trainer, STEPS - 1), [])


@contextmanager
def no_memory_left() -> Iterator[None]:
    """Give torch's allocator no further device memory, and take the memory that it has kept."""
    taken = []
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(0.0)
    try:
        for exponent in range(24, 8, -1):
            with suppress(torch.OutOfMemoryError):
                while True:
                    taken.append(torch.empty(1 << exponent, dtype=torch.uint8, device="cuda"))
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def raise_memory_error() -> None:
    raise MemoryError


def out_of_memory(**options: Any) -> Numbers:
    """Let memory run out in the second step, which ends with torch's snapshot of the memory and is repeated."""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as shortage:
        log = Path(folder) / "log.jsonl"
        with memo.Trainer("llama-tiny", log_jsonl=str(log), **options) as trainer:
            steps, on_cuda = steps_of(trainer, 1), trainer.parts.device.type == "cuda"
            sampler = trainer.feed.sampler.consumed_samples
            act = (lambda: shortage.enter_context(no_memory_left())) if on_cuda else raise_memory_error
            try:
                with during_backward(2, act):
                    trainer.train()
            except OutOfMemory as error:
                assert "out of memory on rank 0 in iteration 2, in " in str(error), error
                snapshot = log.with_suffix(".oom.rank0.pickle")
                assert (f"Memory snapshot: {snapshot}, for " in str(error)) == on_cuda, error
                assert not on_cuda or pickle.loads(snapshot.read_bytes())["segments"], "the snapshot is empty"
            else:
                raise AssertionError("memory did not run out")
            shortage.close()
            trainer.feed.sampler.consumed_samples = sampler
            return Numbers(steps + steps_of(trainer, STEPS - 1), [])


def profiled(**options: Any) -> Numbers:
    """Run `memo profile --attention --out --trace-out` on the device, then train with a plan from this profile."""
    with tempfile.TemporaryDirectory() as folder:
        out, trace, cache = (Path(folder) / name for name in ("profile.json", "trace.json", "cache"))
        config = dataclasses.replace(RunConfig(), model=preset("llama-tiny")).override(options)
        # A planned allocator stays in its process, and tests on CPUs share theirs.
        trace_out = str(trace) if config.hardware.device == "cuda" else None
        profile_run(config.override({"profile_cache": str(cache)}), str(out), trace_out, attention=True)
        assert LayerProfile.load(out).backward_s > 0
        for row in AttentionTable.load(next(cache.glob("attention-*.json"))).rows:
            assert set(row.seconds) in ({"cpu"}, {"flash", "cudnn"}), row
        if trace_out is not None:
            requests = [event for phase in Trace.load(trace).phases for event in phase.events]
            assert any(isinstance(event, Malloc) for event in requests), "no request was recorded"
        return train(layer_profile=str(out), **options)


def resumed(**options: Any) -> Numbers:
    """Write a checkpoint beside the second step; a second trainer resumes from it, with the same numbers."""
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
    """Record the second step; the file has its copies, if there are any."""
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
"""A function that trains with given options."""


@dataclass(frozen=True)
class Flow:
    family: str
    options: dict[str, Any] = field(default_factory=dict)
    act: Act = train

    def run(self, device: str) -> Numbers:
        """Run the flow. On a CPU the attention is the CPU's, and memory is not planned, because a planned allocator
        stays in its process."""
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
    "checkpoint, states": Flow("whole layers", {"offload_states": "all"}, resumed),
    # The model that will train measures its own layer, and nothing has to move.
    "alpha auto, measured": Flow("whole layers", {"offload_alpha": "auto", "profile_cache": "off"}),
    "preferences": Flow("preferences", act=preferred),
    "preferences, planned, states": Flow("preferences", {"offload_states": "all", **PLANNED}, preferred),
    "alpha 1": Flow("tiles", {"offload_alpha": 1.0}),
    "alpha 0": Flow("tiles", {"offload_alpha": 0.0}),
    "alpha 1/2": Flow("tiles", {"offload_alpha": 0.5}),
    "alpha 1/2, paper's policy": Flow("tiles", {"offload_alpha": 0.5, "offload_policy": "paper"}),
    # One CPU kernel replaces those of cuDNN and of flash, so that even these agree.
    "alpha 1/2, cuDNN": Flow("tiles", {"offload_alpha": 0.5, "attention_backend": "cudnn"}),
    "alpha 1/2, planned, states": Flow("tiles", {"offload_alpha": 0.5, "offload_states": "all", **PLANNED}),
    "alpha 1/2, planned, evaluation": Flow("tiles", {"offload_alpha": 0.5, **PLANNED}, evaluated),
    "alpha 1/2, states, exception": Flow("tiles", {"offload_alpha": 0.5, "offload_states": "all"}, interrupted),
    "alpha 1/2, checkpoint": Flow("tiles", {"offload_alpha": 0.5}, resumed),
    "alpha 1/2, trace": Flow("tiles", {"offload_alpha": 0.5}, traced),
    "alpha 1/2, states, out of memory": Flow("tiles", {"offload_alpha": 0.5, "offload_states": "all"}, out_of_memory),
    "alpha 1/2, planned, out of memory": Flow("tiles", {"offload_alpha": 0.5, **PLANNED}, out_of_memory),
    "alpha 1/2, profiled": Flow("tiles", {"offload_alpha": 0.5}, profiled),
    "custom layer": Flow("custom layer", {"custom_layer": PARALLEL, "offload_alpha": 0.0}),
    "custom layer, alpha 1/2, states": Flow(
        "custom layer", {"custom_layer": PARALLEL, "offload_alpha": 0.5, "offload_states": "all"}
    ),
    "swept": Flow("swept", {**SWEPT, "offload_alpha": 0.0}),
    "swept, alpha 1/2": Flow("swept", {**SWEPT, "offload_alpha": 0.5, "offload_slot_tiles": 2}),
    "swept, states": Flow("swept", {**SWEPT, "offload_alpha": 0.5, "offload_slot_tiles": 4, "offload_states": "all"}),
    "swept, planned": Flow("swept", {**SWEPT, "offload_alpha": 1.0, **AGAIN, **PLANNED}),
    "swept, hidden states": Flow("swept", {**SWEPT, **HIDDEN, "offload_alpha": 0.5, "offload_states": "all"}),
    "swept, hidden states, planned": Flow("swept", {**SWEPT, **HIDDEN, "offload_alpha": 1.0, **AGAIN, **PLANNED}),
    "swept, hidden states, evaluation": Flow("swept", {**SWEPT, **HIDDEN, "offload_alpha": 0.0}, evaluated),
    "swept, hidden states, exception": Flow("swept", {**SWEPT, **HIDDEN, "offload_alpha": 1.0}, interrupted),
    "alpha 1, disk": Flow("tiles", {"offload_alpha": 1.0}, partial(on_disk, train)),
    "swept, disk, planned": Flow("swept", {**SWEPT, "offload_alpha": 1.0, **PLANNED}, partial(on_disk, train)),
    "swept, disk, exception": Flow("swept", {**SWEPT, "offload_alpha": 1.0}, partial(on_disk, interrupted)),
    "packed": Flow("packed", act=packed),
    "packed, alpha 1": Flow("packed tiles", {"offload_alpha": 1.0}, packed),
    "packed, planned, recompute": Flow("packed", {"recompute_granularity": "full", **PLANNED}, packed),
    "packed, alpha 1/2, planned": Flow("packed tiles", {"offload_alpha": 0.5, **PLANNED}, packed),
    "packed, alpha 1, planned, cuDNN": Flow(
        "packed tiles", {"offload_alpha": 1.0, "attention_backend": "cudnn", **PLANNED}, packed
    ),
    "packed, swept": Flow("packed, swept", {**SWEPT, "offload_alpha": 0.0}, packed),
    "packed, swept, planned": Flow("packed, swept", {**SWEPT, "offload_alpha": 1.0, **PLANNED}, packed),
    "packed, alpha 1/2, states, planned from training": Flow(
        "packed tiles", {"offload_alpha": 0.5, "offload_states": "all", **PLANNED_FROM_TRAINING}, packed
    ),
    "packed, swept, hidden states, planned from training": Flow(
        "packed, swept", {**SWEPT, **HIDDEN, "offload_alpha": 1.0, **PLANNED_FROM_TRAINING}, packed
    ),
    "window": Flow("window", WINDOW),
    "window, recompute": Flow("window", {**WINDOW, "recompute_granularity": "full", **PLANNED}),
    "window, alpha 0": Flow("window on tiles", {**WINDOW, "offload_alpha": 0.0}),
    "window, alpha 1, cuDNN": Flow("window on tiles", {**WINDOW, "offload_alpha": 1.0, "attention_backend": "cudnn"}),
    "window, packed, alpha 0": Flow("window, packed", {**WINDOW, "offload_alpha": 0.0}, packed),
    "window, packed, alpha 1/2, planned": Flow("window, packed", {**WINDOW, "offload_alpha": 0.5, **PLANNED}, packed),
    "window, swept": Flow("window, swept", {**WINDOW, **SWEPT, "offload_alpha": 0.0}),
    "window, swept, planned": Flow("window, swept", {**WINDOW, **SWEPT, "offload_alpha": 1.0, **AGAIN, **PLANNED}),
    "window in all layers, swept": Flow("window in all layers, swept", {**SLIDING, **SWEPT, "offload_alpha": 0.0}),
    "window in all layers, swept, planned": Flow(
        "window in all layers, swept", {**SLIDING, **SWEPT, "offload_alpha": 1.0, **AGAIN, **PLANNED}
    ),
    "window in all layers, swept, evaluation": Flow(
        "window in all layers, swept", {**SLIDING, **SWEPT, "offload_alpha": 0.0}, evaluated
    ),
    "sinks, alpha 0": Flow("sinks", {**SCALED, "offload_alpha": 0.0}),
    "sinks, alpha 1/2, planned": Flow("sinks", {**SCALED, "offload_alpha": 0.5, **PLANNED}),
    "sinks, swept": Flow("sinks, swept", {**SCALED, **SWEPT, "offload_alpha": 1.0}),
    # Each layer's update then follows its own gradient at once, with no wait for a norm.
    "unclipped": Flow("unclipped", {"clip_grad": 0.0}),
    "unclipped, states": Flow("unclipped", {"clip_grad": 0.0, "offload_states": "all"}),
    "GPT, alpha 1/2": Flow("GPT", {"model": "gpt-tiny", "offload_alpha": 0.5}),
    "experts": Flow("experts", EXPERTS),
    "experts, planned, states": Flow("experts", {**EXPERTS, **PLANNED, "offload_states": "all"}),
    "experts, alpha 0": Flow("experts on tiles", {**EXPERTS, "offload_alpha": 0.0}),
    "experts, alpha 1, planned": Flow("experts on tiles", {**EXPERTS, "offload_alpha": 1.0, **PLANNED}),
    "experts with biases, alpha 1, planned": Flow(
        "experts with biases", {"model": "gpt-oss-tiny", "offload_alpha": 1.0, **PLANNED}
    ),
    "delta nets": Flow("delta nets", DELTA_NETS, packed),
    "delta nets, alpha 0": Flow("delta nets, on tiles", {**DELTA_NETS, "offload_alpha": 0.0}),
    "delta nets, alpha 1, planned": Flow("delta nets, on tiles", {**DELTA_NETS, "offload_alpha": 1.0, **PLANNED}),
    "delta nets, swept": Flow("delta nets, swept", {**DELTA_NETS, **SWEPT, "offload_alpha": 0.0}),
    "delta nets, swept, attention again, planned": Flow(
        "delta nets, swept", {**DELTA_NETS, **SWEPT, "offload_alpha": 1.0, **AGAIN, **PLANNED}
    ),
    "norms around": Flow("norms around", GEMMA),
    "norms around, recompute, planned, states": Flow(
        "norms around", {**GEMMA, "recompute_granularity": "full", **PLANNED, "offload_states": "all"}
    ),
    "norms around, alpha 0": Flow("norms around, on tiles", {**GEMMA, "offload_alpha": 0.0}),
    "norms around, alpha 1, planned": Flow("norms around, on tiles", {**GEMMA, "offload_alpha": 1.0, **PLANNED}),
    "norms around, swept, attention again": Flow(
        "norms around, swept", {**GEMMA, **SWEPT, "offload_alpha": 1.0, **AGAIN}
    ),
    "caps": Flow("caps", CAPS),
    "caps, alpha 1, planned": Flow("caps, on tiles", {**CAPS, "offload_alpha": 1.0, **PLANNED}),
    "heads by layer, alpha 1": Flow("heads by layer", {**GEMMA_4, "offload_alpha": 1.0}),
    "heads by layer, swept": Flow("heads by layer, swept", {**GEMMA_4, **SWEPT, "offload_alpha": 0.0}),
    "caps, swept": Flow("caps, swept", {**CAPS, **SWEPT, "offload_alpha": 0.0}),
    "norms across heads": Flow("norms across heads", ACROSS_HEADS),
    "norms across heads, alpha 1, planned": Flow(
        "norms across heads, on tiles", {**ACROSS_HEADS, "offload_alpha": 1.0, **PLANNED}
    ),
    "norms across heads, swept": Flow("norms across heads, swept", {**ACROSS_HEADS, **SWEPT, "offload_alpha": 0.5}),
    "experts in some layers": Flow("experts in some layers", SOME_EXPERTS),
    "experts in some layers, alpha 1/2, planned, states": Flow(
        "experts in some layers, on tiles", {**SOME_EXPERTS, "offload_alpha": 0.5, **PLANNED, "offload_states": "all"}
    ),
    "experts, swept, attention again": Flow("experts, swept", {**EXPERTS, **SWEPT, "offload_alpha": 1.0, **AGAIN}),
    "experts by sigmoid": Flow("experts by sigmoid", BY_SIGMOID),
    "experts by sigmoid, alpha 1, planned": Flow(
        "experts by sigmoid, on tiles", {**BY_SIGMOID, "offload_alpha": 1.0, **PLANNED}
    ),
    "experts by sigmoid, swept": Flow("experts by sigmoid, swept", {**BY_SIGMOID, **SWEPT, "offload_alpha": 0.5}),
    "latents": Flow("latents", LATENTS),
    "latents, alpha 1/2, planned": Flow("latents, on tiles", {**LATENTS, "offload_alpha": 0.5, **PLANNED}),
    "latents, swept": Flow("latents, swept", {**LATENTS, **SWEPT, "offload_alpha": 0.5, **AGAIN}),
    "one rank of 16": Flow(
        "one rank of 16", {"simulate_world": "tp=2,cp=2,pp=2,dp=2", "simulate_rank": 15, "num_layers": 4}
    ),
}
"""Flows by name; the first flow of each family is the reference of its family."""

LAYOUT: dict[str, Any] = {**BASE, "num_layers": 4, "global_batch_size": 4, "device": "cuda"}
LAYOUTS: dict[int, dict[str, dict[str, Any]]] = {
    2: {
        "tp": {"tp": 2},
        "tp, alpha 1/2": {"tp": 2, "offload_alpha": 0.5},
        "cp by p2p": {"cp": 2},
        "cp by all_gather": {"cp": 2, "cp_comm_type": "all_gather"},
        "cp by a2a": {"cp": 2, "cp_comm_type": "a2a"},
        "cp by p2p, planned": {"cp": 2, **PLANNED},
        "cp by p2p, window": {"cp": 2, **WINDOW},
        "cp by a2a, window, swept": {"cp": 2, "cp_comm_type": "a2a", **WINDOW, **SWEPT, "offload_alpha": 1.0},
        "cp by a2a, sinks": {"cp": 2, "cp_comm_type": "a2a", **SINKS},
        "pp": {"pp": 2},
        "pp, planned": {"pp": 2, **PLANNED},
        "pp, alpha 1/2": {"pp": 2, "offload_alpha": 0.5},
        "pp, alpha 1/2, planned": {"pp": 2, "offload_alpha": 0.5, **PLANNED},
        "tp, swept": {"tp": 2, **SWEPT, "offload_alpha": 0.5, "offload_slot_tiles": 2},
        "tp, swept, hidden states": {"tp": 2, **SWEPT, **HIDDEN, "offload_alpha": 0.5},
        "pp, swept": {"pp": 2, **SWEPT, "offload_alpha": 1.0, **AGAIN},
        "pp, swept, hidden states": {"pp": 2, **SWEPT, **HIDDEN, "offload_alpha": 0.5},
        "pp, swept, hidden states, planned": {"pp": 2, **SWEPT, **HIDDEN, "offload_alpha": 0.5, **PLANNED},
        "pp in chunks, swept, hidden states": {"pp": 2, "vpp": 2, **SWEPT, **HIDDEN, "offload_alpha": 1.0},
        "cp by all_gather, swept": {"cp": 2, "cp_comm_type": "all_gather", **SWEPT, "offload_alpha": 0.5},
        "cp by a2a, swept": {"cp": 2, "cp_comm_type": "a2a", **SWEPT, "offload_alpha": 1.0, **AGAIN},
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
        "tp, pp, swept": {"tp": 2, "pp": 2, **SWEPT, "offload_alpha": 0.5, "offload_slot_tiles": 2},
    },
    8: {"tp, cp, pp": {"tp": 2, "cp": 2, "pp": 2}, "tp, pp, dp": {"tp": 2, "pp": 2}},
}
"""Layouts by number of ranks; dp has the remaining ranks. A "planned" layout is compared with one without a plan."""


def first_of(family: str) -> Flow:
    return next(flow for flow in FLOWS.values() if flow.family == family)
