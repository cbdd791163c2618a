"""All faults of an indexed dataset, in words: those that would stop a reader, and those that a reader cannot detect.

The index is checked alone (dataset_index.py), then against the .bin; then both against the manifest: counts,
tokenizer, SHA-256. Ids are checked against the vocabulary. Without a SHA-256 in a manifest two faults cannot be
detected: an id that changed into another valid id, and a border between two documents that moved without crossing
another. Memory does not grow with the dataset.
"""

from __future__ import annotations

import hashlib
import os
from bisect import bisect_right
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from megatron_ddrp.data.atomic import AnyPath
from megatron_ddrp.data.dataset.dataset_index import (
    MEND,
    DatasetIndex,
    dataset_path,
    file_size,
    first_faults,
    index_faults,
    read_header,
)
from megatron_ddrp.data.dataset.indexed_dataset import IndexedDataset, token_chunks
from megatron_ddrp.data.dataset.manifest import entry, read_manifest, tokenizer_entry, tokenizer_name
from megatron_ddrp.data.sealed import Advance, file_sha256, silent
from megatron_ddrp.data.tokenizers.tokenizer import Tokenizer
from megatron_ddrp.errors import WRONG_ARGUMENTS, UserError


def verify(prefix: AnyPath, tokenizer: Tokenizer | None = None, advance: Advance = silent) -> Iterator[str]:
    """Yield one line per fault of a dataset: file, place, value found and value expected.

    Ids are checked against `tokenizer`, otherwise against the number of pieces in the manifest, otherwise only for
    being negative. Calls `advance` with the bytes of the .bin read since the last call. Raises `UserError` if there is
    no index.
    """
    index_path, bin_path, manifest_path = (dataset_path(prefix, suffix) for suffix in (".idx", ".bin", ".json"))
    size = file_size(index_path)
    index, manifest = None, {}
    try:
        manifest = read_manifest(prefix) or {}
    except UserError as error:
        yield str(error)
    made_by = entry(manifest, "tokenizer")
    if tokenizer is not None and (fault := _other_tokenizer(made_by, tokenizer)):
        yield f"{manifest_path}: {fault}"
    try:
        faults = list(read_header(index_path).faults(size))
        yield from (f"{index_path}: {fault}" for fault in faults)
        index = None if faults else DatasetIndex(index_path)
    except UserError as error:
        yield str(error)
    if index is not None:
        yield from (f"{index_path}: {fault}" for fault in index_faults(index))
        yield from (f"{manifest_path}: {fault}" for fault in _wrong_counts(index, manifest))
    yield from _wrong_hash(manifest, index_path, lambda: file_sha256(index_path))
    try:
        size = file_size(bin_path)
    except UserError as error:
        yield str(error)
        return
    if index is None:
        yield from _wrong_hash(manifest, bin_path, lambda: file_sha256(bin_path))
        return
    yield from (f"{bin_path}: {fault}" for fault in index.faults_of_bin(size))
    vocab_size = tokenizer.vocab_size if tokenizer is not None else made_by.get("vocab_size")
    digest, known = hashlib.sha256(), vocab_size if isinstance(vocab_size, int) else None
    yield from (f"{bin_path}: {fault}" for fault in _wrong_ids(index, bin_path, known, digest, advance))
    yield from _wrong_hash(manifest, bin_path, digest.hexdigest)


def refuse_wrong_sums(prefix: AnyPath, manifest: dict[str, Any], bin_sha256: str) -> None:
    """Raise `UserError` for the first file that differs from its SHA-256 in the manifest, if the manifest has one.

    Copies need it: their new checksums would hide the damage.
    """
    index_path, bin_path = dataset_path(prefix, ".idx"), dataset_path(prefix, ".bin")
    of_index = _wrong_hash(manifest, index_path, lambda: file_sha256(index_path))
    for fault in chain(of_index, _wrong_hash(manifest, bin_path, lambda: bin_sha256)):
        raise UserError(f"{fault}; {MEND}, and see where by megatron-ddrp dataset verify")


def check_sums(prefix: AnyPath, advance: Advance = silent) -> None:
    """Compare `PREFIX.bin` and `PREFIX.idx` with the SHA-256 in the manifest.

    Raises `UserError` for the first file that differs, and with exit code 2 if the manifest is missing or has no sums.
    Calls `advance` with the bytes read since the last call.
    """
    manifest, manifest_path = read_manifest(prefix), dataset_path(prefix, ".json")
    recorded = {path: _recorded_sum(manifest, path) for path in (dataset_path(prefix, s) for s in (".bin", ".idx"))}
    if None in recorded.values():
        reason = "there is no such file" if manifest is None else "it holds no SHA-256"
        raise UserError(
            f"--verify-data needs the sums in {manifest_path}, but {reason}; leave the flag out, or preprocess again",
            WRONG_ARGUMENTS,
        )
    for path, expected in recorded.items():
        file_size(path)
        try:
            found = file_sha256(path, advance)
        except OSError as error:
            raise UserError(f"{path}: cannot be read: {error.strerror}; {MEND}") from None
        if found != expected:
            raise UserError(
                f"{path}: SHA-256 {found[:12]}…, but {manifest_path} says {str(expected)[:12]}…: damaged, or "
                f"changed since preprocessing; {MEND}; megatron-ddrp dataset verify tells more"
            )


