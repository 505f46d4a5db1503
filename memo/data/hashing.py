"""Random choices as a pure function of (keys, index): no generator state to save or to restore.

NumPy does not promise equal `Generator` streams between releases (NEP 19), but a resumed run must always see the same
sample order, so the few lines that decide it are written out here.
"""

import numpy as np
from numpy.typing import NDArray

_MASK_64 = (1 << 64) - 1
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MULTIPLIER_1 = np.uint64(0xBF58476D1CE4E5B9)
_MULTIPLIER_2 = np.uint64(0x94D049BB133111EB)
_SHIFT_30, _SHIFT_27, _SHIFT_31, _SHIFT_11 = (np.uint64(bits) for bits in (30, 27, 31, 11))


def hash64(keys: tuple[int, ...], indices: NDArray[np.integer]) -> NDArray[np.uint64]:
    """One 64-bit hash for each element of `indices` (shape [n]) under `keys`.

    Each key, then the index, goes through the SplitMix64 finaliser (Steele, Lea, Flood, "Fast splittable
    pseudorandom number generators", OOPSLA 2014). The finaliser is a bijection, so different indices under
    the same keys never collide.
    """
    state = np.zeros(1, dtype=np.uint64)
    for key in keys:
        state = _split_mix(state ^ np.uint64(key & _MASK_64))
    return _split_mix(state ^ indices.astype(np.uint64))


def uniform(keys: tuple[int, ...], indices: NDArray[np.integer]) -> NDArray[np.float64]:
    """One float64 in [0, 1) for each element of `indices`: the top 53 bits of its hash."""
    return (hash64(keys, indices) >> _SHIFT_11).astype(np.float64) * 2.0**-53


def permutation(keys: tuple[int, ...], length: int) -> NDArray[np.int64]:
    """A permutation of range(length), shape [length]: the order of the hashes, which are all different."""
    return np.argsort(hash64(keys, np.arange(length)))


def _split_mix(state: NDArray[np.uint64]) -> NDArray[np.uint64]:
    state = state + _GOLDEN
    state = (state ^ (state >> _SHIFT_30)) * _MULTIPLIER_1
    state = (state ^ (state >> _SHIFT_27)) * _MULTIPLIER_2
    return state ^ (state >> _SHIFT_31)
