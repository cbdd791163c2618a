"""Contexts of questions: windows over their pieces, and the pieces of an answer."""

from __future__ import annotations

import numpy as np

from megatron_ddrp.data.tokenizers.tokenizer import Span


def context_windows(pieces: int, room: int, overlap: int) -> list[Span]:
    """Return (first piece, the one behind the last) of windows of at most `room` pieces; neighbours share `overlap`.

    A context without pieces has one empty window. `overlap` must be below `room`.
    """
    begins = range(0, max(1, pieces - overlap), room - overlap)
    return [(begin, min(begin + room, pieces)) for begin in begins]


def pieces_of_answer(spans: np.ndarray, begin: int, end: int) -> Span | None:
    """Return the first and the last piece, both included, that hold characters `begin` to `end` (excluded).

    `spans` `[pieces, 2]` are those of `Tokenizer.encode_with_spans`. None where no piece has one of these characters.
    """
    inside = np.flatnonzero((spans[:, 0] < end) & (spans[:, 1] > begin))
    return (int(inside[0]), int(inside[-1])) if len(inside) else None
