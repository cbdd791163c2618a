"""Masked rows, one per scored piece. [CLS] and [SEP] are never scored.

    pll         log p(w_t | sentence without w_t)             Salazar et al., arXiv:1910.14659, equations 1 and 2
    l2r         log p(w_t | … without w_t and the later pieces of its word)     Kauf and Ivanova, arXiv:2305.10588
    whole-word  log p(w_t | … without any piece of its word)                    Kauf and Ivanova, arXiv:2305.10588

The score of a sentence is the sum over its pieces. `word_begins` finds the words: they begin at WordPiece's pieces
without ##, at SentencePiece's ▁ and at byte-level BPE's Ġ, or after a piece that ends a word. Departure: Kauf and
Ivanova split words by the library's pre-tokenizer, which separates punctuation. WordPiece does so too, but with ▁ and Ġ
a full stop belongs to the word before it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from megatron_ddrp.data.tokenizers.spelling import word_begins
from megatron_ddrp.data.tokenizers.tokenizer import Tokenizer

SCORES = {
    "l2r": "to score a piece, mask it and the later pieces of its word",
    "pll": "to score a piece, mask only this piece",
    "whole-word": "to score a piece, mask its whole word",
}
"""Name of a score → its explanation."""
MOST_LOGITS = 2**28
"""Largest number of logits of a batch, 1 GiB in fp32. With a large vocabulary it limits the rows of a batch."""


class MaskedRows(NamedTuple):
    """Masked rows of one length, without padding."""

    sentences: np.ndarray
    """Number of the sentence, int64 `[rows]`."""
    ids: np.ndarray
    """[CLS], the sentence with masks, and [SEP], int64 `[rows, length]`."""
    places: np.ndarray
    """Place of the scored piece, which is masked, int64 `[rows]`."""
    targets: np.ndarray
    """Id of the scored piece, int64 `[rows]`."""


def masked_rows(
    sentences: Sequence[Sequence[int]], tokenizer: Tokenizer, score: str, budget: int
) -> Iterator[MaskedRows]:
    """Yield batches of at most `budget` tokens with one row per piece of each sentence, the longest rows first.

    All rows of a batch have one length, so that there is no padding. A batch has at least one row.
    """
    most_rows = MOST_LOGITS // len(tokenizer.pieces)
    lengths: dict[int, list[int]] = defaultdict(list)
    for number, pieces in enumerate(sentences):
        lengths[len(pieces)].append(number)
    for count in sorted(lengths, reverse=True):
        members = np.array(lengths[count])
        rows = [tokenizer.rows.row([sentences[i]]) for i in members]
        table, first = np.array([ids for ids, _, _ in rows]), rows[0][2][0]  # [members, length]
        words = _word_numbers(table, tokenizer, first)
        size = max(1, min(budget // table.shape[1], most_rows))
        for start in range(0, len(members) * count, size):
            flat = np.arange(start, min(start + size, len(members) * count))
            which, places = flat // count, flat % count + first
            ids = table[which]  # [rows, length], a copy
            targets = ids[np.arange(len(ids)), places]
            ids[_masked(words[which], places, score)] = tokenizer.mask_id
            yield MaskedRows(members[which], ids, places, targets)


def _word_numbers(table: np.ndarray, tokenizer: Tokenizer, first: int) -> np.ndarray:
    """Return the word number of each place for ids `[rows, length]`. A sentence's `first` piece begins a word."""
    starts = word_begins(tokenizer.word_starts, tokenizer.word_ends, table)
    starts[:, first] = True
    return starts.cumsum(axis=1)


def _masked(words: np.ndarray, places: np.ndarray, score: str) -> np.ndarray:
    """Return whether each place is masked when `places`, `[rows]`, are scored, bool `[rows, length]`."""
    columns, scored = np.arange(words.shape[1]), places[:, None]
    if score == "pll":
        return columns == scored
    same_word = words == np.take_along_axis(words, scored, axis=1)
    return same_word if score == "whole-word" else same_word & (columns >= scored)
