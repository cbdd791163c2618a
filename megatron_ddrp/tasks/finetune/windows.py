"""Pieces of words and of answers, and windows over sentences and contexts that are too long for a row."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from megatron_ddrp.data.tokenizers.tokenizer import Span, Tokenizer

ZERO_WIDTH_JOINER = "\u200d"


def _characters(*ranges: str) -> frozenset[str]:
    """Return the characters of some ranges, each given by its first and last character."""
    return frozenset(chr(code) for ends in ranges for code in range(ord(ends[0]), ord(ends[1]) + 1))


_JOINING = _characters(
    *("\u200c\u200d", "\u1160\u11ff", "\ud7b0\ud7fb", "\uff9e\uff9f", "\U0001f3fb\U0001f3ff", "\U000e0020\U000e007f")
)
"""Characters other than marks that belong to the one before: joiners, Jamo, voicing, skin tones, tags of flags."""
_PREPENDED = _characters(
    *("\u0600\u0605", "\u06dd\u06dd", "\u070f\u070f", "\u0890\u0891", "\u08e2\u08e2", "\U000110bd\U000110bd"),
    "\U000110cd\U000110cd",
)
"""Format characters that belong to the one behind, such as Arabic's number sign."""


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


def text_of_pieces(context: str, spans: np.ndarray, first: int, last: int) -> str:
    """Return the text from a row's piece `first` to `last`, with whole characters as readers see them.

    Some tokenizers drop marks, or compose them with the letter before, so that they belong to no piece. The text keeps
    them, by the rules of extended grapheme clusters (Unicode Standard Annex 29), up to the neighbouring pieces.
    """
    begin, end = int(spans[first, 0]), int(spans[last, 1])
    before = spans[:first, 1]
    after = spans[last + 1 :, 0]
    lowest = before[before <= begin].max(initial=0)
    highest = after[after >= end].min(initial=len(context))
    while end < highest and (unicodedata.category(context[end])[0] == "M" or context[end] in _JOINING):
        end += 1
    if end == highest < len(context) and context[end - 1] == ZERO_WIDTH_JOINER:  # the pieces separate the cluster
        end -= 1
    while begin > lowest and context[begin - 1] in _PREPENDED:
        begin -= 1
    return context[begin:end].strip()
