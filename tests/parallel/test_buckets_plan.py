"""Bucket plans: any parameters, any number of shards, every element in exactly one place."""

import math
import random

import pytest

from memo.parallel.shards import Replicated
from memo.spec.buckets import ALIGNMENT, ParameterShape, plan_buckets


def random_parameters(rng: random.Random) -> list[ParameterShape]:
    kinds: list[Replicated] = ["", "tp", "embedding"]
    return [
        ParameterShape(
            f"p{i}", tuple(rng.randint(1, 40) for _ in range(rng.randint(1, 3))), rng.choice(kinds), rng.random() < 0.3
        )
        for i in range(rng.randint(1, 12))
    ]


@pytest.mark.parametrize("seed", range(40))
def test_segments_partition_every_parameter(seed: int) -> None:
    rng = random.Random(seed)
    parameters = random_parameters(rng)
    num_shards, bucket_size = rng.choice((1, 2, 3, 4, 7, 16, 61)), rng.choice((1, 64, 5000, 10**9))
    buckets = plan_buckets(parameters, bucket_size, num_shards)
    for bucket in buckets:
        taken: set[int] = set()
        for span in bucket.ranges:
            place = set(range(span.offset, span.offset + span.numel))
            assert not place & taken
            taken |= place
        pieces = [(shard, s) for shard in range(num_shards) for s in bucket.segments(shard)]
        for span in bucket.ranges:
            ours = [(shard, s) for shard, s in pieces if s.range == span]
            covered = [flat for _, s in ours for flat in range(s.start, s.stop)]
            assert covered == list(range(span.numel))  # once each, and in the order of the shards
            for shard, s in ours:
                assert shard * bucket.shard_size + s.shard_offset == span.offset + s.start
                assert s.shard_offset >= 0 and s.shard_offset + s.stop - s.start <= bucket.shard_size
    placed = {ParameterShape(span.name, span.shape, b.replicated, b.frozen) for b in buckets for span in b.ranges}
    assert placed == set(parameters)


@pytest.mark.parametrize("num_shards", (1, 2, 3, 8))
def test_parameters_and_shards_are_aligned_and_padding_is_small(num_shards: int) -> None:
    parameters = random_parameters(random.Random(num_shards))
    for bucket in plan_buckets(parameters, 3000, num_shards):
        assert bucket.size == bucket.shard_size * num_shards
        assert bucket.shard_size % ALIGNMENT == 0
        assert all(span.offset % ALIGNMENT == 0 for span in bucket.ranges)
        used = sum(-(-span.numel // ALIGNMENT) * ALIGNMENT for span in bucket.ranges)
        assert used <= bucket.size < used + ALIGNMENT * num_shards


def test_a_bucket_closes_once_it_is_full_and_kinds_never_mix() -> None:
    parameters = [
        ParameterShape("a", (64, 2)),
        ParameterShape("norm", (64,), "tp"),
        ParameterShape("frozen", (64, 2), frozen=True),
        ParameterShape("b", (64, 2)),
        ParameterShape("tied", (64, 8), "embedding"),
        ParameterShape("c", (64,)),
    ]
    buckets = plan_buckets(parameters, 256, 1)
    assert [[span.name for span in bucket.ranges] for bucket in buckets] == [
        ["a", "b"],
        ["tied"],
        ["norm"],
        ["frozen"],
        ["c"],
    ]
    assert [bucket.replicated for bucket in buckets] == ["", "embedding", "tp", "", ""]
    assert [bucket.frozen for bucket in buckets] == [False, False, False, True, False]


def test_the_tied_embedding_is_sharded_alike_on_both_stages() -> None:
    shape = (123, 17)
    first = plan_buckets([ParameterShape("norm", (17,), "tp"), ParameterShape("tied", shape, "embedding")], 100, 3)
    last = plan_buckets([ParameterShape("tied", shape, "embedding"), ParameterShape("w", (9, 9))], 10**6, 3)
    plans = [next(b for b in buckets if b.replicated == "embedding") for buckets in (first, last)]
    assert plans[0] == plans[1]
    assert plans[0].size >= math.prod(shape)
