"""Marks by which the pieces of a vocabulary tell words apart: at their begins, at their ends, or not at all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

BEGIN, END, NONE = "begin", "end", "none"
WORD_END = "</w>"
"""The usual end of a piece that ends a word, as in the vocabularies of XLM, FlauBERT and HerBERT."""


def _never(piece: str) -> bool:
    return False


class WordMarks(NamedTuple):
    """Rule that tells from a piece whether a word begins or ends with it."""

    begins: Callable[[str], bool]
    ends: Callable[[str], bool] = _never
    side: str = BEGIN
    """`BEGIN` or `END`, the side of a word that carries the mark, or `NONE`: then every piece counts as a word."""


UNMARKED = WordMarks(lambda piece: True, side=NONE)


def begins_with(*marks: str) -> WordMarks:
    """Return the rule of a vocabulary in which a word begins with one of the marks."""
    return WordMarks(lambda piece: piece.startswith(marks))


def ends_with(mark: str) -> WordMarks:
    """Return the rule of a vocabulary in which a word ends with the mark."""
    return WordMarks(_never, lambda piece: piece.endswith(mark), END)


def side_of(pieces: Sequence[str], mark: str) -> str:
    """Return the side on which most pieces have the mark; `NONE` if they show none, as pieces of one character."""
    begins = sum(piece.startswith(mark) and not piece.endswith(mark) for piece in pieces)
    ends = sum(piece.endswith(mark) and not piece.startswith(mark) for piece in pieces)
    return END if ends > begins else BEGIN if begins else NONE


def word_begins(starts: NDArray[np.bool_], ends: NDArray[np.bool_], ids: NDArray) -> NDArray[np.bool_]:
    """Return whether a word begins at each place of `ids` `[…, seq]`: with its piece, or after one that ends a word.

    `starts` and `ends` are a tokenizer's `word_starts` and `word_ends`, `[vocab_size]`.
    """
    begins = starts[ids]
    if ends.any():
        begins[..., 1:] |= ends[ids[..., :-1]]
    return begins
