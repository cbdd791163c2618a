"""Windows over the pieces of a context, and the pieces of an answer."""

from __future__ import annotations

import numpy as np

from megatron_ddrp.data.tokenizers.tokenizer import Span


def context_windows(pieces: int, room: int, overlap: int) -> list[Span]:
    """Return (first piece, end) of windows of at most `room` pieces; neighbours share `overlap` pieces.

    The end is exclusive. A context without pieces has one empty window. `overlap` must be less than `room`.
    """
    begins = range(0, max(1, pieces - overlap), room - overlap)
    return [(begin, min(begin + room, pieces)) for begin in begins]


def pieces_of_answer(spans: np.ndarray, begin: int, end: int) -> Span | None:
    """Return the first and the last piece, both inclusive, of characters `begin` to `end` (exclusive).

    `spans`, `[pieces, 2]`, comes from `Tokenizer.encode_with_spans`. Return None if no piece has one of the characters.
    """
    inside = np.flatnonzero((spans[:, 0] < end) & (spans[:, 1] > begin))
    return (int(inside[0]), int(inside[-1])) if len(inside) else None
