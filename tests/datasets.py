"""Small indexed datasets, written from lists of ids."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from megatron_ddrp.data import IndexedDataset
from megatron_ddrp.data.dataset.unfinished import UnfinishedDatasets


def write_dataset(prefix: Any, documents: Sequence, dtype: Any = np.uint16, manifest: Any = None) -> IndexedDataset:
    """Write documents of sequences of ids, and return the dataset."""
    sequences = [np.asarray(sequence, dtype) for document in documents for sequence in document]
    ids = b"".join(sequence.tobytes() for sequence in sequences)
    sizes, lengths = np.array([*map(len, sequences)], int), np.array([*map(len, documents)], int)
    with UnfinishedDatasets(f"{prefix}.unfinished", [str(prefix)], np.dtype(dtype), {}) as output:
        output.append(0, ids, sizes, lengths)
        output.publish([manifest])
    return IndexedDataset(prefix)
