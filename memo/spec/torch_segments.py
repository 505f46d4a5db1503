"""Sizes in which torch's caching allocator for CUDA takes memory of a device, from its source
(c10/cuda/CUDACachingAllocator.cpp, kSmallSize, kSmallBuffer and kLargeBuffer; torch 2.11 to 2.13)."""

from memo.units import MIB

SMALL_REQUEST_BYTES = 1 * MIB
"""Requests of at most this size are small and are served from segments of their own."""

SMALL_SEGMENT_BYTES, LARGE_SEGMENT_BYTES = 2 * MIB, 20 * MIB
"""Segments for small and for larger requests; with expandable_segments the pages of a segment, which has many."""
