"""All that is wrong with an indexed dataset, in words: what a reader would stumble over, and what it would not see.

The index is checked on its own (index_faults.py), then against the .bin, then both against the manifest: counts,
tokenizer, SHA-256. Ids are checked against the vocabulary. Where no manifest has a SHA-256, an id that became another
one of the vocabulary, and a border between two documents that moved without crossing another, cannot be told from what
was meant. Memory does not grow with the dataset.
"""

from __future__ import annotations

import hashlib
import os
from bisect import bisect_right
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from megatron_ddrp.data.dataset.dataset_index import MEND, DatasetIndex, dataset_path, file_size, read_header
from megatron_ddrp.data.dataset.index_faults import FaultList, index_faults
from megatron_ddrp.data.dataset.indexed_dataset import token_chunks
from megatron_ddrp.data.dataset.manifest import file_sha256, read_manifest
from megatron_ddrp.data.tokenizers.tokenizer import Tokenizer
from megatron_ddrp.errors import WRONG_ARGUMENTS, UserError


def verify(
    prefix: str | os.PathLike[str],
    tokenizer: Tokenizer | None = None,
    advance: Callable[[int], object] = lambda size: None,
) -> Iterator[str]:
    """Everything wrong with a dataset, a line each: the file, the place, what was found and what was expected.

    Ids are checked against `tokenizer`, or else against the number of pieces in the manifest, or else for being
    negative. `advance` is told the bytes of the .bin that were read. Raises `UserError` when there is no index.
    """
    index_path, bin_path = dataset_path(prefix, ".idx"), dataset_path(prefix, ".bin")
    size = file_size(index_path)
    try:
        manifest = read_manifest(prefix) or {}
    except UserError as error:
        manifest = {}
        yield str(error)
    manifest_path = dataset_path(prefix, ".json")
    files = _entry(manifest, "files")
    made_by = _entry(manifest, "tokenizer")
    if tokenizer is not None and made_by.get("fingerprint", tokenizer.fingerprint) != tokenizer.fingerprint:
        yield (
            f"{manifest_path}: made by tokenizer {describe_tokenizer(made_by)}, but the tokenizer given is "
            f"{tokenizer.tokenizer_type} {tokenizer.fingerprint[:12]} of {tokenizer.vocab_size} pieces"
        )
    index = None
    try:
        faults = list(read_header(index_path).faults(size))
        yield from (f"{index_path}: {fault}" for fault in faults)
        index = None if faults else DatasetIndex(index_path)
    except UserError as error:
        yield str(error)
    if index is not None:
        yield from (f"{index_path}: {fault}" for fault in index_faults(index))
        yield from (f"{manifest_path}: {fault}" for fault in _wrong_counts(index, manifest))
    yield from _wrong_hash(index_path, _entry(files, "idx"), lambda: file_sha256(index_path))
    try:
        size = file_size(bin_path)
    except UserError as error:
        yield str(error)
        return
    if index is None:
        yield from _wrong_hash(bin_path, _entry(files, "bin"), lambda: file_sha256(bin_path))
        return
    yield from (f"{bin_path}: {fault}" for fault in index.faults_of_bin(size))
    vocab_size = tokenizer.vocab_size if tokenizer is not None else made_by.get("vocab_size")
    pieces = vocab_size if isinstance(vocab_size, int) else None
    digest = hashlib.sha256()
    yield from (f"{bin_path}: {fault}" for fault in _foreign_ids(index, bin_path, pieces, digest.update, advance))
    yield from _wrong_hash(bin_path, _entry(files, "bin"), digest.hexdigest)


def wrong_sums(prefix: str | os.PathLike[str], manifest: dict[str, Any], bin_sha256: str) -> Iterator[str]:
    """Yield which of the two files differ from the SHA-256 in the manifest, as far as it holds them."""
    files, index_path = _entry(manifest, "files"), dataset_path(prefix, ".idx")
    yield from _wrong_hash(index_path, _entry(files, "idx"), lambda: file_sha256(index_path))
    yield from _wrong_hash(dataset_path(prefix, ".bin"), _entry(files, "bin"), lambda: bin_sha256)


