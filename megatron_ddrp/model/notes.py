"""What the model does with notes of rare words (Taking Notes on the Fly, Wu et al., arXiv:2008.01466).

    input at a rare word's pieces:   (1 − λ)(token + position) + λ · NoteDict(w)
    note of an occurrence:           mean of the last hidden states from k tokens before the word to k after it

`objectives/notes.py` keeps the dictionary.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class NoteInputs(NamedTuple):
    """What a micro-batch reads from the dictionary, and where its new notes come from."""

    places: Tensor
    """int64 `[m]`: flat places `row · seq + column` of the pieces that read a note."""
    vectors: Tensor
    """fp32 `[m, hidden]`: the note of each."""
    windows: Tensor
    """int64 `[occurrences, 2]`: flat begin and end (exclusive) of each rare word's window."""


def blend(hidden: Tensor, places: Tensor, vectors: Tensor, mix: float) -> Tensor:
    """`hidden` `[batch, seq, hidden]` with (1 − mix)·x + mix·note at the flat `places` `[m]`; `vectors` `[m, hidden]`.

    As x + mix·(note − x), so that mix 0 changes no bit.
    """
    flat = hidden.flatten(0, 1)
    towards = mix * (vectors.to(hidden.dtype) - flat.index_select(0, places))
    return flat.index_add(0, places, towards).view_as(hidden)


def window_means(hidden: Tensor, windows: Tensor) -> Tensor:
    """The notes: `hidden` `[batch, seq, hidden]`, `windows` int64 `[n, 2]` → fp32 (or fp64) `[n, hidden]`, detached."""
    hidden = hidden.detach().flatten(0, 1)
    begin, end = windows[:, :1], windows[:, 1:]
    widest = int((end - begin).max()) if len(windows) else 0
    places = begin + torch.arange(widest, device=windows.device)  # [n, widest]
    inside = places < end
    states = hidden[places.clamp_max(len(hidden) - 1)]  # [n, widest, hidden]
    states = states if states.dtype.itemsize >= 4 else states.float()
    return (states * inside.unsqueeze(-1)).sum(1) / (end - begin)
