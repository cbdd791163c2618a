"""Slow twins of Taking Notes on the Fly (Wu et al., arXiv:2008.01466): the note, the dictionary's update, the input.

Everything is torch.float64. A word has any hashable name; an occurrence is where its pieces lie in one sequence.
"""

from __future__ import annotations

import torch
from torch import Tensor


def note(hidden: Tensor, first: int, last: int, k: int) -> Tensor:
    """Mean of the last hidden states from k tokens before the word `[first, last]` to k after it: `[seq, D]` → `[D]`.

    The window ends with the sequence, whose tokens alone `hidden` holds; the number of states in it divides.
    """
    total, count = torch.zeros_like(hidden[0]), 0
    for place in range(first - k, last + k + 1):
        if 0 <= place < len(hidden):
            total, count = total + hidden[place], count + 1
    return total / count


def update(dictionary: dict, notes: list[tuple], gamma: float) -> dict:
    """NoteDict(w) ← (1 − γ)·NoteDict(w) + γ·(mean of w's notes in the global batch); a first note enters unblended.

    `notes` are pairs (word, note) of all occurrences in the global batch.
    """
    updated = dict(dictionary)
    for word in {word for word, _ in notes}:
        own = [vector for name, vector in notes if name == word]
        total = torch.zeros_like(own[0])
        for vector in own:
            total = total + vector
        mean = total / len(own)
        updated[word] = (1 - gamma) * dictionary[word] + gamma * mean if word in dictionary else mean
    return updated


def mixed_input(embedded: Tensor, words: list, masked: list[bool], dictionary: dict, mix: float) -> Tensor:
    """(1 − λ)·(token + position) + λ·NoteDict(w) at the pieces of rare words, `[seq, D]`.

    `words` names the rare word that each token is a piece of, and its occurrence, as a pair, or None; no piece of an
    occurrence with any piece `masked` reads its note, and a word without a note reads none.
    """
    rows = []
    for place, vector in enumerate(embedded):
        reads = words[place] is not None and words[place][0] in dictionary
        for other, is_masked in enumerate(masked):
            if reads and is_masked and words[other] == words[place]:
                reads = False
        rows.append((1 - mix) * vector + mix * dictionary[words[place][0]] if reads else vector)
    return torch.stack(rows)
