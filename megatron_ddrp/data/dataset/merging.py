"""Merging of indexed datasets into one, as a stream: documents in the order of the inputs, the widest id type."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

import megatron_ddrp
from megatron_ddrp.data.atomic import AnyPath
from megatron_ddrp.data.dataset.dataset_index import CHUNK, dataset_path
from megatron_ddrp.data.dataset.indexed_dataset import IndexedDataset
from megatron_ddrp.data.dataset.manifest import entry, refuse_existing, tokenizer_name
from megatron_ddrp.data.dataset.parts import joined_inputs, order_of_parts
from megatron_ddrp.data.dataset.recorded_tokenizer import PATH, path_entry
from megatron_ddrp.data.dataset.unfinished import UnfinishedDatasets
from megatron_ddrp.data.dataset.verification import refuse_wrong_sums
from megatron_ddrp.data.progress import Advance, silent
from megatron_ddrp.errors import UserError

COUNTS = ("empty_documents", "skipped", "unknown_tokens", "dropped_characters")
"""Manifest entries that are summed and that the datasets themselves do not show; dropped if a manifest lacks one."""


def merge(
    output_prefix: AnyPath, prefixes: Sequence[str], overwrite: bool = False, advance: Advance = silent
) -> IndexedDataset:
    """Write the documents of all inputs, one input after another, as one dataset, which gets its name when complete.

    The parts of a partitioned run are put in order and give the bytes of one run over the whole input.
    Where every input has a manifest the output has one too. Calls `advance` with the bytes of .bin read since the last
    call. Raises `UserError` for damaged inputs, also for those that differ from the SHA-256 in their manifest, for
    inputs of different tokenizers, for parts that are not one whole run, and for an output that exists.
    """
    output_prefix = os.fspath(dataset_path(output_prefix, ""))
    if not overwrite:
        refuse_existing([output_prefix])
    datasets = [IndexedDataset(prefix) for prefix in prefixes]
    manifests = [dataset.manifest for dataset in datasets]
    _refuse_mixed_tokenizers(datasets, manifests)
    order = order_of_parts([dataset.prefix for dataset in datasets], manifests)
    if order is not None:
        datasets, manifests = [datasets[number] for number in order], [manifests[number] for number in order]
        if not any(dataset.num_tokens for dataset in datasets):
            raise UserError(f"no text in any of the {len(datasets)} parts; preprocess files that hold some")
    for dataset in datasets:
        dataset.check()
    dtype = np.result_type(*(dataset.dtype for dataset in datasets))
    job = {"merge": list(prefixes), "process": [os.getpid(), time.time()]}  # unique, so that a new merge starts over
    with UnfinishedDatasets(f"{output_prefix}.unfinished", [output_prefix], dtype, job) as output:
        for dataset, manifest in zip(datasets, manifests, strict=True):
            _append(output, dataset, manifest or {}, advance)
        known = [manifest for manifest in manifests if manifest is not None]
        merged = None
        if len(known) == len(datasets):
            merged = merged_manifest(known, datasets, dtype) | path_entry(prefixes, output_prefix)
        output.publish([merged])
    return IndexedDataset(output_prefix)


def _append(output: UnfinishedDatasets, dataset: IndexedDataset, manifest: dict[str, Any], advance: Advance) -> None:
    """Append a dataset. Raises `UserError` if it differs from its manifest."""
    for begin in range(0, dataset.num_documents, CHUNK):
        output.append(0, documents=np.diff(dataset.document_indices[begin : begin + CHUNK + 1]))
    for begin in range(0, len(dataset), CHUNK):
        output.append(0, sizes=dataset.sizes[begin : begin + CHUNK])
    digest = hashlib.sha256()
    for tokens in dataset.chunks():
        output.append(0, tokens.astype(output.dtype, copy=False).tobytes())
        digest.update(tokens.data)
        advance(tokens.nbytes)
    refuse_wrong_sums(dataset.prefix, manifest, digest.hexdigest())


def merged_manifest(
    manifests: Sequence[dict[str, Any]], datasets: Sequence[IndexedDataset], dtype: np.dtype
) -> dict[str, Any]:
    """Return the merged manifest: summed counts, all inputs, and the other entries on which all manifests agree."""
    first, *others = manifests
    merged = {key: value for key, value in first.items() if all(other.get(key) == value for other in others)}
    for key in ("partition", PATH, *["shuffled"] * (len(manifests) > 1)):  # shuffled datasets one after another are not
        merged.pop(key, None)
    for key in COUNTS:
        if all(isinstance(manifest.get(key), int) for manifest in manifests):
            merged[key] = sum(manifest[key] for manifest in manifests)
    merged |= {
        "documents": sum(dataset.num_documents for dataset in datasets),
        "sequences": sum(map(len, datasets)),
        "tokens": sum(dataset.num_tokens for dataset in datasets),
        "dtype": dtype.name,
        "version": megatron_ddrp.__version__,
    }
    if "partition" in first:  # then all are parts of one run, whose manifest this is
        return merged | {"inputs": joined_inputs(manifests)}
    inputs = [manifest.get("inputs") or [] for manifest in manifests]
    return merged | {
        "inputs": [file for files in inputs if isinstance(files, list) for file in files],
        "merged": [os.path.basename(dataset.prefix) for dataset in datasets],
    }


def _refuse_mixed_tokenizers(datasets: Sequence[IndexedDataset], manifests: Sequence[dict[str, Any] | None]) -> None:
    made_by = [
        (dataset.prefix, entry(manifest, "tokenizer")) for dataset, manifest in zip(datasets, manifests, strict=True)
    ]
    recorded = [(prefix, by) for prefix, by in made_by if by.get("fingerprint") is not None]
    for prefix, by in recorded:
        first_prefix, first = recorded[0]
        if by["fingerprint"] != first["fingerprint"]:
            raise UserError(
                f"{first_prefix} was made by tokenizer {tokenizer_name(first)}, but {prefix} by "
                f"{tokenizer_name(by)}: the same id means different pieces; preprocess one of them again with the "
                "other's vocabulary"
            )
