"""Checksums of bytes on disk. They detect accidental changes by a disk, a network or memory, but no forgery.

XXH3 with 64 bits (xxhash, BSD-2) is the fastest hash of its size in a package with wheels for every platform. One core
hashes about 30 GB per second (zlib's CRC-32: 1.8; a disk delivers a few GB per second), and it releases the
interpreter's lock meanwhile. Two different contents have the same checksum with a probability of 2^-64.
"""

import json
from typing import Any

import xxhash

ALGORITHM = "xxh3_64"


def checksum() -> xxhash.xxh3_64:
    """Start a new checksum."""
    return xxhash.xxh3_64()


def checksum_of(data: bytes | memoryview) -> str:
    """The checksum of bytes as 16 hexadecimal digits."""
    return xxhash.xxh3_64_hexdigest(data)


def checksum_of_json(content: dict[str, Any]) -> str:
    """The checksum of JSON content, independent of the order of keys and of white space."""
    return checksum_of(json.dumps(content, sort_keys=True, separators=(",", ":")).encode())
