"""Backwards that add weight gradients to main gradients themselves, as on GPUs: the same gradients, counted as often.

Here on CPUs in fp64, where a product can add to the main gradient as well. tests/gpu/test_gpu_weight_gradients.py shows
what narrow factors give on a GPU.
"""

from collections import Counter
from contextlib import nullcontext
from unittest.mock import patch

import pytest
import torch
from layouts import Outcome, assemble, make, one_step_backward, tiny, train_here
from ranks import run_ranks

from memo.config import RunConfig
from memo.parallel import weight_gradients
from memo.parallel.main_gradients import MainGradients
from memo.parallel.units import Bucket

torch.set_num_threads(1)

ADDING = patch.object(weight_gradients, "_ADDING_DEVICES", ("cpu", "cuda"))
STREAMED = {"offload_states": "all", "offload_check_races": True}


def _both_ways(config: RunConfig, world_size: int) -> tuple[Outcome, Outcome, Counter[str]]:
    """One step by autograd's hooks alone, one that adds in backwards, and how many gradients each hook took in it."""
    expected = train_here(config, world_size, 1)
    accumulate, hooks = MainGradients._accumulate, Counter[str]()

    def counting(self: MainGradients, parameter: torch.Tensor) -> None:
        if parameter.grad is not None:
            hooks[parameter.local_name] += 1
        accumulate(self, parameter)

    with ADDING, patch.object(MainGradients, "_accumulate", counting):
        return expected, train_here(config, world_size, 1), hooks


@pytest.mark.parametrize(
    ("model", "world_size", "layout"),
    [
        ("gpt-tiny", 1, {}),
        ("gpt-tiny", 1, {"gradient_accumulation_order": "breadth_first"}),
        ("gpt2-tiny", 1, {"recompute_granularity": "full"}),
        ("llama-tiny", 1, STREAMED),
        ("gpt-tiny", 1, {"offload_alpha": 0.5, "offload_granularity": "tile"}),
        ("gpt-tiny", 2, {"tp": 2}),
        ("gpt-tiny", 2, {"pp": 2}),
        ("llama-tiny", 2, {"cp": 2, "data_parallel_sharding_strategy": "optim_grads_params"}),
        ("gpt2-tiny", 2, STREAMED),
    ],
    ids=str,
)
def test_gradients_are_those_of_autograds_hooks(model: str, world_size: int, layout: dict[str, object]) -> None:
    """fp64, 1e-12 of the largest gradient: sums of several microbatches and chunks round otherwise."""
    results = run_ranks(world_size, _both_ways, tiny(model, **layout), world_size)
    expected, found = (assemble([result[i].gradients for result in results]) for i in range(2))
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert (found[name] - value).abs().max() <= 1e-12 * value.abs().max(), name
    for *_, hooks in results:
        assert not [
            name for name in hooks if "norm" not in name and name.endswith("weight") and "embedding" not in name
        ]


def _complete_at_reductions(config: RunConfig, world_size: int) -> list[list[int]]:
    """How many parameters are complete as each reduction begins: by hooks alone, and where backwards add themselves."""
    found = []
    for way in (nullcontext(), ADDING):
        model, feed = make(config, world_size)
        found.append(list[int]())

        def noting(bucket: Bucket, owner: MainGradients = model.data_parallel.main_gradients) -> None:
            found[-1].append(sum(not missing for missing in owner._missing.values()))
            _start(owner, bucket)

        with way, patch.object(model.data_parallel.main_gradients, "_start_reduction", noting):
            one_step_backward(model, feed)
    return found


_start = MainGradients._start_reduction


def test_buckets_are_reduced_as_early() -> None:
    """Each as soon as its parameters are complete, while the backward goes on; untied, so that no sum is later."""
    for by_hook, adding in run_ranks(2, _complete_at_reductions, tiny("llama-tiny"), 2):
        assert len(adding) == len(by_hook) > 2
        assert adding == by_hook and adding[0] < adding[-1]
