"""Merging of indexed datasets into one, as a stream: documents in the order of the inputs, the widest id type.

Shuffling of an indexed dataset: documents in a random order, so that `--split` divides each kind of text alike.

Parts of one partitioned run (`preprocess --partition I/N`): known by their manifests, complete, and in order.

A merge of all parts gives the bytes of one run over the whole input. So a missing, repeated or foreign part is an
error, and so are parts between which an input file changed.
"""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

import megatron_ddrp
from megatron_ddrp.data.atomic import Advance, AnyPath, file_sha256, silent
from megatron_ddrp.data.dataset.dataset_index import CHUNK, dataset_path
from megatron_ddrp.data.dataset.indexed_dataset import (
    PATH,
    IndexedDataset,
    Job,
    UnfinishedDatasets,
    entry,
    finish_left,
    job_of,
    path_entry,
    refuse_existing,
    tokenizer_name,
)
from megatron_ddrp.data.dataset.verification import refuse_wrong_sums
from megatron_ddrp.data.randomness import permute
from megatron_ddrp.errors import UserError, refusals_as_user_errors

COUNTS = ("empty_documents", "skipped", "unknown_tokens", "dropped_characters")
"""Manifest entries that are summed and that the datasets themselves do not show; dropped if a manifest lacks one."""


def merge(
    output_prefix: AnyPath, prefixes: Sequence[str], overwrite: bool = False, advance: Advance = silent
) -> IndexedDataset:
    """Write the documents of all inputs, one input after another, as one dataset, which gets its name when complete.

    The parts of a partitioned run are put in order and give the bytes of one run over the whole input.
    Where every input has a manifest the output has one too. Calls `advance` with the bytes of .bin read since the last
    call. Raises `UserError` for damaged inputs, also for those that differ from the SHA-256 in their manifest, for
    inputs of different tokenizers or of which only some have --append-eod, for an input that is given twice, for parts
    that are not one whole run, and for an output that exists.
    """
    output_prefix = os.fspath(dataset_path(output_prefix, ""))
    folder, job = f"{output_prefix}.unfinished", _job("merge", list(prefixes), prefixes, output_prefix)
    if finish_left(folder, [output_prefix], job):
        return IndexedDataset(output_prefix)
    if not overwrite:
        refuse_existing([output_prefix])
    datasets = [IndexedDataset(prefix) for prefix in prefixes]
    manifests = [dataset.manifest for dataset in datasets]
    _refuse_mixed_tokenizers(datasets, manifests)
    order = order_of_parts([dataset.prefix for dataset in datasets], manifests)
    _refuse_repeated([dataset.prefix for dataset in datasets])
    _refuse_mixed_ends(datasets)
    if order is not None:
        datasets, manifests = [datasets[number] for number in order], [manifests[number] for number in order]
        if not any(dataset.num_tokens for dataset in datasets):
            raise UserError(f"no text in any of the {len(datasets)} parts; preprocess files that hold some")
    for dataset in datasets:
        dataset.check()
    dtype = np.result_type(*(dataset.dtype for dataset in datasets))
    with refusals_as_user_errors(folder), UnfinishedDatasets(folder, [output_prefix], dtype, job) as output:
        for dataset, manifest in zip(datasets, manifests, strict=True):
            _append(output, dataset, manifest or {}, advance)
        known = [manifest for manifest in manifests if manifest is not None]
        merged = None
        if len(known) == len(datasets):
            merged = merge_manifests(known, datasets, dtype) | path_entry(prefixes, output_prefix)
        output.publish([merged])
    return IndexedDataset(output_prefix)


def _job(name: str, settings: list[Any], prefixes: Sequence[str], output_prefix: str) -> Job:
    """Return the job of a command that reads some datasets, of which the output may replace one."""
    files = [dataset_path(prefix, ".bin") for prefix in prefixes]
    own = os.path.realpath(dataset_path(output_prefix, ".bin"))
    return job_of(name, settings, [file for file in files if os.path.realpath(file) != own])


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


