"""Blocks against a dense mask, built by brute force from positions and documents."""

import random

import pytest

from memo.attention.blocks import (
    Chunk,
    Documents,
    ScoreBlock,
    Scores,
    attention_blocks,
    coalesce,
    cut_keys,
    demanding_packings,
)
from memo.spec.attention_workspace import MOST_DOCUMENTS


def covered(blocks: tuple[ScoreBlock, ...], batch: int, num_q: int, num_k: int) -> list[list[int]]:
    """How often each (q row, k row) of one batch row is computed."""
    counts = [[0] * num_k for _ in range(num_q)]
    for block in blocks:
        if block.batch not in (None, batch):
            continue
        if block.causal:
            assert block.q_stop - block.q_start == block.k_stop - block.k_start
        for i in range(block.q_start, block.q_stop):
            for j in range(block.k_start, block.k_stop):
                if not block.causal or i - block.q_start >= j - block.k_start:
                    counts[i][j] += 1
    return counts


def dense(q_chunks: tuple[Chunk, ...], k_chunks: tuple[Chunk, ...], row: tuple[int, ...]) -> list[list[int]]:
    """1 where the query sees the key: same document and not later."""
    document = [sum(position >= start for start in row[1:]) for position in range(row[-1])]
    q_at, k_at = positions(q_chunks), positions(k_chunks)
    return [
        [int(q_at[i] >= k_at[j] and document[q_at[i]] == document[k_at[j]]) for j in sorted(k_at)] for i in sorted(q_at)
    ]


def positions(chunks: tuple[Chunk, ...]) -> dict[int, int]:
    return {chunk.row + i: chunk.start + i for chunk in chunks for i in range(chunk.length)}


def random_row(rng: random.Random, length: int) -> tuple[int, ...]:
    inner = rng.sample(range(1, length), rng.randint(0, min(6, length - 1)))
    return (0, *sorted(inner), length)


def random_chunks(rng: random.Random, length: int) -> tuple[Chunk, ...]:
    """Disjoint ranges of the sequence, laid out in random order."""
    cuts = sorted(rng.sample(range(length + 1), rng.choice([2, 4, 6])))
    ranges = list(zip(cuts[::2], cuts[1::2], strict=True))
    if rng.random() < 0.5:
        rng.shuffle(ranges)
    chunks, row = [], 0
    for start, stop in ranges:
        chunks.append(Chunk(start, stop - start, row))
        row += stop - start
    return tuple(chunks)


def zigzag(length: int, size: int, rank: int) -> tuple[Chunk, ...]:
    half = length // (2 * size)
    return Chunk(rank * half, half, 0), Chunk((2 * size - 1 - rank) * half, half, half)


@pytest.mark.parametrize("most_keys", [1, 3, 8, 100])
def test_cut_keys_keeps_every_score(most_keys: int) -> None:
    """Queries 24 to 31 of documents that end inside and before them, against all keys."""
    queries, keys, row = (Chunk(24, 8, 0),), (Chunk(0, 32, 0),), (0, 5, 26, 32)
    cut = cut_keys(attention_blocks(queries, keys, (row,)), most_keys).blocks
    assert covered(cut, 0, 8, 32) == dense(queries, keys, row)
    assert all(block.causal or block.k_stop - block.k_start <= most_keys for block in cut)


@pytest.mark.parametrize("seed", range(200))
def test_random_chunks_and_documents(seed: int) -> None:
    rng = random.Random(seed)
    length = rng.randint(8, 40)
    q_chunks = random_chunks(rng, length)
    k_chunks = q_chunks if rng.random() < 0.3 else random_chunks(rng, length)
    documents = None if rng.random() < 0.2 else tuple(random_row(rng, length) for _ in range(3))
    blocks = attention_blocks(q_chunks, k_chunks, documents).blocks
    for batch in range(3):
        expected = dense(q_chunks, k_chunks, documents[batch] if documents else (0, length))
        assert covered(blocks, batch, len(expected), len(expected[0])) == expected


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize(
    "row", [(0, 48), (0, 1, 2, 48), (0, 6, 12, 24, 48), (0, 5, 47, 48), tuple(range(49)), (0, 8, 40, 48)]
)
def test_zigzag_pairs_with_awkward_documents(size: int, row: tuple[int, ...]) -> None:
    for rank in range(size):
        for peer in range(size):
            q_chunks, k_chunks = zigzag(48, size, rank), zigzag(48, size, peer)
            blocks = attention_blocks(q_chunks, k_chunks, (row,)).blocks
            expected = dense(q_chunks, k_chunks, row)
            assert covered(blocks, 0, len(expected), len(expected)) == expected


