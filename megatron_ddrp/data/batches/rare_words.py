"""Rare words of a corpus, for Taking Notes on the Fly (Wu et al., arXiv:2008.01466), and their places in a batch.

A word is the piece that starts it and the pieces that continue it, as in whole-word masking, in every vocabulary;
single pieces are not counted. A special piece, such as [UNK], belongs to no word and ends the word before it. Words are
identified by a 64-bit hash of their pieces, so a look-up is a binary search.

A word that a sample's end cuts in two is not found: its first half may be another word.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_ddrp.data.batches.batch import IGNORED_LABEL, Batch
from megatron_ddrp.data.randomness import fold_in, hash_uint64
from megatron_ddrp.data.tokenizers.tokenizer import Tokenizer


@dataclass(frozen=True)
class RareWords:
    """Rare words of a corpus. Word number i, from 1, has row i − 1 in every table; 0 means no word."""

    hashes: NDArray[np.uint64]
    """Hashes `[words]`, ascending."""
    counts: NDArray[np.int64]
    """Occurrences of each word in the corpus, `[words]`."""
    pieces: NDArray[np.int64]
    """Piece ids of all words, one word after another."""
    ends: NDArray[np.int64]
    """End of each word in `pieces`, `[words]`."""

    def __len__(self) -> int:
        return len(self.hashes)

    def word(self, number: int) -> list[int]:
        """Return the piece ids of word `number`, from 1."""
        begin = int(self.ends[number - 2]) if number > 1 else 0
        return self.pieces[begin : int(self.ends[number - 1])].tolist()

    def find(self, hashes: NDArray[np.uint64]) -> NDArray[np.int64]:
        """Return the number of each word by its hash, 0 if it is not rare, in the shape of `hashes`."""
        if not len(self):
            return np.zeros(hashes.shape, np.int64)
        row = np.searchsorted(self.hashes, hashes)
        found = self.hashes[np.minimum(row, len(self) - 1)] == hashes
        return np.where(found, row + 1, 0)


class WordFinder:
    """Finder of whole words in rows of piece ids.

    The tokenizer's special pieces are in no word. Its `word_ends` are False everywhere in a vocabulary that does not
    mark the ends of words.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.vocab_size = len(tokenizer.word_starts)
        self._ordinary = np.ones(self.vocab_size, bool)
        self._ordinary[tokenizer.special_ids] = False
        self._starts = tokenizer.word_starts & self._ordinary
        self._ends = tokenizer.word_ends if tokenizer.word_ends.any() else None
        self._keys = hash_uint64(0, "word-piece", np.arange(self.vocab_size))  # [vocab]

    def words(self, ids: NDArray[Any], row_begins: NDArray[np.bool_]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return first place and size of each whole word of flat `ids` `[tokens]`; `row_begins` marks begins of rows.

        Skips words that begin with a continuation piece, or, where the ends of words are marked, those without an end
        before them or at their own last piece. Skips special pieces, which end the word before them.
        """
        ordinary = self._ordinary[ids]
        boundary = row_begins | self._starts[ids] | ~ordinary
        boundary[1:] |= ~ordinary[:-1]
        begins = self._starts[ids]
        if self._ends is not None:
            ends = self._ends[ids]
            begins = row_begins & ordinary
            begins[1:] |= ends[:-1] & ordinary[1:]
            boundary |= begins
        first = np.flatnonzero(boundary)
        sizes = np.diff(first, append=len(ids))
        whole = begins[first]
        if self._ends is not None:
            whole &= ends[first + sizes - 1]
        return first[whole], sizes[whole]

    def hashes(self, ids: NDArray[Any], first: NDArray[np.int64], sizes: NDArray[np.int64]) -> NDArray[np.uint64]:
        """Return the hash of each word of flat `ids`; `first`, `sizes` `[words]`."""
        hashes = self._keys[ids[first]]
        for place in range(1, int(sizes.max(initial=1))):  # fold in the second piece of each word, then the third, …
            longer = np.flatnonzero(sizes > place)
            hashes[longer] = fold_in(hashes[longer], ids[first[longer] + place])
        return hashes

    def number(self, rare: RareWords, input_ids: NDArray[np.int64], whole_rows: NDArray[np.bool_]) -> NDArray[np.int64]:
        """Return `note_ids` for unmasked rows `[rows, seq]`: w at the first piece of rare word w, −w at its others.

        `whole_rows` `[rows]` is False if the text continues after the row's [SEP]: the last word may be cut in two.
        """
        begins = np.zeros(input_ids.shape, bool)
        begins[:, :1] = True
        flat = input_ids.ravel()
        first, sizes = self.words(flat, begins.ravel())
        numbers = rare.find(self.hashes(flat, first, sizes))
        rows, columns = np.divmod(first + sizes, input_ids.shape[1])
        uncut = whole_rows[np.minimum(rows, len(whole_rows) - 1)] | (columns != input_ids.shape[1] - 1)
        chosen = (numbers > 0) & uncut
        note_ids = np.zeros_like(flat)
        first, sizes, numbers = first[chosen], sizes[chosen], numbers[chosen]
        for place in range(int(sizes.max(initial=0))):
            longer = sizes > place
            note_ids[first[longer] + place] = numbers[longer] if place == 0 else -numbers[longer]
        return note_ids.reshape(input_ids.shape)


@dataclass(frozen=True)
class Occurrences:
    """Occurrences of rare words in a micro-batch, `n` in total; places are flat, row · seq + column."""

    words: NDArray[np.int64]
    """`[n]`."""
    sequence_ids: NDArray[np.int64]
    """Sample of each occurrence `[n]`, see `Batch`; with `position_ids` it identifies the occurrence."""
    position_ids: NDArray[np.int64]
    """Position of the word's first piece, `[n]`."""
    windows: NDArray[np.int64]
    """Begin and end (exclusive) of the tokens whose states make the note, inside the word's document, `[n, 2]`."""
    read_places: NDArray[np.int64]
    """Pieces that may read a note, those of words without a predicted piece, `[m]`."""
    read_words: NDArray[np.int64]
    """Word of each of these pieces, `[m]`."""


def find_occurrences(batch: Batch, window: int) -> Occurrences:
    """Return the occurrences that `note_ids` marks in a batch `[batch, seq]`, with `window` tokens on either side."""
    notes, labels, documents = (
        np.asarray(field).ravel() for field in (batch.note_ids, batch.labels, batch.document_ids)
    )
    first = np.flatnonzero(notes > 0)  # [n]
    in_word = notes != 0
    occurrence = np.cumsum(notes > 0) - 1  # of each place in a word
    sizes = np.bincount(occurrence[in_word], minlength=len(first))
    predicted = np.bincount(occurrence[in_word & (labels != IGNORED_LABEL)], minlength=len(first)) > 0
    rows = np.arange(len(notes)) // batch.note_ids.shape[1]
    changes = (np.diff(documents) != 0) | (np.diff(rows) != 0)
    bounds = np.concatenate([[0], np.flatnonzero(changes) + 1, [len(notes)]])  # of documents and rows
    document = np.searchsorted(bounds, first, side="right")  # [n]
    begin = np.maximum(first - window, bounds[document - 1])
    end = np.minimum(first + sizes + window, bounds[np.minimum(document, len(bounds) - 1)])
    read_places = np.flatnonzero(in_word)
    read_places = read_places[~predicted[occurrence[read_places]]]
    return Occurrences(
        words=notes[first],
        sequence_ids=batch.sequence_ids.ravel()[first],
        position_ids=batch.position_ids.ravel()[first],
        windows=np.stack([begin, end], axis=1).astype(np.int64),
        read_places=read_places,
        read_words=np.abs(notes[read_places]),
    )
