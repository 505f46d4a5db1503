"""Packs documents into windows by best-fit decreasing.

The number of windows is at most 11/9 of the minimum plus 4 (Johnson et al., SIAM J. Comput. 3, 1974).
"""

from bisect import bisect_left, insort

import numpy as np
from numpy.typing import NDArray


def best_fit(documents: NDArray[np.integer], lengths: NDArray[np.integer], capacity: int) -> list[list[int]]:
    """The documents of each window. From the longest document on, each goes into the window where it leaves least
    space; those of equal length in the given order. `lengths`: of all documents by number, none above `capacity`."""
    longest_first = documents[np.argsort(-lengths[documents], kind="stable")]
    windows: list[list[int]] = []
    spaces: list[int] = []  # distinct numbers of free tokens in windows, ascending
    by_space: dict[int, list[int]] = {}  # {number of free tokens: windows}
    for document in longest_first.tolist():
        length = int(lengths[document])
        place = bisect_left(spaces, length)
        if place == len(spaces):
            number, left = len(windows), capacity - length
            windows.append([])
        else:
            left = spaces[place] - length
            number = by_space[spaces[place]].pop()
            if not by_space[spaces[place]]:
                del by_space[spaces.pop(place)]
        windows[number].append(document)
        if left not in by_space:
            insort(spaces, left)
        by_space.setdefault(left, []).append(number)
    return windows
