"""Faults inside an index, in words: negative sizes, sequences with gaps or overlaps, documents out of order.

Memory does not grow with the dataset.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np

from megatron_ddrp.data.dataset.dataset_index import CHUNK, DatasetIndex

MOST_LISTED = 10
"""Number of faults of a kind that are listed; the others are counted."""


def index_faults(index: DatasetIndex) -> Iterator[str]:
    """Read a whole index and yield one line per fault; its header must fit the file."""
    sizes, pointers, indices, width = index.sizes, index.pointers, index.document_indices, index.dtype.itemsize

    def gap(i: int) -> str:
        end = int(pointers[i - 1]) + int(sizes[i - 1]) * width
        return f"sequence {i} begins at byte {pointers[i]}, but sequence {i - 1} ends at byte {end}"

    def crossing(d: int) -> str:
        return f"document {d} begins with sequence {indices[d]}, but ends before sequence {indices[d + 1]}"

    yield from first_faults("negative sizes", _negative(sizes), lambda i: f"sequence {i} has {sizes[i]} tokens")
    if len(index) and pointers[0] != 0:
        yield f"sequence 0 begins at byte {pointers[0]}, expected 0"
    yield from first_faults("sequences that do not begin at the end of the previous one", _gaps(index), gap)
    yield from index.faults_of_ends()
    yield from first_faults("documents that end before they begin", _crossings(indices), crossing)


def first_faults(kind: str, found: Iterable[np.ndarray], words: Callable[[Any], str]) -> Iterator[str]:
    """Yield lines about the first `MOST_LISTED` rows of all the arrays, and one with the count of the others."""
    total = 0
    for places in found:
        yield from map(words, places[: max(0, MOST_LISTED - total)])
        total += len(places)
    if total > MOST_LISTED:
        yield f"{total - MOST_LISTED:,} more {kind}, {total:,} in all"


def _negative(sizes: np.ndarray) -> Iterator[np.ndarray]:
    for begin in range(0, len(sizes), CHUNK):
        yield begin + np.flatnonzero(sizes[begin : begin + CHUNK] < 0)


def _gaps(index: DatasetIndex) -> Iterator[np.ndarray]:
    for begin in range(0, len(index) - 1, CHUNK):
        pointers = index.pointers[begin : begin + CHUNK + 1]
        lengths = index.sizes[begin : begin + len(pointers) - 1].astype(np.int64) * index.dtype.itemsize  # bytes
        yield begin + 1 + np.flatnonzero(pointers[:-1] + lengths != pointers[1:])


def _crossings(indices: np.ndarray) -> Iterator[np.ndarray]:
    for begin in range(0, len(indices) - 1, CHUNK):
        part = indices[begin : begin + CHUNK + 1]
        yield begin + np.flatnonzero(part[:-1] > part[1:])
