"""ZeRO-1's reduction: overlap changes no bit, replicas and norm are right, missing gradients are named."""

import functools
import re
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from layouts import assemble, global_pieces, make, one_step_backward, tiny
from ranks import run_ranks
from torch import Tensor

from memo.config import RunConfig
from memo.mesh.group import OpenSpan
from memo.parallel import collectives
from memo.parallel.collectives import add_up


def _gradients(config: RunConfig, world_size: int) -> list[tuple[dict[str, Tensor], float, int]]:
    """With and without overlap: this rank's pieces of the gradients, the norm, and the number of buckets."""
    found = []
    for overlap in (True, False):
        model, feed = make(config.override({"overlap_grad_reduce": overlap}), world_size)
        one_step_backward(model, feed)
        norm = model.data_parallel.main_gradients.norm().item()
        found.append((global_pieces(model, "grad"), norm, len(model.data_parallel.buckets)))
    return found


torch.set_num_threads(1)

LAYOUTS = [
    ("gpt-tiny", 2, {"tp": 2}),
    ("gpt2-tiny", 2, {"pp": 2}),
    ("gpt-tiny", 2, {}),
    ("llama-tiny", 4, {"cp": 2, "tp": 2}),
]


@pytest.mark.parametrize(("model", "world_size", "layout"), LAYOUTS, ids=str)
def test_norm_counts_every_weight_once_and_overlap_changes_no_bit(
    model: str, world_size: int, layout: dict[str, object]
) -> None:
    results = run_ranks(world_size, _gradients, tiny(model, **layout), world_size)
    overlapped, serial = (assemble([result[i][0] for result in results]) for i in range(2))
    assert results[0][0][2] > 2  # several buckets, or overlap is not tested
    assert all(torch.equal(overlapped[name], serial[name]) for name in serial)
    whole = torch.cat([value.reshape(-1) for value in serial.values()])
    norms = {norm for result in results for _, norm, _ in result}
    assert len(norms) == 1, "ranks disagree about the norm"
    assert norms.pop() == pytest.approx(torch.linalg.vector_norm(whole).item(), rel=1e-13)


def test_a_parameter_without_gradient_is_named() -> None:
    model, feed = make(tiny("gpt2-tiny"), 1)
    unused = "0.embedding.positions"
    model.data_parallel.parameters[unused].requires_grad_(False)
    message = f"1 parameters got fewer gradients than microbatches, the first is {unused}: each must"
    with pytest.raises(RuntimeError, match=re.escape(message)):
        one_step_backward(model, feed)


def test_parameters_are_views_of_the_buckets_and_shared_ones_stay_shared() -> None:
    model, _ = make(tiny(), 1)
    buffers = {b.weights.untyped_storage().data_ptr() for b in model.data_parallel.buckets}
    assert {p.untyped_storage().data_ptr() for p in model.chunks[0].parameters()} == buffers
    chunk = model.chunks[0]
    assert chunk.head is not None and chunk.embedding is not None
    assert chunk.head.weight is chunk.embedding.tokens.weight
    untied, _ = make(tiny("llama-tiny"), 1)
    head, embedding = untied.chunks[0].head, untied.chunks[0].embedding
    assert head is not None and embedding is not None and head.weight is not embedding.tokens.weight


class _Messages:
    """A listener that counts messages by axis."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, str]] = []

    def begin(self, row: str, name: str, num_bytes: int) -> OpenSpan:
        self.seen.append((row, name))
        return self

    def waits(self) -> None:
        pass

    def end(self) -> None:
        pass


def _finish_reduction(config: RunConfig, world_size: int) -> list[tuple[str, str]]:
    model, feed = make(config, world_size)
    messages, finish = _Messages(), model.data_parallel.main_gradients.finish_reduction

    def watched(*args: Any) -> None:
        model.mesh.watch.listener = messages
        finish(*args)
        model.mesh.watch.listener = None

    with patch.object(model.data_parallel.main_gradients, "finish_reduction", watched):
        one_step_backward(model, feed)
    return messages.seen


def _names_of_buckets(config: RunConfig) -> list[list[list[str]]]:
    model, _ = make(config, 1)
    return [
        [[span.name for span in bucket.plan.ranges] for bucket in unit.trained_buckets]
        for unit in model.data_parallel.units
    ]


def test_buckets_close_at_the_end_of_each_module() -> None:
    """However much room is left: an embedding, six layers and a head each have their own, the last module first."""
    untied: dict[str, Any] = {"untie_embeddings_and_output_weights": True}
    config = tiny("llama-tiny", num_layers=6, ddp_bucket_size=1 << 40, **untied)
    (units,) = run_ranks(1, _names_of_buckets, config)
    modules = [
        {".".join(name.split(".")[:3]) for bucket in unit for name in bucket if ".layers." in name} for unit in units
    ]
    assert [sorted(each) for each in modules] == [[], *([f"0.layers.{layer}"] for layer in range(6)[::-1]), []]
    assert [len(unit) for unit in units[1:-1]] == [2] * 6  # norms, which all tp ranks hold, are apart


def test_gradients_that_all_tp_ranks_hold_are_summed_in_one_message() -> None:
    """Norms and late biases of all layers."""
    config = tiny("gpt2-tiny", tp=2, num_layers=4)
    assert run_ranks(2, _finish_reduction, config, 2) == [[("tp", "all_gather")]] * 2


def _sums(at_once: int) -> list[Tensor]:
    """Of three tensors: summed together, `at_once` elements at a time, summed one by one, and as they should be."""
    torch.manual_seed(1)
    collectives._ADDED_AT_ONCE = at_once
    ranks = [[torch.randn(numel) for numel in (7, 14, 21)] for _ in range(dist.get_world_size())]
    together, alone = ([tensor.clone() for tensor in ranks[dist.get_rank()]] for _ in range(2))
    add_up(together, dist.group.WORLD)
    for tensor in alone:
        add_up([tensor], dist.group.WORLD)
    expected = [functools.reduce(torch.add, parts) for parts in zip(*ranks, strict=True)]
    return [torch.cat(parts) for parts in (together, alone, expected)]


@pytest.mark.parametrize("at_once", [1 << 20, 10])
def test_a_sum_over_ranks_does_not_depend_on_what_is_summed_beside_it(at_once: int) -> None:
    for together, alone, expected in run_ranks(4, _sums, at_once):
        assert torch.equal(together, alone) and torch.equal(together, expected)