def check_sums(prefix: str | os.PathLike[str], advance: Callable[[int], object] = lambda size: None) -> None:
    """Compare `PREFIX.bin` and `PREFIX.idx` with the SHA-256 in the manifest.

    Raises `UserError` for the first that differs, and with exit code 2 where the manifest is missing or holds no sums.
    Calls `advance` with the bytes that were read since the last call.
    """
    manifest, manifest_path = read_manifest(prefix), dataset_path(prefix, ".json")
    files = _entry(manifest or {}, "files")
    recorded = {suffix: _entry(files, suffix).get("sha256") for suffix in ("bin", "idx")}
    if None in recorded.values():
        reason = "there is no such file" if manifest is None else "it holds no SHA-256"
        raise UserError(
            f"--verify-data needs the sums in {manifest_path}, but {reason}; leave the flag out, or preprocess again",
            WRONG_ARGUMENTS,
        )
    for suffix, expected in recorded.items():
        path = dataset_path(prefix, f".{suffix}")
        file_size(path)
        try:
            found = file_sha256(path, advance)
        except OSError as error:
            raise UserError(f"{path}: cannot be read: {error.strerror}; {MEND}") from None
        if found != expected:
            raise UserError(
                f"{path}: SHA-256 {found[:12]}…, but {manifest_path} says {str(expected)[:12]}…: damaged, or "
                f"changed since preprocessing; {MEND}; tools/dataset.py verify tells more"
            )


def describe_tokenizer(made_by: dict[str, Any]) -> str:
    """A manifest's tokenizer in a few words."""
    pieces = made_by.get("vocab_size", "an unknown number of")
    return f"{made_by.get('type', 'of unknown type')} {str(made_by.get('fingerprint'))[:12]} of {pieces} pieces"


def _foreign_ids(
    index: DatasetIndex,
    path: Path,
    vocab_size: int | None,
    update: Callable[[Any], object],
    advance: Callable[[int], object],
) -> Iterator[str]:
    """Ids outside the vocabulary. All bytes of the file go through `update`."""
    most = np.iinfo(np.int64).max if vocab_size is None else vocab_size - 1
    expected = "expected none below 0" if vocab_size is None else f"expected 0 to {most}"
    foreign = FaultList("ids outside the vocabulary")
    begin = 0
    for chunk in token_chunks(path, index.dtype):
        update(chunk)
        if int(chunk.min()) < 0 or int(chunk.max()) > most:

            def describe(k: int, chunk: np.ndarray = chunk, begin: int = begin) -> str:
                # bisect looks at a few of the pointers, where numpy would copy all of them.
                sequence = bisect_right(index.pointers, (begin + k) * index.dtype.itemsize) - 1
                inside = "" if sequence < 0 else f" (of sequence {sequence})"
                return f"token {begin + k}{inside} is id {chunk[k]}, {expected}"

            yield from foreign.lines(np.flatnonzero((chunk < 0) | (chunk > most)), describe)
        begin += len(chunk)
        advance(chunk.nbytes)
    yield from foreign.rest()
    if rest := file_size(path) % index.dtype.itemsize:
        with open(path, "rb") as stream:
            stream.seek(-rest, os.SEEK_END)
            update(stream.read())


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


def _wrong_hash(path: Path, recorded: dict[str, Any], digest: Callable[[], str]) -> Iterator[str]:
    expected = recorded.get("sha256")
    if expected is not None and (found := digest()) != expected:
        yield f"{path}: SHA-256 {found[:12]}…, but its manifest says {str(expected)[:12]}…: changed since then"


def _entry(manifest: dict[str, Any], key: str) -> dict[str, Any]:
    """A dictionary inside a manifest; empty where there is none."""
    value = manifest.get(key)
    return value if isinstance(value, dict) else {}
