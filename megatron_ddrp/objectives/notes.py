"""Taking Notes on the Fly (Wu et al., arXiv:2008.01466): a dictionary of contexts for rare words.

    input at a rare word's pieces:   (1 − λ)(token + position) + λ · NoteDict(w)
    note of an occurrence:           mean of the last hidden states from k tokens before the word to k after it
    after the step:                  NoteDict(w) ← (1 − γ) NoteDict(w) + γ · (mean note of w in the global batch)

Departure: a word's first note is stored unblended, and before it λ acts as 0. Random
vectors, blended from the first note on, would put noise into the input.

Where the paper is silent: a window ends with its sequence, including [CLS] and [SEP], and the mean divides by the true
number of tokens. A note is read only if no piece of its word is selected for masking, since the note would reveal the
label. Under ELECTRA the discriminator's hidden states make the notes; generator and discriminator read them at the same
places. No gradient enters a note.

The dictionary is in host memory, not on a GPU and not among the parameters, because a step uses only a few hundred of
its rows. Every process holds the same copy, because every process applies the same update.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from megatron_ddrp.config import ObjectiveConfig
from megatron_ddrp.data.batches.batch import Batch
from megatron_ddrp.data.batches.rare_words import Occurrences, RareWords, find_occurrences
from megatron_ddrp.model.stages import DTYPES, NoteInputs


def window_places(windows: np.ndarray) -> np.ndarray:
    """Return `NoteInputs.windows`, int64 `[n, widest]`, from the begin and end of each window, int64 `[n, 2]`."""
    begin, end = windows[:, :1], windows[:, 1:]
    places = begin + np.arange((end - begin).max(initial=0))
    return np.where(places < end, places, -1)


class NoteDictionary:
    """Notes of rare words, in host memory; `objective` gives λ, γ, k and the dtype.

    Attributes:
        words: the rare words, numbered from 1.
        notes: `[words, hidden]` in the chosen dtype; rows of words not met yet are 0 and take no memory.
        met: bool `[words]`, True for words that have a note.
    """

    def __init__(self, words: RareWords, hidden_size: int, objective: ObjectiveConfig) -> None:
        self.words = words
        self.notes = torch.zeros(len(words), hidden_size, dtype=DTYPES[objective.notes_dtype])
        self.met = torch.zeros(len(words), dtype=torch.bool)
        self.decay, self.window = objective.notes_decay, objective.notes_window

    @property
    def size_bytes(self) -> int:
        """Memory of the notes when every word has been met."""
        return self.notes.nbytes

    def inputs(self, batch: Batch) -> tuple[NoteInputs, Occurrences]:
        """Return the model's note inputs for a micro-batch of numpy arrays, and the occurrences for new notes."""
        found = find_occurrences(batch, self.window)
        words = torch.from_numpy(found.read_words) - 1  # [m]
        known = self.met[words]
        places = torch.from_numpy(found.read_places)[known]
        vectors = self.notes[words[known]].float()
        return NoteInputs(places, vectors, torch.from_numpy(window_places(found.windows))), found

    def update(self, occurrences: np.ndarray, notes: np.ndarray | Tensor) -> None:
        """Add all notes `[n, hidden]` of a global batch; `occurrences` int64 `[n, 3]`: word, sequence, position.

        Rows may come in any order: they are sorted by (word, sequence, position) and summed in double precision, so
        every layout gets the same dictionary. Notes that are not finite, from a step that overflowed, are left out.
        """
        notes = torch.as_tensor(notes)
        finite = np.flatnonzero(notes.isfinite().all(-1).numpy())
        if not len(finite):
            return
        order = finite[np.lexsort(occurrences[finite, ::-1].T)]
        unique, row = np.unique(occurrences[order, 0], return_inverse=True)
        sums = torch.zeros(len(unique), notes.shape[1], dtype=torch.float64)
        sums.index_add_(0, torch.from_numpy(row), notes[torch.from_numpy(order)].double())
        means = sums / torch.from_numpy(np.bincount(row)).unsqueeze(-1)
        index = torch.from_numpy(unique) - 1
        old = self.notes[index].double()
        share = torch.where(self.met[index], self.decay, 1.0).double().unsqueeze(-1)  # a first note enters whole
        self.notes[index] = ((1 - share) * old + share * means).to(self.notes.dtype)
        self.met[index] = True
