"""Examples as rows of pieces, their order in batches, and padding.

A temporary file of this process holds the pieces of all rows, so that ten million rows need little memory. Batches hold
rows of similar length, so that they contain little padding. Their order is a pure function of (seed, epoch); evaluation
takes every row exactly once.
"""

from __future__ import annotations

import itertools
import tempfile
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from megatron_ddrp.data.batches.batch import Batch
from megatron_ddrp.data.tokenizers.tokenizer import RowForm

Item = TypeVar("Item")


def chunks(items: Iterable[Item], size: int) -> Iterator[list[Item]]:
    """Yield lists of `size` items in order; the last list may be shorter."""
    iterator = iter(items)
    while some := list(itertools.islice(iterator, size)):
        yield some


@dataclass(frozen=True)
class Encoded:
    """Rows of pieces with their targets, in the file's order."""

    pieces: np.ndarray
    """Pieces of all rows in sequence, int32 `[all pieces]`."""
    ends: np.ndarray
    """End of each row in `pieces`, exclusive, `[rows]`."""
    segments: np.ndarray
    """Segments of all pieces, int8 `[all pieces]`."""
    targets: np.ndarray
    """Targets of the loss: `[rows, …]`, or `[all pieces]` if each piece has one."""
    pad_id: int
    gold: Any = None
    """Labels in the form that the metric takes; None if they equal `targets`."""
    warning: str = ""
    """Sentence about examples that do not fit into the rows."""
    cut: int = 0
    """Number of rows that have lost pieces because their texts are too long."""

    def __len__(self) -> int:
        return len(self.ends)

    @property
    def lengths(self) -> np.ndarray:
        """Number of pieces per row, `[rows]`."""
        return np.diff(self.ends, prepend=0)

    def places(self, rows: np.ndarray) -> np.ndarray:
        """Return the indices in `pieces` of the pieces of some rows, row after row."""
        lengths = self.lengths[rows]
        begins = self.ends[rows] - lengths
        return np.arange(lengths.sum()) + np.repeat(begins - (np.cumsum(lengths) - lengths), lengths)

    @property
    def answers(self) -> Any:
        """Labels in the form that the metric takes."""
        return self.targets if self.gold is None else self.gold


class RowWriter:
    """Collector of rows. Their pieces go to a temporary file; memory holds a few bytes per row."""

    def __init__(self, pad_id: int):
        self._pad_id = pad_id
        self._pieces, self._segments = tempfile.TemporaryFile(), tempfile.TemporaryFile()  # noqa: SIM115
        self._ends, self._written = array("q"), 0

    def add(self, pieces: Sequence[int], segments: Sequence[int] | None = None) -> None:
        """Add a row. By default all of its pieces are in segment 0."""
        self._pieces.write(np.asarray(pieces, dtype=np.int32).tobytes())
        self._segments.write(bytes(len(pieces)) if segments is None else bytes(segments))
        self._written += len(pieces)
        self._ends.append(self._written)

    def rows(self, targets: np.ndarray, gold: Any = None) -> Encoded:
        """Return the rows with their targets; no more rows can be added."""
        read = []
        for file, dtype in ((self._pieces, np.int32), (self._segments, np.int8)):
            with file:  # the map stays
                file.flush()
                read.append(np.memmap(file, dtype=dtype, mode="r") if self._written else np.empty(0, dtype))
        return Encoded(read[0], np.frombuffer(self._ends, np.int64), read[1], targets, self._pad_id, gold)


def text_row(sides: Sequence[Sequence[int]], rows: RowForm, max_length: int) -> tuple[list[int], list[int], list[int]]:
    """Return the row of one text or of a pair, cut to `max_length` pieces: `RowForm.row`.

    `sides` are the pieces of the texts.
    """
    kept = [list(side) for side in sides]
    truncate(kept, max_length - rows.num_specials(len(kept)))
    return rows.row(kept)


def whole_length(sides: Sequence[Sequence[int]], rows: RowForm) -> int:
    """Return the length of the row of one text or of a pair before `text_row` cuts it."""
    return sum(map(len, sides)) + rows.num_specials(len(sides))


def cut_warning(cut: int, rows: int, max_length: int) -> str:
    """Return a sentence about the rows that `text_row` has cut; empty if there is none."""
    return f"{cut:,} of {rows:,} rows are longer than {max_length} pieces and are cut" if cut else ""


def truncate(sides: list[list[int]], budget: int) -> None:
    """Drop pieces from the end of the longer side, in place, until `budget` are left; of equal sides, the later one."""
    while sum(map(len, sides)) > budget:
        longest = max(reversed(sides), key=len)
        longest.pop()


def dev_order(encoded: Encoded, batch_size: int) -> list[np.ndarray]:
    """Return batches of row numbers, sorted by length, with every row exactly once."""
    rows = np.argsort(encoded.lengths, kind="stable")
    return [rows[start : start + batch_size] for start in range(0, len(rows), batch_size)]


def pad_batch(encoded: Encoded, rows: np.ndarray) -> Batch:
    """Return the rows with these numbers as one unmasked Batch `[batch, longest row]`."""
    lengths = encoded.lengths[rows]
    positions = np.arange(lengths.max())
    valid = positions < lengths[:, None]  # [batch, seq]
    input_ids = np.full(valid.shape, encoded.pad_id, dtype=np.int64)
    places, segment_ids = encoded.places(rows), np.zeros_like(input_ids)
    input_ids[valid], segment_ids[valid] = encoded.pieces[places], encoded.segments[places]
    return Batch.of_texts(input_ids, valid.astype(np.int64))._replace(
        segment_ids=segment_ids,
        sequence_ids=np.where(valid, np.asarray(rows)[:, None], 0),
    )