def test_unpacked_zigzag_needs_one_call_a_pair() -> None:
    def blocks(rank: int, peer: int) -> tuple[ScoreBlock, ...]:
        return attention_blocks(zigzag(48, 4, rank), zigzag(48, 4, peer), None).blocks

    assert blocks(1, 1) == (ScoreBlock(None, 0, 12, 0, 12, True),)
    assert blocks(2, 1) == (ScoreBlock(None, 0, 12, 0, 6, False),)  # an earlier rank: all q on its low half
    assert blocks(1, 2) == (ScoreBlock(None, 6, 12, 0, 12, False),)  # a later rank: the high half on all of it
    whole = zigzag(48, 1, 0)
    assert attention_blocks(whole, whole, None) == Scores((ScoreBlock(None, 0, 48, 0, 48, True),))


def test_packed_own_shard_is_one_causal_block_a_document() -> None:
    # Rank 0 of 2 holds [0, 12) and [36, 48): the document [30, 40) lies only in the high half.
    blocks = attention_blocks(zigzag(48, 2, 0), zigzag(48, 2, 0), ((0, 5, 30, 40, 48),)).blocks
    assert [(block.q_start, block.q_stop) for block in blocks] == [(0, 5), (5, 12), (12, 16), (16, 24)]
    assert all(block.causal for block in blocks)


def test_equal_documents_of_all_rows_share_blocks() -> None:
    documents: Documents = ((0, 5, 48), (0, 5, 48))
    assert {block.batch for block in attention_blocks(zigzag(48, 1, 0), zigzag(48, 1, 0), documents).blocks} == {None}


@pytest.mark.parametrize("seq_length", [64, 1000, 65536])
@pytest.mark.parametrize("ranks", [1, 4])
def test_the_most_demanding_packings(seq_length: int, ranks: int) -> None:
    one, two, many = demanding_packings(seq_length, 2, seq_length // ranks)
    for documents in (one, two, many):
        assert len(documents) == 2 and documents[0] == documents[1]
        assert documents[0][0] == 0 and documents[0][-1] == seq_length and list(documents[0]) == sorted({*documents[0]})
    assert one[0] == (0, seq_length)
    _, short, _ = two[0]
    assert short == 1 or seq_length / 1.001 <= seq_length - short
    assert seq_length < 65536 or short == 64
    of_a_call = [end for end in many[0] if 0 < end <= seq_length // ranks]
    assert MOST_DOCUMENTS - 2 <= len(of_a_call) <= MOST_DOCUMENTS or seq_length // ranks < MOST_DOCUMENTS


def test_off_diagonal_pairs_cost_one_block_however_many_documents() -> None:
    row = tuple(range(0, 4097, 16))
    blocks = attention_blocks((Chunk(2048, 2048, 0),), (Chunk(8, 2032, 0),), (row,)).blocks
    assert blocks == ()
    straddling = (0, *range(16, 1024, 16), *range(3072, 4097, 16))
    blocks = attention_blocks((Chunk(2048, 2048, 0),), (Chunk(0, 2048, 0),), (straddling,)).blocks
    assert blocks == (ScoreBlock(None, 0, 1024, 1008, 2048, False),)


def test_coalesce_joins_only_what_is_contiguous_on_both_sides() -> None:
    assert coalesce((Chunk(0, 4, 0), Chunk(4, 0, 4), Chunk(4, 4, 4))) == (Chunk(0, 8, 0),)
    assert len(coalesce((Chunk(0, 4, 0), Chunk(4, 4, 8)))) == 2
    assert len(coalesce((Chunk(0, 4, 0), Chunk(8, 4, 4)))) == 2