def merge_manifests(
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
        return merged | {"inputs": join_inputs(manifests)}
    inputs = [manifest.get("inputs") or [] for manifest in manifests]
    return merged | {
        "inputs": [file for files in inputs if isinstance(files, list) for file in files],
        "merged": [os.path.basename(dataset.prefix) for dataset in datasets],
    }


def _refuse_repeated(prefixes: Sequence[str]) -> None:
    files = [os.path.realpath(dataset_path(prefix, ".bin")) for prefix in prefixes]
    counts = Counter(files)
    for prefix, file in zip(prefixes, files, strict=True):
        if (count := counts[file]) > 1:
            raise UserError(f"{prefix} is given {count} times; name each dataset once (its .idx, not its .bin too)")


def _refuse_mixed_ends(datasets: Sequence[IndexedDataset]) -> None:
    first = datasets[0]
    for other in datasets:
        if other.closing_tokens != first.closing_tokens:
            closed, plain = (first, other) if first.closing_tokens else (other, first)
            raise UserError(
                f"{closed.prefix} was made with --append-eod, but {plain.prefix} without it, or no manifest says so; "
                "preprocess one of them again, or give both to --data-path as they are"
            )


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
    folder, job = f"{output_prefix}.unfinished", _job("shuffle", [prefix, seed], [prefix], output_prefix)
    if finish_left(folder, [output_prefix], job):
        return IndexedDataset(output_prefix)
    if not overwrite:
        refuse_existing([output_prefix])
    dataset = IndexedDataset(prefix)
    dataset.check()
    manifest = dataset.manifest
    if manifest is not None:
        sha256 = file_sha256(dataset_path(dataset.prefix, ".bin"), advance)
        refuse_wrong_sums(dataset.prefix, manifest, sha256)
    with refusals_as_user_errors(folder), UnfinishedDatasets(folder, [output_prefix], dataset.dtype, job) as output:
        for begin in range(0, dataset.num_documents, BLOCK):
            places = np.arange(begin, min(begin + BLOCK, dataset.num_documents))
            documents = permute(places, dataset.num_documents, seed, "shuffle of a dataset", 0)  # [at most BLOCK]
            firsts, lasts = dataset.document_indices[documents], dataset.document_indices[documents + 1]
            output.append(0, documents=lasts - firsts)
            for first, last in zip(firsts.tolist(), lasts.tolist(), strict=True):
                ids = b"".join(dataset[sequence].tobytes() for sequence in range(first, last))
                output.append(0, ids, dataset.sizes[first:last])
                advance(len(ids))
        output.publish([None if manifest is None else _with_seed(manifest, dataset.prefix, output_prefix, seed)])
    return IndexedDataset(output_prefix)


def _with_seed(manifest: dict[str, Any], prefix: str, output_prefix: str, seed: int) -> dict[str, Any]:
    """Return the manifest of a dataset with the seed as `shuffled`."""
    kept = {key: value for key, value in manifest.items() if key not in ("files", "partition", PATH)}
    return kept | {"shuffled": seed, "version": megatron_ddrp.__version__} | path_entry([prefix], output_prefix)


SAME = ("json_key", "append_eod", "sentence_splitter")
"""Manifest entries on which all parts must agree, beside the tokenizer."""

Manifest = Mapping[str, Any]


def order_of_parts(prefixes: Sequence[str], manifests: Sequence[Manifest | None]) -> list[int] | None:
    """Return the numbers of the datasets in the order of their parts; None where none is a part.

    Raises `UserError` for datasets of which only some are parts, for parts of different runs, and for a part that is
    missing or there twice.
    """
    parts = [entry(manifest, "partition") for manifest in manifests]
    if not any(parts):
        return None
    first = next(number for number, part in enumerate(parts) if part)
    for number in range(len(parts)):
        if reason := _foreign(*((prefixes[k], parts[k], manifests[k] or {}) for k in (first, number))):
            raise UserError(reason)
    _refuse_incomplete(prefixes, parts)
    return sorted(range(len(prefixes)), key=lambda number: parts[number]["part"])


def _foreign(first: tuple[str, Manifest, Manifest], other: tuple[str, Manifest, Manifest]) -> str:
    """Return why two (prefix, entry `partition`, manifest) are not parts of one run; empty where they are."""
    (prefix, part, manifest), (other_prefix, other_part, other_manifest) = first, other
    is_part = f"{prefix} is part {part['part']} of {part['of']}, but {other_prefix}"
    if not other_part:
        return f"{is_part} is not a part of such a run; merge the parts first, then their result with this dataset"
    if part["of"] != other_part["of"]:
        return f"{is_part} part {other_part['part']} of {other_part['of']}; give the parts of one run"
    again = "preprocess one of them again"
    if part["inputs"] != other_part["inputs"]:
        return f"{prefix} and {other_prefix} were made from different input files, by their names or sizes; {again}"
    for key in SAME:
        if (value := manifest.get(key)) != (other_value := other_manifest.get(key)):
            return f"{prefix} was made with {key} {value}, but {other_prefix} with {other_value}; {again}"
    return ""


def _refuse_incomplete(prefixes: Sequence[str], parts: Sequence[Manifest]) -> None:
    of = parts[0]["of"]
    counts = Counter(part["part"] for part in parts)
    for number, count in sorted(counts.items()):
        if count > 1:
            twice = " and ".join(prefix for prefix, part in zip(prefixes, parts, strict=True) if part["part"] == number)
            raise UserError(f"part {number} of {of} is given {count} times, as {twice}; give it once")
    missing = [number for number in range(1, of + 1) if number not in counts]
    if missing:
        which = f"part {missing[0]} of {of} is" if len(missing) == 1 else f"parts {_few(missing)} of {of} are"
        again = f"megatron-ddrp preprocess … --partition {missing[0]}/{of}"
        raise UserError(f"{which} missing among the {len(parts)} given; add what exists, or make it: {again}")


def _few(numbers: Sequence[int]) -> str:
    shown = ", ".join(map(str, numbers[:8]))
    return f"{shown} and {len(numbers) - 8} more" if len(numbers) > 8 else shown


def join_inputs(manifests: Sequence[Manifest]) -> list[dict[str, Any]]:
    """Return the input files of all parts, in order, each once.

    A file that several parts have read carries their `ranges`, each with its SHA-256, instead of one SHA-256. Raises
    `UserError` where the ranges of a file do not meet: it changed between two parts.
    """
    joined: list[dict[str, Any]] = []
    for file in (file for manifest in manifests for file in manifest.get("inputs") or []):
        if "begin" not in file:
            joined.append(file)
            continue
        if file["begin"] == 0:
            joined.append({"name": file["name"], "bytes": file["bytes"], "ranges": []})
        ranges = joined[-1].get("ranges") if joined and joined[-1]["name"] == file["name"] else None
        if ranges is None or file["begin"] != (ranges[-1]["end"] if ranges else 0):
            raise _mismatch(file["name"])
        ranges.append({key: file[key] for key in ("begin", "end", "sha256")})
    for file in joined:
        if "ranges" in file and file["ranges"][-1]["end"] != file["bytes"]:
            raise _mismatch(file["name"])
    return joined


def _mismatch(name: str) -> UserError:
    return UserError(f"{name} changed between the parts: their ranges do not meet; preprocess all parts again")
