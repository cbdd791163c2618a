"""What is wrong inside an index, in words: no size is negative, every sequence begins where the one before ends, and
documents follow one another. Memory does not grow with the dataset.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from megatron_ddrp.data.dataset.dataset_index import CHUNK, DatasetIndex

MOST_LISTED = 10
"""Faults of one kind that are named one by one; of the others the number is given."""


def index_faults(index: DatasetIndex) -> Iterator[str]:
    """Everything wrong inside an index whose header fits its file, a line each; reads all of it."""
    negative = FaultList("negative sizes")
    for begin in range(0, len(index), CHUNK):
        found = np.flatnonzero(index.sizes[begin : begin + CHUNK] < 0)
        yield from negative.lines(begin + found, lambda i: f"sequence {i} has {index.sizes[i]} tokens")
    yield from negative.rest()
    if len(index) and index.pointers[0] != 0:
        yield f"sequence 0 begins at byte {index.pointers[0]}, expected 0"

    def gap(i: int) -> str:
        end = int(index.pointers[i - 1]) + int(index.sizes[i - 1]) * index.dtype.itemsize
        return f"sequence {i} begins at byte {index.pointers[i]}, but sequence {i - 1} ends at byte {end}"

    gaps = FaultList("sequences that do not begin where the one before ends")
    for begin in range(0, len(index) - 1, CHUNK):
        pointers = index.pointers[begin : begin + CHUNK + 1]
        lengths = index.sizes[begin : begin + len(pointers) - 1].astype(np.int64) * index.dtype.itemsize  # bytes
        yield from gaps.lines(begin + 1 + np.flatnonzero(pointers[:-1] + lengths != pointers[1:]), gap)
    yield from gaps.rest()
    yield from index.faults_of_ends()
    indices = index.document_indices

    def crossing(d: int) -> str:
        return f"document {d} begins with sequence {indices[d]}, but ends before sequence {indices[d + 1]}"

    crossings = FaultList("documents that end before they begin")
    for begin in range(0, len(indices) - 1, CHUNK):
        part = indices[begin : begin + CHUNK + 1]
        yield from crossings.lines(begin + np.flatnonzero(part[:-1] > part[1:]), crossing)
    yield from crossings.rest()


class FaultList:
    """Puts the first `MOST_LISTED` faults of a kind in words and counts the others."""

    def __init__(self, kind: str):
        self._kind = kind
        self._total = 0

    def lines(self, places: np.ndarray, describe: Callable[[int], str]) -> Iterator[str]:
        """A line for each place that is still to be named."""
        room = max(0, MOST_LISTED - self._total)
        self._total += len(places)
        for place in places[:room]:
            yield describe(int(place))

    def rest(self) -> Iterator[str]:
        """A line for all others, if there are any."""
        if self._total > MOST_LISTED:
            yield f"{self._total - MOST_LISTED:,} more {self._kind}, {self._total:,} in all"
