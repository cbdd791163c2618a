"""Packing: the samples of a global batch in few full rows, with several documents side by side in a row.

A row of one short document is mostly padding. Packing does not change the tokens and masks of the samples of a global
batch, only their places. Each document of a row has its own number in `document_ids`, which limits attention, and its
own positions from 0. So losses and gradients equal those of one document per row, to rounding.

Rows are filled by best fit, longest sample first (best-fit decreasing; Johnson et al., SIAM J. Comput. 1974: at most
11/9 of the fewest possible rows, plus a constant). Short documents fill the rows almost completely. The layout depends
only on the lengths, so all ranks find the same one.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort

import numpy as np
from numpy.typing import NDArray

from megatron_ddrp.data.batches.batch import IGNORED_LABEL, Batch

Row = list[int]
"""Samples of a row, as indices into the lengths, longest first."""


def pack_rows(lengths: NDArray[np.int64], row_length: int, min_rows: int = 1) -> list[Row]:
    """Return rows of at most `row_length` tokens for samples of `lengths` `[samples]`, emptiest row first.

    There are at least `min_rows` rows, none of them empty, because every micro-batch of every rank needs one;
    `min_rows` is at most the number of samples.
    """
    assert min_rows <= len(lengths), f"{min_rows} rows of {len(lengths)} samples"
    assert not len(lengths) or lengths.max() <= row_length, f"a sample of {lengths.max()} tokens, rows of {row_length}"
    sizes = lengths.tolist()
    rows = _best_fit_decreasing(sizes, row_length)
    if len(rows) < min_rows:
        rows = _spread(rows, sizes, min_rows)
    return sorted(rows, key=lambda row: (_tokens(row, sizes), row))


def _tokens(row: Row, sizes: list[int]) -> int:
    return sum(sizes[sample] for sample in row)


def _best_fit_decreasing(sizes: list[int], row_length: int) -> list[Row]:
    """Put each sample, longest first, into the fullest row with enough space; of equal rows into the oldest."""
    rows: list[Row] = []
    open_rows: list[tuple[int, int]] = []  # (free tokens, row), ascending
    for sample in sorted(range(len(sizes)), key=lambda sample: -sizes[sample]):
        place = bisect_left(open_rows, (sizes[sample],))
        if place == len(open_rows):
            free, number = row_length, len(rows)
            rows.append([])
        else:
            free, number = open_rows.pop(place)
        rows[number].append(sample)
        if free > sizes[sample]:
            insort(open_rows, (free - sizes[sample], number))
    return rows


def _spread(rows: list[Row], sizes: list[int], num_rows: int) -> list[Row]:
    """Split the fullest row of several documents until there are `num_rows` rows."""
    queue = [(len(row) == 1, -_tokens(row, sizes), row) for row in rows]  # rows of one document come last
    heapq.heapify(queue)
    while len(queue) < num_rows:
        _, _, row = heapq.heappop(queue)
        for half in _halve(row, sizes):
            heapq.heappush(queue, (len(half) == 1, -_tokens(half, sizes), half))
    return [row for _, _, row in queue]


def _halve(row: Row, sizes: list[int]) -> tuple[Row, Row]:
    """Return two rows of similar length with the documents of one row."""
    assert len(row) > 1, "a row of one document has no halves"
    halves: tuple[Row, Row] = ([], [])
    fullness = [0, 0]
    for sample in row:
        emptier = int(fullness[1] < fullness[0])
        halves[emptier].append(sample)
        fullness[emptier] += sizes[sample]
    return halves


def join_samples(samples: Batch, documents: NDArray[np.int64], row_length: int, pad_id: int) -> Batch:
    """Return rows of several documents from rows of one document: `[samples, seq]` → `[rows, row_length]`.

    `documents` `[rows]` is the number of samples per row, taken in order. They get the document ids 1, 2, … of their
    row; positions and all other fields move with their tokens.
    """
    assert documents.sum() == len(samples.input_ids), (documents.sum(), len(samples.input_ids))
    valid = samples.document_ids > 0  # [samples, seq]
    first = np.cumsum(documents) - documents  # [rows]: the first sample of each
    numbers = np.arange(documents.sum()) - np.repeat(first, documents) + 1  # [samples]: 1, 2, … within the row
    row_tokens = np.add.reduceat(valid.sum(axis=1), first)  # [rows]
    # Row by row and sample by sample, the tokens have the same order on both sides.
    source = np.flatnonzero(valid)  # [tokens]
    target = np.flatnonzero(np.arange(row_length) < row_tokens[:, None])  # [tokens]

    def lay(field: NDArray[np.int64], padding: int) -> NDArray[np.int64]:
        laid = np.full(len(documents) * row_length, padding, np.int64)
        laid[target] = field.ravel()[source]
        return laid.reshape(len(documents), row_length)

    numbered = samples._replace(document_ids=samples.document_ids * numbers[:, None])
    padding = Batch(pad_id, IGNORED_LABEL, document_ids=0, position_ids=0, segment_ids=0, sequence_ids=0, note_ids=0)
    return Batch(*(None if field is None else lay(field, fill) for field, fill in zip(numbered, padding, strict=True)))