def open_dataset(prefix: str, tokenizer: Tokenizer) -> IndexedDataset:
    """Open a dataset. Raises `UserError` if its manifest, or without one its beginning, is of another tokenizer."""
    check_tokenizer(prefix, tokenizer)
    dataset = IndexedDataset(prefix)
    if dataset.manifest is None:
        check_ids(prefix, next(dataset.chunks(), ()), tokenizer.vocab_size)
    return dataset


def check_ids(prefix: str, ids: ArrayLike, vocab_size: int) -> None:
    """Refuse ids of a dataset outside the vocabulary, wherever they are read."""
    found = np.asarray(ids)
    if found.size and (found.min() < 0 or found.max() >= vocab_size):
        raise UserError(
            f"{prefix}: token ids from {found.min()} to {found.max()}, but the vocabulary has {vocab_size} pieces; "
            "give the vocabulary that the dataset was preprocessed with, or preprocess again"
        )


def check_tokenizer(prefix: AnyPath, tokenizer: Tokenizer) -> None:
    """Refuse a dataset of another tokenizer, by the fingerprint in its manifest.

    A dataset without a manifest is accepted; its readers still refuse ids outside the vocabulary.
    """
    if fault := _other_tokenizer(entry(read_manifest(prefix), "tokenizer"), tokenizer):
        raise UserError(
            f"{dataset_path(prefix, '.json')}: the dataset was {fault}; give the vocabulary and --tokenizer-type that "
            "it was preprocessed with, or preprocess again"
        )


def _other_tokenizer(made_by: dict[str, Any], tokenizer: Tokenizer) -> str | None:
    if made_by.get("fingerprint") in (None, tokenizer.fingerprint):
        return None
    given = tokenizer_name(tokenizer_entry(tokenizer))
    return f"made by tokenizer {tokenizer_name(made_by)}, but the tokenizer given is {given}"


def _wrong_ids(index: DatasetIndex, path: Path, vocab_size: int | None, digest: Any, advance: Advance) -> Iterator[str]:
    """Yield lines about ids outside the vocabulary; afterwards `digest` covers every byte of `PREFIX.bin`.

    Calls `advance` with the bytes read since the last call.
    """
    width, most = index.dtype.itemsize, np.iinfo(np.int64).max if vocab_size is None else vocab_size - 1
    expected = "expected none below 0" if vocab_size is None else f"expected 0 to {most}"

    def places_and_ids() -> Iterator[np.ndarray]:  # [ids, 2] each
        begin = 0
        for chunk in token_chunks(path, index.dtype):
            digest.update(chunk.data)
            if int(chunk.min()) < 0 or int(chunk.max()) > most:
                places = np.flatnonzero((chunk < 0) | (chunk > most))
                yield np.stack([begin + places, chunk[places].astype(np.int64)], axis=1)
            begin += len(chunk)
            advance(chunk.nbytes)

    def words(place_and_id: np.ndarray) -> str:
        place, token = place_and_id.tolist()
        # bisect reads a few of the pointers; numpy would copy all of them.
        sequence = bisect_right(index.pointers, place * width) - 1
        inside = "" if sequence < 0 else f" (of sequence {sequence})"
        return f"token {place}{inside} is id {token}, {expected}"

    yield from first_faults("ids outside the vocabulary", places_and_ids(), words)
    if rest := file_size(path) % width:
        with open(path, "rb") as stream:
            stream.seek(-rest, os.SEEK_END)
            digest.update(stream.read())


def _wrong_counts(index: DatasetIndex, manifest: dict[str, Any]) -> Iterator[str]:
    found: dict[str, Any] = {
        "documents": len(index.document_indices) - 1,
        "sequences": len(index),
        "tokens": index.bin_bytes // index.dtype.itemsize,
        "dtype": index.dtype.name,
    }
    for key, value in found.items():
        if manifest.get(key, value) != value:
            yield f"{key} {manifest[key]}, but the index says {value}"


def _wrong_hash(manifest: dict[str, Any], path: Path, digest: Callable[[], str]) -> Iterator[str]:
    expected = _recorded_sum(manifest, path)
    if expected is not None and (found := digest()) != expected:
        yield f"{path}: SHA-256 {found[:12]}…, but its manifest says {str(expected)[:12]}…: changed since then"


def _recorded_sum(manifest: dict[str, Any] | None, path: Path) -> Any:
    """Return the SHA-256 of a dataset's file from its manifest, or None if the manifest lacks it."""
    return entry(entry(manifest, "files"), path.suffix.removeprefix(".")).get("sha256")
