"""A bit that flips in one copy of the weights is found, and told by rank and tensor; without one nothing is."""

import pytest
import torch
import torch.distributed as dist
from layouts import make, one_step_backward, tiny
from ranks import run_ranks

from memo.errors import ReplicaError
from memo.parallel import replicas
from memo.parallel.replicas import check_replicas, fingerprint
from memo.train.parallel_model import ParallelModel

torch.set_num_threads(1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_every_bit_counts_wherever_it_is(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replicas, "_CHUNK", 8)
    words = {2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    values = torch.randn(27, generator=torch.Generator().manual_seed(1)).to(dtype)
    found = {int(fingerprint(values))}
    for element in range(27):
        for bit in range(8 * dtype.itemsize):
            flipped = values.clone()
            flipped.view(words)[element] ^= torch.tensor(1, dtype=words) << bit
            found.add(int(fingerprint(flipped)))
    assert len(found) == 1 + 27 * 8 * dtype.itemsize
    moved = {int(fingerprint(values.roll(shift))) for shift in range(27)}
    assert len(moved) == 27


def test_it_is_exact_for_values_that_no_comparison_of_floats_tells_apart() -> None:
    zeros, nans = torch.zeros(4), torch.full((4,), float("nan"))
    assert int(fingerprint(zeros)) != int(fingerprint(-zeros))
    assert int(fingerprint(nans)) == int(fingerprint(nans.clone()))


def _flip(model: ParallelModel, rank: int, kind: str, of_master: bool = False) -> None:
    """The lowest bit of the last weight of a replicated kind of bucket, which another rank's shard holds."""
    if dist.get_rank() != rank:
        return
    (bucket, *_) = [b for b in model.data_parallel.buckets if b.plan.replicated == kind]
    slot = bucket.plan.ranges[0]
    flat = bucket.master if of_master else bucket.weights
    word = flat.view(torch.int64 if flat.element_size() == 8 else torch.int16)
    word[0 if of_master else slot.offset + (slot.numel - 1 if rank == 0 else 0)] ^= 1


def _check(layout: dict[str, object], world_size: int, rank: int, kind: str, of_master: bool) -> str:
    model, feed = make(tiny("llama-tiny", **layout), world_size)
    one_step_backward(model, feed)
    assert model.optimizer.step(1e-2)[1]
    check_replicas(model.data_parallel, 7)  # nothing differs
    _flip(model, rank, kind, of_master)
    with pytest.raises(ReplicaError) as caught:
        check_replicas(model.data_parallel, 8)
    return str(caught.value)


@pytest.mark.parametrize(
    ("layout", "world_size", "rank", "kind", "of_master", "told"),
    [
        ({}, 2, 1, "", False, "weight differs between ranks 0, 1"),
        ({"cp": 2, "dtype": "bf16"}, 2, 0, "", False, "weight differs between ranks 0, 1"),
        ({"tp": 2}, 2, 1, "tp", False, "norm.weight differs between ranks 0, 1"),
        ({"tp": 2, "dtype": "bf16"}, 2, 1, "tp", True, "master of "),
        (
            {"pp": 2, "untie_embeddings_and_output_weights": False},
            2,
            1,
            "embedding",
            False,
            "weight differs between ranks 0, 1",
        ),
        ({"global_batch_size": 3}, 3, 2, "", False, "weight of rank 2 is not that of ranks 0, 1, 2"),
    ],
    ids=["dp", "cp", "tp", "tp-masters", "pp-tied", "dp3"],
)
def test_a_flipped_bit_is_told_by_every_rank_alike(
    layout: dict[str, object], world_size: int, rank: int, kind: str, of_master: bool, told: str
) -> None:
    messages = run_ranks(world_size, _check, layout, world_size, rank, kind, of_master)
    assert len(set(messages)) == 1
    assert "copies of the weights differ at iteration 8: " in messages[0] and told in messages[0]
    assert "and 1 more" not in messages[0]


def test_one_rank_has_no_copies() -> None:
    model, _ = make(tiny(), 1)
    check_replicas(model.data_parallel, 1)
