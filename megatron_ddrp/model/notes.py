"""Notes of rare words inside the model (Taking Notes on the Fly, Wu et al., arXiv:2008.01466).

    input at a rare word's pieces:   (1 − λ)(token + position) + λ · NoteDict(w)
    note of an occurrence:           mean of the last hidden states from k tokens before the word to k after it

`objectives/notes.py` keeps the dictionary.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class NoteInputs(NamedTuple):
    """Notes that a micro-batch reads, and the windows from which new notes are made."""

    places: Tensor
    """int64 `[m]`: flat places `row · seq + column` of the pieces that read a note."""
    vectors: Tensor
    """fp32 `[m, hidden]`: the note that each piece reads."""
    windows: Tensor
    """int64 `[occurrences, widest]`: flat places of the tokens in each rare word's window; −1 is filling."""


def blend(hidden: Tensor, places: Tensor, vectors: Tensor, mix: float) -> Tensor:
    """Return `hidden` `[batch, seq, hidden]` with (1 − mix)·x + mix·note at the flat `places` `[m]`.

    `vectors` `[m, hidden]` are the notes. Computed as x + mix·(note − x), so that mix = 0 changes no bit.
    """
    flat = hidden.flatten(0, 1)
    towards = mix * (vectors.to(hidden.dtype) - flat.index_select(0, places))
    return flat.index_add(0, places, towards).view_as(hidden)


def window_means(hidden: Tensor, windows: Tensor) -> Tensor:
    """Return new notes, fp32 (or fp64) `[n, hidden]`, detached: means of `hidden` `[batch, seq, hidden]` per window.

    `windows` int64 `[n, widest]`, see `NoteInputs`.
    """
    hidden, inside = hidden.detach().flatten(0, 1), windows >= 0
    states = hidden[windows.clamp_min(0)]  # [n, widest, hidden]
    states = states if states.dtype.itemsize >= 4 else states.float()
    return states.masked_fill(~inside.unsqueeze(-1), 0.0).sum(1) / inside.sum(1, keepdim=True)
