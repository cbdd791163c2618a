"""Indexed datasets made from others, as a stream: several merged into one, and one shuffled.

The parts of one partitioned run (`preprocess --partition I/N`) are known by their manifests.
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

    It has the widest id type of the inputs. The parts of a partitioned run are put in order and give the bytes of one
    run over the whole input. Where every input has a manifest the output has one too. Calls `advance` with the bytes of
    .bin read since the last call. Raises `UserError` for damaged inputs, also for those that differ from the SHA-256 in
    their manifest, for inputs of different tokenizers or of which only some have --append-eod, for an input that is
    given twice, for parts that are not one whole run, and for an output that exists.
    """
    output_prefix = os.fspath(dataset_path(output_prefix, ""))
    folder, job = f"{output_prefix}.unfinished", _job("merge", list(prefixes), prefixes, output_prefix)
    if finish_left(folder, [output_prefix], job):
        return IndexedDataset(output_prefix)
    if not overwrite:
        refuse_existing([output_prefix])
    datasets = [IndexedDataset(prefix) for prefix in prefixes]
    _refuse_mixed_tokenizers(datasets)
    ordered = in_order_of_parts(datasets)
    _refuse_repeated(datasets)
    _refuse_mixed_ends(datasets)
    if ordered is not None:
        datasets = ordered
        if not any(dataset.num_tokens for dataset in datasets):
            raise UserError(f"no text in any of the {len(datasets)} parts; preprocess files that hold some")
    for dataset in datasets:
        dataset.check()
    dtype = np.result_type(*(dataset.dtype for dataset in datasets))
    with refusals_as_user_errors(folder), UnfinishedDatasets(folder, [output_prefix], dtype, job) as output:
        for dataset in datasets:
            _append(output, dataset, advance)
        merged = None
        if all(dataset.manifest is not None for dataset in datasets):
            merged = merge_manifests(datasets, dtype) | path_entry(prefixes, output_prefix)
        output.publish([merged])
    return IndexedDataset(output_prefix)


def _job(name: str, settings: list[Any], prefixes: Sequence[str], output_prefix: str) -> Job:
    """Return the job of a command that reads some datasets, of which the output may replace one."""
    files = [dataset_path(prefix, ".bin") for prefix in prefixes]
    own = os.path.realpath(dataset_path(output_prefix, ".bin"))
    return job_of(name, settings, [file for file in files if os.path.realpath(file) != own])


def _append(output: UnfinishedDatasets, dataset: IndexedDataset, advance: Advance) -> None:
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
    refuse_wrong_sums(dataset.prefix, dataset.manifest, digest.hexdigest())


def merge_manifests(datasets: Sequence[IndexedDataset], dtype: np.dtype) -> dict[str, Any]:
    """Return the merged manifest: summed counts, all inputs, and the other entries on which all manifests agree."""
    manifests = [dataset.manifest or {} for dataset in datasets]
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


def _refuse_repeated(datasets: Sequence[IndexedDataset]) -> None:
    files = [os.path.realpath(dataset_path(dataset.prefix, ".bin")) for dataset in datasets]
    counts = Counter(files)
    for dataset, file in zip(datasets, files, strict=True):
        if (count := counts[file]) > 1:
            hint = "name each dataset once (its .idx, not its .bin too)"
            raise UserError(f"{dataset.prefix} is given {count} times; {hint}")


def _refuse_mixed_ends(datasets: Sequence[IndexedDataset]) -> None:
    first = datasets[0]
    for other in datasets:
        if other.closing_tokens != first.closing_tokens:
            closed, plain = (first, other) if first.closing_tokens else (other, first)
            raise UserError(
                f"{closed.prefix} was made with --append-eod, but {plain.prefix} without it, or no manifest says so; "
                "preprocess one of them again, or give both to --data-path as they are"
            )


def _refuse_mixed_tokenizers(datasets: Sequence[IndexedDataset]) -> None:
    made_by = [(dataset.prefix, entry(dataset.manifest, "tokenizer")) for dataset in datasets]
    (first_prefix, first), *others = [made for made in made_by if made[1].get("fingerprint") is not None] or made_by[:1]
    for prefix, by in others:
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

    `--split` then divides each kind of text alike. The sequences of a document stay together and in order. Calls
    `advance` with the bytes of .bin read since the last call; where there is a manifest they are read twice, first for
    their SHA-256. Raises `UserError` for a damaged dataset and for an output that exists.
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
        if manifest is not None:
            manifest = {key: value for key, value in manifest.items() if key not in ("files", "partition", PATH)}
            manifest |= {"shuffled": seed, "version": megatron_ddrp.__version__} | path_entry([prefix], output_prefix)
        output.publish([manifest])
    return IndexedDataset(output_prefix)


SAME = ("json_key", "append_eod", "sentence_splitter")
"""Manifest entries on which all parts must agree, beside the tokenizer."""

Manifest = Mapping[str, Any]


def in_order_of_parts(datasets: Sequence[IndexedDataset]) -> list[IndexedDataset] | None:
    """Return the datasets in the order of their parts; None where none is a part.

    Raises `UserError` for datasets of which only some are parts, for parts of different runs, and for a part that is
    missing or there twice.
    """
    first = next((dataset for dataset in datasets if _part(dataset)), None)
    if first is None:
        return None
    for dataset in datasets:
        if reason := _foreign(first, dataset):
            raise UserError(reason)
    _refuse_incomplete(datasets)
    return sorted(datasets, key=lambda dataset: _part(dataset)["part"])


def _part(dataset: IndexedDataset) -> dict[str, Any]:
    return entry(dataset.manifest, "partition")


def _foreign(first: IndexedDataset, other: IndexedDataset) -> str:
    """Return why two datasets, of which the first is a part, are not parts of one run; empty where they are."""
    part, other_part = _part(first), _part(other)
    is_part = f"{first.prefix} is part {part['part']} of {part['of']}, but {other.prefix}"
    if not other_part:
        return f"{is_part} is not a part of such a run; merge the parts first, then their result with this dataset"
    if part["of"] != other_part["of"]:
        return f"{is_part} part {other_part['part']} of {other_part['of']}; give the parts of one run"
    again = "preprocess one of them again"
    if part["inputs"] != other_part["inputs"]:
        return (
            f"{first.prefix} and {other.prefix} were made from different input files, by their names or sizes; {again}"
        )
    for key in SAME:
        if (value := (first.manifest or {}).get(key)) != (other_value := (other.manifest or {}).get(key)):
            return f"{first.prefix} was made with {key} {value}, but {other.prefix} with {other_value}; {again}"
    return ""


def _refuse_incomplete(datasets: Sequence[IndexedDataset]) -> None:
    numbers, of = [_part(dataset)["part"] for dataset in datasets], _part(datasets[0])["of"]
    for number, count in sorted(Counter(numbers).items()):
        if count > 1:
            twice = " and ".join(dataset.prefix for dataset in datasets if _part(dataset)["part"] == number)
            raise UserError(f"part {number} of {of} is given {count} times, as {twice}; give it once")
    if missing := [number for number in range(1, of + 1) if number not in numbers]:
        again = f"megatron-ddrp preprocess … --partition {missing[0]}/{of}"
        raise UserError(f"parts {missing} of {of} are not given; add what exists, or make it: {again}")


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
