"""ZeRO-1's reduction: overlap changes no bit, replicas and norm are right, missing gradients are named."""

import re

import pytest
import torch
from layouts import assemble, global_pieces, make, one_step_backward, tiny
from ranks import run_ranks
from torch import Tensor

from memo.config import RunConfig


def _gradients(config: RunConfig, world_size: int) -> list[tuple[dict[str, Tensor], float, int]]:
    """With and without overlap: this rank's pieces of the gradients, the norm, and the number of buckets."""
    found = []
    for overlap in (True, False):
        model, feed = make(config.override({"overlap_grad_reduce": overlap}), world_size)
        one_step_backward(model, feed)
        norm = model.data_parallel.gradient_norm().item()
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
    unused = "0.layers.0.mlp_norm.bias"
    model.data_parallel.parameters[unused].requires_grad_(False)
    message = f"1 parameters got fewer gradients than microbatches, the first is {unused}: each must"
    with pytest.raises(RuntimeError, match=re.escape(message)):
        one_step_backward(model, feed)


def test_gradients_start_from_zero_every_step() -> None:
    model, feed = make(tiny(), 1)
    one_step_backward(model, feed)
    first = {name: value.clone() for name, value in global_pieces(model, "grad").items()}
    feed.sampler.load_state_dict({"seed": 7, "consumed_samples": 0})
    one_step_backward(model, feed)
    again = global_pieces(model, "grad")
    assert all(torch.equal(first[name], again[name]) for name in first)


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
