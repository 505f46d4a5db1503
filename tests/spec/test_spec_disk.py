"""Which records are on disk: as few as host memory asks for, and never more than it holds."""

import random

from memo.spec.disk import BLOCK_BYTES, RecordKind, least_host_bytes, split_records, stride_bytes


def taken(kinds: list[RecordKind], on_disk: tuple[int, ...]) -> int:
    """Host bytes, counted record by record."""
    total = 0
    for kind, count in zip(kinds, on_disk, strict=True):
        total += sum(kind.num_bytes for _ in range(kind.number - count))
        if count:
            part_bytes = kind.stride_bytes // kind.parts
            total += sum(part_bytes for _ in range(min(kind.num_buffers, kind.parts * kind.number)))
    return total


def test_splits_hold_and_no_record_is_on_disk_for_nothing() -> None:
    generator = random.Random(0)
    refused = split_first = 0
    for _ in range(2000):
        kinds = [
            RecordKind(generator.randint(0, 6), 4 * generator.randint(1, 5000), parts=4),
            RecordKind(generator.randint(0, 20), generator.randint(1, 20000)),
        ]
        whole = sum(kind.total_bytes for kind in kinds)
        host_bytes = generator.randint(0, whole + 10)
        found = split_records(kinds, host_bytes)
        if found is None:
            every = tuple(kind.number for kind in kinds)
            assert taken(kinds, every) > host_bytes and taken(kinds, (0, every[1])) > host_bytes
            refused += 1
            continue
        assert taken(kinds, found.on_disk) == found.host_bytes <= host_bytes
        assert found.disk_bytes == sum(n * kind.stride_bytes for n, kind in zip(found.on_disk, kinds, strict=True))
        first, last = found.on_disk
        if first:
            assert last == kinds[1].number and taken(kinds, (first - 1, last)) > host_bytes
            split_first += 1
        elif last:
            assert taken(kinds, (0, last - 1)) > host_bytes
        else:
            assert whole <= host_bytes
    assert refused > 100 and split_first > 100


def test_strides_are_of_whole_blocks_part_by_part() -> None:
    assert [stride_bytes(size) for size in (1, BLOCK_BYTES, BLOCK_BYTES + 1)] == [4096, 4096, 8192]
    assert RecordKind(3, 4 * 5000, parts=4).stride_bytes == 4 * 8192
    assert RecordKind(3, 5000).staging_bytes == 3 * 8192
    assert RecordKind(3, 4 * 5000, parts=4).staging_bytes == 4 * 8192, "parts share the buffers"
    assert RecordKind(1, 2 * 5000, parts=2).staging_bytes == 2 * 8192
    assert [RecordKind(3, 2 * 5000, parts=2).buffers_of(count) for count in range(4)] == [0, 2, 4, 4]


def test_the_least_host_memory_beside_a_disk_is_enough_and_less_is_not() -> None:
    generator = random.Random(1)
    tight = 0
    for _ in range(2000):
        kinds = [
            RecordKind(generator.randint(0, 6), 4 * generator.randint(2000, 9000), parts=4),
            RecordKind(generator.randint(8, 40), generator.randint(5000, 20000)),
        ]
        whole = sum(kind.total_bytes for kind in kinds)
        disk_bytes = generator.uniform(0, 2 * whole)
        least = least_host_bytes(kinds, disk_bytes)
        found = split_records(kinds, least)
        assert found is not None and found.host_bytes <= least <= whole
        if least < whole:
            assert found.disk_bytes <= disk_bytes
            fewer = split_records(kinds, least - 1)
            tight += fewer is None or fewer.disk_bytes > disk_bytes
    assert least_host_bytes([RecordKind(3, 0), RecordKind(30, 4096)]) == 4 * 4096, "records of nothing"
    assert least_host_bytes([RecordKind(3, 5000)]) == 15000, "the staging buffers of a few are as large as they are"
    assert tight > 1000
