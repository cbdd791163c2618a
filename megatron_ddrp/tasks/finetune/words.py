"""Sentences that come as words: the pieces of each word, and windows over sentences that are too long for a row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from megatron_ddrp.data.tokenizers.tokenizer import Tokenizer


class Window(NamedTuple):
    """Some words of a sentence that share a row. Every word belongs to one window, in which it is labelled."""

    begin: int
    """First word of the row."""
    end: int
    """The word behind the row's last one."""
    own_begin: int
    """First word that is labelled here; those before it are context."""
    own_end: int
    """The word behind the last one that is labelled here."""


def pieces_of_words(tokenizer: Tokenizer, words: Sequence[str]) -> list[list[int]]:
    """Return the pieces of each word in the text that the words make with blanks between them.

    A piece of the blank before a word is the word's. A word without a piece, such as one of control characters, is
    [UNK].
    """
    lengths = np.array([len(word) + 1 for word in words])
    begins = np.cumsum(lengths) - lengths - 1  # each word's blank; -1 stands before the first word
    ids, spans = tokenizer.encode_with_spans(" ".join(words))
    owners = np.searchsorted(begins, [begin for begin, _ in spans], side="right") - 1  # [pieces]
    pieces: list[list[int]] = [[] for _ in words]
    for piece, word in zip(ids, owners.tolist(), strict=True):
        pieces[word].append(piece)
    return [own or [tokenizer.unk_id] for own in pieces]


def windows_of(lengths: Sequence[int], room: int, overlap: int) -> list[Window]:
    """Cover words of so many pieces by windows of at most `room` pieces, of which neighbours share about `overlap`.

    Of the words in two windows the first half is labelled in the former one, the second half in the latter, so that
    every word has context on both sides. A word of more than `room` pieces counts as `room`. Empty without words.
    """
    sizes = [min(length, room) for length in lengths]
    windows: list[Window] = []
    begin = own_begin = 0
    while own_begin < len(sizes):
        end = _last_that_fits(sizes, begin, room)
        if end == len(sizes):
            windows.append(Window(begin, end, own_begin, end))
            break
        shared = _first_shared(sizes, begin, end, min(overlap, room - sizes[end]))
        own_end = (shared + end + 1) // 2
        windows.append(Window(begin, end, own_begin, own_end))
        begin, own_begin = shared, own_end
    return windows


def _last_that_fits(sizes: Sequence[int], begin: int, room: int) -> int:
    """Return the word behind the last one that fits into a window from `begin` on."""
    end, used = begin, 0
    while end < len(sizes) and used + sizes[end] <= room:
        used += sizes[end]
        end += 1
    return end


def _first_shared(sizes: Sequence[int], begin: int, end: int, budget: int) -> int:
    """Return the first word of the next window: the last words before `end` in at most `budget` pieces, but not all."""
    first = end
    while first - 1 > begin and budget >= sizes[first - 1]:
        first -= 1
        budget -= sizes[first]
    return first
