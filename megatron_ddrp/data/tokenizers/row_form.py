"""Rows of a vocabulary's tokenizer: special pieces around one text and between two, with the segment of each piece."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from tokenizers import Tokenizer as RustTokenizer
from tokenizers import processors

FIRST, SECOND = -1, -2
"""Stand-ins for the ids of the two texts."""
Parts = tuple[tuple[int, int], ...]
"""Id of each special piece of a row, or a stand-in, with its segment."""


class RowForm(NamedTuple):
    """Form of the rows of one text and of a pair."""

    single: Parts
    pair: Parts

    def row(self, sides: Sequence[Sequence[int]]) -> tuple[list[int], list[int], list[int]]:
        """Return the pieces of the row of one text or two, their segments, and the place where each text begins."""
        pieces: list[int] = []
        segments: list[int] = []
        begins: list[int] = []
        for part, segment in self[len(sides) - 1]:
            own = [part] if part >= 0 else sides[FIRST - part]
            begins += [len(pieces)] * (part < 0)
            pieces += own
            segments += [segment] * len(own)
        return pieces, segments, begins

    def num_specials(self, texts: int) -> int:
        """Return the number of special pieces in a row of one text or two."""
        return len(self[texts - 1]) - texts

    def without_segments(self) -> RowForm:
        """Return the same rows in segment 0."""
        return RowForm(*(tuple((part, 0) for part, _ in parts) for parts in self))

    def is_made_by(self, form: RowForm | None) -> bool:
        """Return whether these are the rows of `form`, of which a tokenizer may leave out the segments."""
        return form is not None and self in (form, form.without_segments())

    @property
    def num_segments(self) -> int:
        """Number of segments, counted from 0."""
        return 1 + max(segment for parts in self for _, segment in parts)

    def processor(self, pieces: Sequence[str]) -> processors.TemplateProcessing:
        """Return the library's template of these rows."""
        texts = {FIRST: "$A", SECOND: "$B"}
        single, pair = ([f"{texts.get(i) or pieces[i]}:{segment}" for i, segment in parts] for parts in self)
        known = {i for parts in self for i, _ in parts if i >= 0}
        return processors.TemplateProcessing(single, pair, [(pieces[i], i) for i in sorted(known)])


def usual_rows(cls: int, sep: int, doubled: bool = False) -> RowForm:
    """Return BERT's rows, or with `doubled` RoBERTa's: two separators between the texts of a pair, and one segment."""
    single = ((cls, 0), (FIRST, 0), (sep, 0))
    return RowForm(single, single + (((sep, 0), (SECOND, 0), (sep, 0)) if doubled else ((SECOND, 1), (sep, 1))))


def read_rows(stored: Any) -> RowForm | None:
    """Return rows from their JSON value, in which None stands for none. Raise TypeError or ValueError for others."""
    return stored and RowForm(*(tuple((int(i), int(segment)) for i, segment in parts) for parts in stored))


def backend_rows(backend: RustTokenizer) -> RowForm | None:
    """Return the rows that a tokenizer of the library makes; None if it puts no piece around a text."""
    text = " ".join(filter(None, map(backend.id_to_token, range(100))))
    forms = []
    for sides in ((text,), (text, text)):
        row = backend.encode(*sides)
        parts = [
            (piece if side is None else FIRST - side, segment)
            for piece, segment, side in zip(row.ids, row.type_ids, row.sequence_ids, strict=True)
        ]
        ends = [*parts[1:], (FIRST, -1)]
        forms.append(tuple(part for part, after in zip(parts, ends, strict=True) if part[0] >= 0 or part != after))
    return RowForm(*forms) if any(part >= 0 for part, _ in forms[0]) else None
