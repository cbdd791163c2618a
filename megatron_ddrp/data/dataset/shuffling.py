"""Shuffling of an indexed dataset: documents in a random order, so that `--split` divides each kind of text alike."""

from __future__ import annotations

import os
import time
from typing import Any

import numpy as np

import megatron_ddrp
from megatron_ddrp.data.atomic import AnyPath
from megatron_ddrp.data.dataset.dataset_index import dataset_path
from megatron_ddrp.data.dataset.indexed_dataset import IndexedDataset
from megatron_ddrp.data.dataset.manifest import refuse_existing
from megatron_ddrp.data.dataset.recorded_tokenizer import PATH, path_entry
from megatron_ddrp.data.dataset.unfinished import UnfinishedDatasets
from megatron_ddrp.data.dataset.verification import refuse_wrong_sums
from megatron_ddrp.data.progress import Advance, silent
from megatron_ddrp.data.randomness import permute
from megatron_ddrp.data.sealed import file_sha256

BLOCK = 1 << 16
"""Number of documents whose order is in memory at once."""


def shuffle(
    output_prefix: AnyPath, prefix: str, seed: int, overwrite: bool = False, advance: Advance = silent
) -> IndexedDataset:
    """Write the documents of a dataset in an order that `seed` decides, as a dataset that gets its name when complete.

    The sequences of a document stay together and in order. Calls `advance` with the bytes of .bin read since the last
    call; where there is a manifest they are read twice, first for their SHA-256. Raises `UserError` for a damaged
    dataset and for an output that exists.
    """
    output_prefix = os.fspath(dataset_path(output_prefix, ""))
    if not overwrite:
        refuse_existing([output_prefix])
    dataset = IndexedDataset(prefix)
    dataset.check()
    manifest = dataset.manifest
    if manifest is not None:
        sha256 = file_sha256(dataset_path(dataset.prefix, ".bin"), advance)
        refuse_wrong_sums(dataset.prefix, manifest, sha256)
    job = {"shuffle": prefix, "process": [os.getpid(), time.time()]}  # unique, so that a new shuffle starts over
    with UnfinishedDatasets(f"{output_prefix}.unfinished", [output_prefix], dataset.dtype, job) as output:
        for begin in range(0, dataset.num_documents, BLOCK):
            places = np.arange(begin, min(begin + BLOCK, dataset.num_documents))
            documents = permute(places, dataset.num_documents, seed, "shuffle of a dataset", 0)  # [at most BLOCK]
            firsts, lasts = dataset.document_indices[documents], dataset.document_indices[documents + 1]
            output.append(0, documents=lasts - firsts)
            for first, last in zip(firsts.tolist(), lasts.tolist(), strict=True):
                ids = b"".join(dataset[sequence].tobytes() for sequence in range(first, last))
                output.append(0, ids, dataset.sizes[first:last])
                advance(len(ids))
        output.publish([None if manifest is None else _shuffled(manifest, dataset.prefix, output_prefix, seed)])
    return IndexedDataset(output_prefix)


def _shuffled(manifest: dict[str, Any], prefix: str, output_prefix: str, seed: int) -> dict[str, Any]:
    """Return the manifest of a dataset with the seed as `shuffled`."""
    kept = {key: value for key, value in manifest.items() if key not in ("files", "partition", PATH)}
    return kept | {"shuffled": seed, "version": megatron_ddrp.__version__} | path_entry([prefix], output_prefix)
