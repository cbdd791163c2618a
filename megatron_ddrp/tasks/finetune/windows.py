"""Contexts of questions: windows over their pieces, and the pieces of an answer."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_ddrp.data.tokenizers.tokenizer import Span


def context_windows(pieces: int, room: int, overlap: int) -> list[Span]:
    """Return (first piece, the one behind the last) of windows of at most `room` pieces; neighbours share `overlap`.

    A context without pieces has one empty window. `overlap` must be below `room`.
    """
    begins = range(0, max(1, pieces - overlap), room - overlap)
    return [(begin, min(begin + room, pieces)) for begin in begins]


def pieces_of_answer(spans: Sequence[Span], begin: int, end: int) -> Span | None:
    """Return the first and the last piece, both included, that hold characters `begin` to `end` (excluded).

    `spans` are those of `Tokenizer.encode_with_spans`. None where no piece has one of these characters.
    """
    inside = [number for number, span in enumerate(spans) if span[0] < end and span[1] > begin]
    return (inside[0], inside[-1]) if inside else None
