"""Several indexed datasets → one, in a stream: documents in the order of the inputs, the type as wide as the widest."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

import megatron_ddrp
from megatron_ddrp.data.dataset.dataset_index import MEND, dataset_path
from megatron_ddrp.data.dataset.indexed_dataset import IndexedDataset, IndexedDatasetWriter
from megatron_ddrp.data.dataset.verification import describe_tokenizer, wrong_sums
from megatron_ddrp.errors import UserError

COUNTS = ("empty_documents", "skipped", "unknown_tokens")
"""Manifest entries that add up and that the datasets themselves do not show; left out where a manifest lacks one."""


def merge(
    output_prefix: str | os.PathLike[str],
    prefixes: Sequence[str],
    overwrite: bool = False,
    advance: Callable[[int], object] = lambda size: None,
) -> IndexedDataset:
    """Write the documents of all inputs, one input after another, as one dataset; it appears when it is complete.

    Where every input has a manifest the output has one too. `advance` is told the bytes of .bin that were read. Raises
    `UserError` for damaged inputs, also for those that differ from the SHA-256 in their manifest, for inputs of
    different tokenizers, and for an output that exists.
    """
    if not overwrite:
        for suffix in (".bin", ".idx", ".json"):
            path = dataset_path(output_prefix, suffix)
            if path.exists():
                hint = "give --overwrite to replace it, or another --output-prefix"
                raise UserError(f"{path}: exists already; {hint}")
    datasets = [IndexedDataset(prefix) for prefix in prefixes]
    manifests = [dataset.manifest for dataset in datasets]
    _refuse_mixed_tokenizers(datasets, manifests)
    for dataset in datasets:
        dataset.check()
    dtype = np.result_type(*(dataset.dtype for dataset in datasets))
    with IndexedDatasetWriter(output_prefix, dtype) as writer:
        for dataset, manifest in zip(datasets, manifests, strict=True):
            _append(writer, dataset, manifest or {}, advance)
        known = [manifest for manifest in manifests if manifest is not None]
        writer.finalize(merged_manifest(known, datasets, dtype) if len(known) == len(datasets) else None)
    return IndexedDataset(output_prefix)


def _append(
    writer: IndexedDatasetWriter, dataset: IndexedDataset, manifest: dict[str, Any], advance: Callable[[int], object]
) -> None:
    """Append a dataset. Raises `UserError` where it is not what its manifest says: the sum would bless the damage."""
    digest = hashlib.sha256()

    def read(tokens: np.ndarray) -> None:
        digest.update(tokens.data)
        advance(tokens.nbytes)

    writer.append_dataset(dataset, read)
    for fault in wrong_sums(dataset.prefix, manifest, digest.hexdigest()):
        raise UserError(f"{fault}; {MEND}, and see where by tools/dataset.py verify")


def merged_manifest(
    manifests: Sequence[dict[str, Any]], datasets: Sequence[IndexedDataset], dtype: np.dtype
) -> dict[str, Any]:
    """Counts added up, inputs one after another, and whatever else all manifests agree on."""
    first, *others = manifests
    merged = {key: value for key, value in first.items() if all(other.get(key) == value for other in others)}
    for key in COUNTS:
        if all(isinstance(manifest.get(key), int) for manifest in manifests):
            merged[key] = sum(manifest[key] for manifest in manifests)
    merged["documents"] = sum(dataset.num_documents for dataset in datasets)
    merged["sequences"] = sum(map(len, datasets))
    merged["tokens"] = sum(dataset.num_tokens for dataset in datasets)
    inputs = [manifest.get("inputs") or [] for manifest in manifests]
    merged["inputs"] = [entry for entries in inputs if isinstance(entries, list) for entry in entries]
    merged["merged"] = [os.path.basename(dataset.prefix) for dataset in datasets]
    merged["dtype"] = dtype.name
    merged["version"] = megatron_ddrp.__version__
    return merged


def _refuse_mixed_tokenizers(datasets: Sequence[IndexedDataset], manifests: Sequence[dict[str, Any] | None]) -> None:
    first: tuple[str, dict[str, Any]] | None = None
    for dataset, manifest in zip(datasets, manifests, strict=True):
        made_by = (manifest or {}).get("tokenizer") or {}
        if made_by.get("fingerprint") is None:
            continue
        if first is None:
            first = dataset.prefix, made_by
        elif made_by["fingerprint"] != first[1]["fingerprint"]:
            raise UserError(
                f"{first[0]} was made by tokenizer {describe_tokenizer(first[1])}, but {dataset.prefix} by "
                f"{describe_tokenizer(made_by)}: the same id means different pieces; preprocess one of them again with "
                "the other's vocabulary"
            )
