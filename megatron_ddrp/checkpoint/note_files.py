"""The note dictionary inside a checkpoint: tensors beside the model's, equal in every layout, not exported.

notes/words, notes/vectors     numbers of the words met so far, and their notes `[met, hidden]`
notes/hashes, notes/counts     hashes and counts of all rare words, see `RareWords`
notes/pieces, notes/ends       the rare words themselves, as pieces
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from megatron_ddrp.checkpoint.state import BESIDE
from megatron_ddrp.checkpoint.weights import StoredTensors
from megatron_ddrp.data.batches.rare_words import RareWords
from megatron_ddrp.errors import UserError
from megatron_ddrp.objectives.notes import NoteDictionary


def note_tensors(notes: NoteDictionary) -> dict[str, Tensor]:
    """Return the tensors of a dictionary that a checkpoint stores."""
    met, words = notes.met.nonzero().squeeze(-1), notes.words
    return {
        "notes/words": met + 1,
        "notes/vectors": notes.notes[met],
        "notes/hashes": torch.from_numpy(words.hashes.view(np.int64)),
        "notes/counts": torch.from_numpy(words.counts),
        "notes/pieces": torch.from_numpy(words.pieces),
        "notes/ends": torch.from_numpy(words.ends),
    }


def read_notes(path: Path) -> tuple[RareWords, Tensor, Tensor]:
    """Return (all rare words, numbers of the words met `[met]`, their notes `[met, hidden]`) of a checkpoint."""
    stored = StoredTensors(path, BESIDE)
    if "notes/words" not in stored.names:
        raise UserError(f"{path} holds no notes: its run had no --notes; give a checkpoint of a run with --notes")
    hashes, counts, pieces, ends = (stored[f"notes/{name}"].numpy() for name in ("hashes", "counts", "pieces", "ends"))
    words = RareWords(hashes.view(np.uint64), counts, pieces, ends)
    return words, stored["notes/words"], stored["notes/vectors"]


def load_notes(notes: NoteDictionary, path: Path) -> None:
    """Fill a dictionary, converting to its `--notes-dtype`. Raise `UserError` if the checkpoint has other words."""
    words, met, vectors = read_notes(path)
    if not np.array_equal(words.hashes, notes.words.hashes) or vectors.shape[1] != notes.notes.shape[1]:
        raise UserError(
            f"{path} holds notes of {len(words):,} other words: resume with the data, --split, --notes-min-count and "
            "--notes-max-count of the run that wrote it"
        )
    notes.notes[met - 1] = vectors.to(notes.notes.dtype)
    notes.met[met - 1] = True
