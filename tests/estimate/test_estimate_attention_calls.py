"""The largest calls of attention that the account counts are those that ranks make."""

from collections.abc import Iterable, Iterator
from dataclasses import replace

import pytest
import torch

from memo.attention.backends import CpuFlash
from memo.attention.blocks import Chunk, Scores, attention_blocks
from memo.attention.core import _calls, _Strips
from memo.config import RunConfig, preset
from memo.estimate.program.attention_calls import Call, gathered_calls, ring_calls
from memo.estimate.program.sizes import layer_sizes
from memo.parallel.zigzag import zigzag_chunks
from memo.spec.window import ring_steps

LENGTH = 512
Largest = dict[tuple[bool, bool], int]
"""(causal, flipped) -> queries and keys, over all sequences, of the largest call of this kind."""


def largest(calls: Iterable[tuple[bool, bool, int]]) -> Largest:
    found: Largest = {}
    for causal, flipped, tokens in calls:
        found[causal, flipped] = max(tokens, found.get((causal, flipped), 0))
    return found


def made(scores: Scores, queries: int, keys: int) -> Iterator[tuple[bool, bool, int]]:
    q, k = (torch.empty(tokens, 1, 1, 8, device="meta") for tokens in (queries, keys))
    for call in _calls(CpuFlash(), scores, q, k, k):
        parts = (call.queries(q.permute(1, 2, 0, 3)), call.keys(k.permute(1, 2, 0, 3)))
        is_strips = isinstance(call, _Strips)
        tokens = sum(x.shape[0] * x.shape[2] for x in parts)
        yield is_strips or call.causal, is_strips and call.first.flipped, tokens


def counted(calls: list[Call]) -> Iterator[tuple[bool, bool, int]]:
    return ((call.causal, call.flipped, call.queries + call.keys) for call in calls)


@pytest.mark.parametrize("window", [0, 16, 24, 100])
@pytest.mark.parametrize("ring", [2, 4])
@pytest.mark.parametrize("exchange", ["all_gather", "p2p"])
def test_first_and_last_rank_of_a_ring(exchange: str, ring: int, window: int) -> None:
    """One of the two needs most memory: the chunks of the last rank are neighbours, so its calls are larger. At most
    one strip more is counted than is called."""
    flags = {"seq_length": LENGTH, "window_size": window, "cp": ring, "cp_comm_type": exchange, "device": "cpu"}
    config = RunConfig(model=replace(preset("gpt-tiny"), vocab_size=256)).override(flags)
    own, within = LENGTH // ring, window or None
    chunks = [zigzag_chunks(LENGTH, ring, place) for place in range(ring)]
    ours, theirs = [], []
    for rank in (0, ring - 1):
        sizes = layer_sizes(config, threads=1)._replace(ring_rank=rank)
        if exchange == "all_gather":
            ours += counted(gathered_calls(sizes))
            theirs += made(attention_blocks(chunks[rank], (Chunk(0, LENGTH, 0),), None, within), own, LENGTH)
            continue
        for step in ring_steps(LENGTH, ring, within):
            ours += counted(ring_calls(sizes, step))
            theirs += made(attention_blocks(chunks[rank], chunks[(rank - step) % ring], None, within), own, own)
    expected, found = largest(theirs), largest(ours)
    assert {kind: 0 <= found[kind] - tokens <= 2 * window for kind, tokens in expected.items()} == dict.fromkeys(
        expected, True
    )
