"""In what sizes torch's caching allocator for CUDA takes memory of a device, by its source
(c10/cuda/CUDACachingAllocator.cpp, kSmallSize, kSmallBuffer and kLargeBuffer; torch 2.11 to 2.13)."""

from memo.units import MIB

SMALL_REQUEST_BYTES = 1 * MIB
"""Requests up to it are served from memory of their own."""

SMALL_SEGMENT_BYTES, LARGE_SEGMENT_BYTES = 2 * MIB, 20 * MIB
"""Segments for small and for larger requests; with expandable_segments pages, of which one segment has many."""
