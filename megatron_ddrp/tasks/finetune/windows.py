"""Pieces of words and of answers, and windows over sentences and contexts that are too long for a row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from megatron_ddrp.data.tokenizers.tokenizer import Span, Tokenizer


class Window(NamedTuple):
    """Words of a sentence that share a row. Every word of the sentence is labelled in exactly one window."""

    begin: int
    """First word of the row."""
    end: int
    """End of the row's words, exclusive."""
    own_begin: int
    """First word that is labelled in this window; words before it are context."""
    own_end: int
    """End of the words that are labelled in this window, exclusive."""


def pieces_of_words(tokenizer: Tokenizer, words: Sequence[str]) -> list[list[int]]:
    """Join the words by blanks, tokenize the text, and return the pieces of each word.

    A piece for the blank before a word belongs to the word. A word without a piece, such as one of control characters,
    becomes [UNK].
    """
    lengths = np.array([len(word) + 1 for word in words])
    begins = np.cumsum(lengths) - lengths - 1  # character of the blank before each word, -1 for the first word
    ids, spans = tokenizer.encode_with_spans(" ".join(words))
    owners = np.searchsorted(begins, [begin for begin, _ in spans], side="right") - 1  # [pieces]
    pieces: list[list[int]] = [[] for _ in words]
    for piece, word in zip(ids, owners.tolist(), strict=True):
        pieces[word].append(piece)
    return [own or [tokenizer.unk_id] for own in pieces]


def windows_of(lengths: Sequence[int], room: int, overlap: int) -> list[Window]:
    """Cover the words by windows of at most `room` pieces; neighbours share words of at most `overlap` pieces.

    `lengths` has the number of pieces per word; a word of more than `room` pieces counts as `room`. The first half of
    the shared words is labelled in the earlier window, the second half in the later one, so that words have context on
    both sides. Without words there is no window.
    """
    sizes = np.minimum(np.asarray(lengths, dtype=np.int64), room)
    ends = np.cumsum([0, *sizes])  # number of pieces before each word
    windows: list[Window] = []
    begin = own_begin = 0
    while own_begin < len(sizes):
        end = int(np.searchsorted(ends, ends[begin] + room, side="right")) - 1  # of the words that fit
        if end == len(sizes):
            windows.append(Window(begin, end, own_begin, end))
            break
        budget = min(overlap, room - int(sizes[end]))
        shared = max(begin + 1, int(np.searchsorted(ends, ends[end] - budget)))  # windows advance
        own_end = (shared + end + 1) // 2
        windows.append(Window(begin, end, own_begin, own_end))
        begin, own_begin = shared, own_end
    return windows


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
